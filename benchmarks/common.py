"""Shared by the benchmarks: prompts, where a figure came from, and the engines that are timed.

Every engine lives in a process of its own that sleeps while another is timed, so thread pools and
caches of one do not slow another down. All take the same token ids and answer with the same
record, see `Timing`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ROOT / "benchmarks" / "prompts.jsonl"

CODE_CLASSES = ("code_completion", "humaneval")
"""The classes that "code prompts" means: plain code to go on with, nothing to copy."""

_PACKAGES = ("paceline", "torch", "numpy", "numba", "transformers", "safetensors", "tokenizers")

try:  # An installed package is used as it is; a bare checkout works too.
    import paceline  # noqa: F401
except ModuleNotFoundError:
    sys.path.insert(0, str(ROOT / "src"))


@dataclass(frozen=True)
class Prompt:
    """One line of the prompt file."""

    name: str
    kind: str
    text: str


def load_prompts(
    path: Path = PROMPTS, *, kinds: Iterable[str] | None = None, per_class: int | None = None
) -> list[Prompt]:
    """The first `per_class` prompts of each of `kinds` (None: all), in file order.

    Raises:
        SystemExit: a class has no prompts (lists the classes there are).
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    known = list(dict.fromkeys(row["class"] for row in rows))
    wanted = list(kinds) if kinds is not None else known
    if unknown := [kind for kind in wanted if kind not in known]:
        raise SystemExit(f"no prompts of class {', '.join(unknown)}; there are {', '.join(known)}")
    out = []
    for kind in wanted:
        of_kind = [row for row in rows if row["class"] == kind][:per_class]
        out += [Prompt(row["id"], kind, row["prompt"]) for row in of_kind]
    return out


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def checkpoint_hash(folder: Path) -> str:
    """SHA-256 over names and contents of a checkpoint's configuration, tokenizer and tensors."""
    digest = hashlib.sha256()
    names = ["config.json", "tokenizer.json", *(p.name for p in folder.glob("*.safetensors"))]
    for name in sorted(names):
        if (folder / name).exists():
            digest.update(f"{name} {file_hash(folder / name)}\n".encode())
    return digest.hexdigest()


def provenance(*, model: Path, prompts: Path, device: str = "cpu") -> dict[str, Any]:
    """What a reader needs to judge or repeat a figure: code, versions, machine, inputs."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    return {
        "command": [Path(sys.argv[0]).name, *map(shown, sys.argv[1:])],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **commit(),
        "versions": versions,
        "cpu": _cpu_model(),
        "cores": _usable_cores(),
        "device": device,
        "load_average_before": round(load[0], 2) if load else None,
        "platform": platform.system() + " " + platform.machine(),
        "checkpoint_sha256": checkpoint_hash(model),
        "prompts_sha256": file_hash(prompts),
    }


def shown(argument: str) -> str:
    """A command line's argument as others may read it: of a path elsewhere only the last part."""
    path = Path(argument)
    if not path.is_absolute():
        return argument
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def commit() -> dict[str, Any]:
    """Commit, and whether anything that a figure depends on differs from it."""

    def git(*arguments: str) -> str | None:
        if shutil.which("git") is None:
            return None
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results")
    return {
        "commit": git("rev-parse", "HEAD"),
        "clean": None if status is None else status == "",
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass
class Timing:
    """One call of one engine on one batch.

    Attributes:
        token_ids: emitted ids per prompt.
        first: seconds from the call until every sequence has its first token.
        total: seconds from the call until the last token.
        timed_tokens: tokens emitted in ``total - first``.
        speculation: counts summed over the batch; empty where nothing was drafted.
    """

    token_ids: list[list[int]]
    first: float
    total: float
    timed_tokens: int
    speculation: dict[str, Any] = field(default_factory=dict)

    @property
    def decode_seconds(self) -> float:
        """Time of the decode phase."""
        return self.total - self.first


class Engine:
    """An engine in a child process: `start` it, `run` batches, `close` it."""

    def __init__(self, name: str, factory: Callable[..., Any], **arguments: Any) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(there, factory, arguments), name=name, daemon=True
        )
        self._process.start()
        there.close()
        self.about: dict[str, Any] = self._answer()

    def run(self, prompts: Sequence[Sequence[int]], **arguments: Any) -> Timing:
        """Time one batch."""
        return Timing(**self.call("run", prompts=[list(p) for p in prompts], **arguments))

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the child's object and return what it returns."""
        self._here.send((method, arguments))
        return self._answer()

    def close(self) -> None:
        """End the process."""
        if self._process.is_alive():
            self._here.send(None)
            self._process.join(30)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()
        self._here.close()

    def _answer(self) -> Any:
        try:
            kind, value = self._here.recv()
        except EOFError:
            raise RuntimeError(f"the process of {self.name} died") from None
        if kind == "error":
            raise RuntimeError(f"{self.name}: {value}")
        return value


def _serve(pipe: Connection, factory: Callable[..., Any], arguments: dict[str, Any]) -> None:
    try:
        served = factory(**arguments)
        pipe.send(("ok", served.about))
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        raise
    try:
        while (message := pipe.recv()) is not None:
            method, given = message
            try:
                value = getattr(served, method)(**given)
                pipe.send(("ok", asdict(value) if isinstance(value, Timing) else value))
            except Exception as error:
                pipe.send(("error", f"{type(error).__name__}: {error}"))
    finally:
        close = getattr(served, "close", None)
        if close is not None:
            close()


class PacelineEngine:
    """Paceline's public door, one `LLM` for each draft length, so that none pays for another's."""

    def __init__(
        self,
        *,
        model: str,
        draft_lengths: Sequence[int],
        max_num_seqs: int,
        max_seq_len: int,
        num_threads: int | None,
        backend: Literal["auto", "torch", "fused"],
    ) -> None:
        import torch

        from paceline import LLM

        self._llms = {
            drafts: LLM(
                model,
                num_drafts=drafts,
                max_num_seqs=max_num_seqs,
                max_seq_len=max_seq_len,
                num_threads=num_threads,
                backend=backend,
                prefix_cache=False,
            )
            for drafts in draft_lengths
        }
        self.about: dict[str, Any] = {
            "llm": repr(next(iter(self._llms.values()))).replace(f"{ROOT}/", ""),
            "torch_threads": torch.get_num_threads(),
        }

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Prompts as the ids that `LLM` makes of them, role markers being markers."""
        from paceline import SamplingParams

        llm = next(iter(self._llms.values()))
        done = llm.generate(texts, SamplingParams(max_tokens=1), allow_special=True)
        return [list(result.prompt_token_ids) for result in done]

    def run(
        self, *, prompts: list[list[int]], max_tokens: int, num_drafts: int, ignore_eos: bool = True
    ) -> Timing:
        """Stream one batch and keep the clock; see `Timing`."""
        from paceline import SamplingParams
        from paceline.types import SpeculationStats

        params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
        results: dict[int, Any] = {}
        started: set[int] = set()
        first, timed = 0.0, 0
        begin = time.perf_counter()
        for chunk in self._llms[num_drafts].stream(prompts, params):
            started.add(chunk.index)
            if chunk.result is not None:
                results[chunk.index] = chunk.result
            if first:
                timed += len(chunk.token_ids)
            elif len(started) == len(prompts):
                first = time.perf_counter() - begin
        total = time.perf_counter() - begin
        failed = [r.error for r in results.values() if r.error]
        if failed:
            raise RuntimeError("; ".join(failed))
        stats = SpeculationStats()
        for result in results.values():
            stats.add(result.speculation)
        return Timing(
            token_ids=[list(results[i].token_ids) for i in range(len(prompts))],
            first=first,
            total=total,
            timed_tokens=timed,
            speculation=counts(stats),
        )


def counts(stats: Any) -> dict[str, Any]:
    """The raw counts of a `SpeculationStats`, from which every ratio follows."""
    return {
        "num_steps": stats.num_steps,
        "num_draft_steps": stats.num_draft_steps,
        "num_drafted": stats.num_drafted,
        "num_accepted": stats.num_accepted,
        "drafted_at": list(stats.drafted_at),
        "accepted_at": list(stats.accepted_at),
        "reached_at": list(stats.reached_at),
    }


def add_counts(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Sum `counts` of several runs; lists are added place by place.

    Results stored before `reached_at` was counted go without it, and so does a sum with one.
    """
    rows = list(rows)
    total: dict[str, Any] = {
        "num_steps": 0,
        "num_draft_steps": 0,
        "num_drafted": 0,
        "num_accepted": 0,
        "drafted_at": [],
        "accepted_at": [],
        "reached_at": [],
    }
    if not all("reached_at" in row for row in rows):
        del total["reached_at"]
    for row in rows:
        for name, value in row.items():
            if name not in total:
                continue
            if isinstance(value, list):
                mine = total[name]
                mine.extend([0] * (len(value) - len(mine)))
                for at, count in enumerate(value):
                    mine[at] += count
            else:
                total[name] += value
    return total


def acceptance(total: dict[str, Any]) -> dict[str, Any]:
    """Counts and the ratios that docs/metrics.md defines, of summed `counts`."""
    drafted, accepted = total["drafted_at"], total["accepted_at"]
    steps = total["num_draft_steps"]
    # Where steps of different widths were summed without this count, more than did reach a place.
    reached = total.get("reached_at", [steps, *accepted[:-1]])
    at_least = [steps, *accepted]
    return {
        **total,
        "mean_acceptance_length": 1 + total["num_accepted"] / steps if steps else 1.0,
        "acceptance_rate": (
            total["num_accepted"] / total["num_drafted"] if total["num_drafted"] else 0.0
        ),
        "by_position": [a / d if d else 0.0 for a, d in zip(accepted, drafted, strict=True)],
        "by_position_conditional": [
            a / min(r, d) if min(r, d) else 0.0
            for a, r, d in zip(accepted, reached, drafted, strict=False)
        ],
        "histogram": [more - less for more, less in zip(at_least, [*at_least[1:], 0], strict=True)],
    }


class TransformersEngine:
    """`transformers`' generate, greedy, fp32, on an unquantised copy of the checkpoint."""

    def __init__(self, *, model: str) -> None:
        import torch
        from transformers import DeepseekV4ForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        with tempfile.TemporaryDirectory() as folder:
            write_unquantised(Path(model), Path(folder))
            self._model = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        # Without an end id nothing stops early, as in the other engines.
        self._model.generation_config.eos_token_id = None
        self.about: dict[str, Any] = {"dtype": "float32"}

    def run(self, *, prompts: list[list[int]], max_tokens: int, num_threads: int) -> Timing:
        """Generate one batch of prompts of equal length, so that nothing is padded."""
        import torch
        from transformers.generation.streamers import BaseStreamer

        class Clock(BaseStreamer):
            def __init__(self) -> None:
                self.times: list[float] = []

            def put(self, value: Any) -> None:
                self.times.append(time.perf_counter())

            def end(self) -> None:
                return None

        torch.set_num_threads(num_threads)
        ids = torch.tensor(prompts)
        clock = Clock()
        begin = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
                streamer=clock,
            )
        # The first time is that of the prompt, which generate puts before it computes.
        _, first, *_ = clock.times
        emitted = out[:, ids.shape[1] :].tolist()
        return Timing(
            token_ids=emitted,
            first=first - begin,
            total=clock.times[-1] - begin,
            timed_tokens=sum(len(row) for row in emitted) - len(emitted),
        )


def write_unquantised(checkpoint: Path, out: Path) -> None:
    """Write the trunk of a checkpoint without quantised tensors, in DeepSeek's names and fp32.

    Values are exact: fp4 and fp8 decode into fp32 without rounding. `transformers` reads the
    result; the draft head is left out, since it has no place for it.
    """
    import torch
    from safetensors.torch import save_file

    from paceline.models.deepseek_v4.checkpoint import load_weights

    weights = load_weights(checkpoint, dtype=torch.float32, want_drafter=False)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        stem, found, part = name.rpartition(".ffn.experts.")
        if found:
            for expert, rows in enumerate(tensor):
                tensors[f"{stem}.ffn.experts.{expert}.{part}.weight"] = rows.contiguous()
        else:
            tensors[name] = tensor.contiguous()
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    for name in ("quantization_config", "expert_dtype"):
        config.pop(name, None)
    config["torch_dtype"] = "float32"
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


class LlamaServer:
    """llama.cpp's server with one number of threads and drafts; speaks its own HTTP interface."""

    def __init__(
        self,
        *,
        server: str,
        gguf: str,
        gguf_mtp: str | None,
        num_drafts: int,
        num_threads: int,
        max_num_seqs: int,
        max_seq_len: int,
        extra: Sequence[str] = (),
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [server, "-m", gguf, "--host", "127.0.0.1", "--port", str(port)]
        command += ["-t", str(num_threads), "-tb", str(num_threads), "-np", str(max_num_seqs)]
        command += ["-c", str(max_seq_len * max_num_seqs), "--no-webui"]
        if num_drafts:
            if gguf_mtp is None:
                raise ValueError("drafts need --gguf-mtp")
            command += ["--spec-type", "draft-mtp", "-md", gguf_mtp]
            command += ["--spec-draft-n-max", str(num_drafts), "-td", str(num_threads)]
        command += list(extra)
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        self._url = f"http://127.0.0.1:{port}"
        self._wait()
        version = subprocess.run([server, "--version"], capture_output=True, text=True, check=False)
        self.about: dict[str, Any] = {
            "threads": num_threads,
            "version": (version.stderr or version.stdout).strip().splitlines()[:1],
            "options": [shown(option) for option in command[1:]],
        }

    def run(self, *, prompts: list[list[int]], max_tokens: int) -> Timing:
        """Send the prompts at once; times are the server's own, so HTTP costs it nothing."""
        answers: list[dict[str, Any] | None] = [None] * len(prompts)

        def ask(at: int) -> None:
            answers[at] = self._post(
                "/completion",
                {
                    "prompt": prompts[at],
                    "n_predict": max_tokens,
                    "temperature": 0.0,
                    "ignore_eos": True,
                    "cache_prompt": False,
                    "return_tokens": True,
                },
            )

        begin = time.perf_counter()
        threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall = time.perf_counter() - begin
        done = [answer for answer in answers if answer is not None]
        if len(done) != len(prompts):
            raise RuntimeError(f"a request failed; the server said: {self._said()}")
        timings = [answer["timings"] for answer in done]
        decode = max(t["predicted_ms"] for t in timings) / 1e3
        drafted = sum(t.get("draft_n", 0) for t in timings)
        accepted = sum(t.get("draft_n_accepted", 0) for t in timings)
        return Timing(
            token_ids=[list(answer["tokens"]) for answer in done],
            first=max(wall - decode, 0.0),
            total=wall,
            timed_tokens=sum(t["predicted_n"] - 1 for t in timings),
            speculation={"num_drafted": drafted, "num_accepted": accepted} if drafted else {},
        )

    def close(self) -> None:
        """Stop the server."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            value: dict[str, Any] = json.load(answer)
        return value

    def _wait(self, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"llama-server ended at once: {self._said()}")
            try:
                with urllib.request.urlopen(self._url + "/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        self.close()
        raise RuntimeError(f"llama-server did not get ready in {seconds:.0f} seconds")

    def _said(self) -> str:
        self._log.flush()
        self._log.seek(0)
        return self._log.read()[-2000:]


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median and spread; the best value is not of interest."""
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "low": ordered[0],
        "high": ordered[-1],
        "values": list(values),
    }


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading ids that are equal."""
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return min(len(a), len(b))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Plain text columns, the first to the left and the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(header))]
    out = []
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        out.append("  ".join(cells).rstrip())
    return "\n".join(out)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
