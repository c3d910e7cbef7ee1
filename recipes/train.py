"""Train the bundled model on one GPU, in legs that stop and resume.

    python3 recipes/train.py --smoke --data .train --work /tmp/train --out DIR
    python3 recipes/train.py --data .train --work /tmp/train --minutes 17 --stop-after 9.2
    python3 recipes/train.py --data .train --work /tmp/train --minutes 17 --stop-after 8.7 \\
        --final --out DIR

Batches depend only on the seed and the step number, and ``state.pt`` in ``--work`` holds weights,
optimiser state, step and spent time, so legs join without a seam.  See recipes/README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import evaluate
import export
import torch
import train_model
from tokenizer import read_tokens
from torch import Tensor
from train_model import Model, Shape, balance

START = time.monotonic()


def say(text: str) -> None:
    """One line on stdout, at once."""
    print(f"[{time.monotonic() - START:6.1f}s] {text}", flush=True)


# --- data -------------------------------------------------------------------------------------


def synthetic_tokens(count: int, vocab: int, seed: int) -> Tensor:
    """A learnable stream: each id mostly fixes the next one, with Zipf-like noise."""
    rng = torch.Generator().manual_seed(seed)
    weight = 1.0 / torch.arange(1, vocab + 1)
    noise = torch.multinomial(weight, count, replacement=True, generator=rng)
    follow = torch.randperm(vocab, generator=rng).tolist()
    keep = (torch.rand(count, generator=rng) < 0.7).tolist()
    out, last = [], 0
    for k, n in zip(keep, noise.tolist(), strict=True):
        last = follow[last] if k else n
        out.append(last)
    return torch.tensor(out, dtype=torch.int32)


def load_stream(folder: Path) -> Tensor:
    """The training tokens ``tokens.bin`` or ``tokens.bin.xz`` in ``folder`` as int32."""
    files = sorted(folder.glob("tokens.bin*"))
    if not files:
        raise SystemExit(f"no tokens.bin in {folder}; pack the corpus or give --synthetic N")
    return torch.frombuffer(read_tokens(files[0]), dtype=torch.uint16).to(torch.int32)


class Batches:
    """Rows of ``length + 2`` tokens; which ones is a function of (seed, step) alone."""

    def __init__(self, tokens: Tensor, *, length: int, batch: int, seed: int) -> None:
        self.tokens, self.length, self.batch, self.seed = tokens, length, batch, seed
        self.rows = (tokens.numel() - 2 - length) // length
        if self.rows < batch:
            raise SystemExit(f"{tokens.numel()} tokens do not fill a batch of {batch} x {length}")
        self.per_epoch = self.rows // batch
        self.epoch = -1
        self.span = torch.arange(length + 2, device=tokens.device)

    def get(self, step: int) -> Tensor:
        """int64 ``[batch, length + 2]`` on the tokens' device."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self.epoch:
            rng = torch.Generator().manual_seed(self.seed * 1000003 + epoch)
            shift = int(torch.randint(0, self.length, (), generator=rng))
            order = torch.randperm(self.rows, generator=rng)
            self.starts = (order * self.length + shift).to(self.tokens.device)
            self.epoch = epoch
        starts = self.starts[index * self.batch : (index + 1) * self.batch]
        return self.tokens[starts[:, None] + self.span].long()


# --- optimiser --------------------------------------------------------------------------------


def orthogonalise(x: Tensor) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrices of ``[n, rows, cols]``.

    Quintic coefficients of the Muon optimiser; runs in bf16 on the GPU.
    """
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.transpose(1, 2)
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, b, x, beta=3.4445)
    return x.transpose(1, 2) if tall else x


class Muon:
    """Momentum with orthogonalised updates for matrices, grouped by matrix shape.

    ``items`` are (parameter, matrix shape) pairs; a parameter may hold several matrices.  The
    update's root mean square is 0.2 times the learning rate, as for AdamW.
    """

    def __init__(self, items: list[tuple[Tensor, tuple[int, int]]], *, decay: float) -> None:
        self.decay, self.momentum = decay, 0.95
        self.groups: dict[tuple[int, int], list[Tensor]] = {}
        for p, shape in items:
            self.groups.setdefault(shape, []).append(p)
        self.buffers = {
            shape: torch.zeros(
                sum(p.numel() for p in ps) // (shape[0] * shape[1]), *shape, device=ps[0].device
            )
            for shape, ps in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply one update from the parameters' gradients."""
        for shape, ps in self.groups.items():
            grad = torch.cat([p.grad.reshape(-1, *shape) for p in ps])
            buffer = self.buffers[shape]
            buffer.lerp_(grad, 1 - self.momentum)
            update = orthogonalise(grad.lerp_(buffer, self.momentum))
            update = update.float() * (0.2 * math.sqrt(max(shape)))
            parts = update.split([p.numel() // (shape[0] * shape[1]) for p in ps])
            views = [u.reshape(p.shape) for u, p in zip(parts, ps, strict=True)]
            torch._foreach_mul_(ps, 1 - rate * self.decay)
            torch._foreach_add_(ps, views, alpha=-rate)


def split_parameters(model: Model) -> tuple[list[tuple[Tensor, tuple[int, int]]], list[Any]]:
    """Matrices for Muon with their shapes, and AdamW's groups with relative learning rates."""
    s = model.shape
    heads = {"wq_b": s.head_dim, "wo_a": s.o_lora_rank, "experts_w13": s.moe_intermediate_size}
    muon: list[tuple[Tensor, tuple[int, int]]] = []
    adam: dict[str, list[Tensor]] = {"embed": [], "head": [], "matrix": [], "vector": []}
    for name, p in model.named_parameters():
        part = name.split(".")
        if name == "embed.weight":
            adam["embed"].append(p)
        elif name == "head.weight":
            adam["head"].append(p)
        elif p.ndim < 2 or part[-1] == "ape" or part[-1].endswith("_fn") or "norm" in part[-2]:
            adam["vector"].append(p)
        elif "gate" in part or "weights_proj" in part:
            adam["matrix"].append(p)
        elif "indexer" in part and "wq_b" in part:
            muon.append((p, (s.index_head_dim, s.q_lora_rank)))
        else:
            rows = next((v for k, v in heads.items() if k in part), p.shape[-2])
            if "compressor" in part:
                rows = model.get_submodule(name.rsplit(".", 2)[0]).dim
            muon.append((p, (rows, p.shape[-1])))
    return muon, [
        {"params": adam["embed"], "scale": 2.0, "weight_decay": 0.0},
        {"params": adam["head"], "scale": 1.0, "weight_decay": 0.01},
        {"params": adam["matrix"], "scale": 0.2, "weight_decay": 0.01},
        {"params": adam["vector"], "scale": 1.0, "weight_decay": 0.0},
    ]


def schedule(fraction: float, step: int, warmup: int, flat: float) -> float:
    """Learning rate factor: linear warm-up by step, flat, then linear to 0 at fraction 1."""
    down = 1.0 if fraction < flat else max(0.0, (1 - fraction) / (1 - flat))
    return min(1.0, (step + 1) / max(warmup, 1)) * down


# --- kernels ----------------------------------------------------------------------------------


def check_grouped(shape: Shape, tokens: int) -> bool:
    """Whether the grouped expert product agrees with the dense one (values and gradients)."""
    rng = torch.Generator(device="cuda").manual_seed(0)
    e, d, i, k = (
        shape.n_routed_experts,
        shape.hidden_size,
        shape.moe_intermediate_size,
        shape.num_experts_per_tok,
    )

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", generator=rng)

    x, w13 = normal(tokens, d).bfloat16(), (normal(e, 2 * i, d) * d**-0.5).bfloat16()
    w2, grad = (normal(e, d, i) * i**-0.5).bfloat16(), normal(tokens, d)
    chosen = normal(tokens, e).argsort(1)[:, :k].contiguous()
    weight = torch.rand(tokens, k, device="cuda", generator=rng)
    leaves = [t.requires_grad_() for t in (x, w13, w2, weight)]
    results = []
    for run in (train_model.experts_dense, train_model.experts_grouped):
        out = run(x, chosen, weight, w13, w2, shape.swiglu_limit)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    errors = [
        ((a.float() - b.float()).norm() / a.float().norm()).item()
        for a, b in zip(*results, strict=True)
    ]
    say(f"grouped experts against dense: relative errors {[f'{v:.1e}' for v in errors]}")
    return max(errors) < 2e-2


def check_sinkhorn(shape: Shape) -> bool:
    """Whether the fused Sinkhorn kernel agrees with the plain one."""
    logits = (2 * torch.randn(4099, 4, 4, device="cuda")).requires_grad_()
    grad = torch.randn(4099, 4, 4, device="cuda")
    results = []
    for fused in (False, True):
        out = train_model.sinkhorn(logits, shape.hc_sinkhorn_iters, shape.hc_eps, fused=fused)
        results.append((out, torch.autograd.grad(out, logits, grad)[0]))
    errors = [(a - b).abs().max().item() for a, b in zip(*results, strict=True)]
    say(f"fused Sinkhorn against plain: max errors {[f'{v:.1e}' for v in errors]}")
    return max(errors) < 1e-4


def choose_kernels(model: Model, args: argparse.Namespace) -> None:
    """Turn on the GPU kernels that agree with their plain twins on this machine."""
    grouped, fused = args.moe == "grouped", args.sinkhorn == "fused"
    if model.head.weight.is_cuda:
        for name, check in (("moe", check_grouped), ("sinkhorn", check_sinkhorn)):
            if getattr(args, name) != "auto":
                continue
            try:
                good = check(model.shape, 4096) if name == "moe" else check(model.shape)
            except Exception as error:  # any failure of an optional kernel means: do without it
                say(f"{name} kernel not usable: {type(error).__name__}: {str(error)[:300]}")
                good = False
            grouped, fused = (good, fused) if name == "moe" else (grouped, good)
    say(f"experts: {'grouped' if grouped else 'dense'}, sinkhorn: {'fused' if fused else 'plain'}")
    model.use(grouped=grouped, fused_sinkhorn=fused)


# --- the run ----------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--data", type=Path, help="folder with tokens.* (and heldout.*)")
    p.add_argument("--synthetic", type=int, default=0, help="train on N generated tokens instead")
    p.add_argument("--config", type=Path, help="config.json of another shape")
    p.add_argument("--work", type=Path, required=True, help="folder of state.pt, which is resumed")
    p.add_argument("--out", type=Path, help="write checkpoint, evaluation and log here at the end")
    p.add_argument("--init-from", type=Path, help="start from an exported checkpoint's weights")
    p.add_argument("--minutes", type=float, default=16.0, help="training time over all legs")
    p.add_argument("--steps", type=int, default=0, help="schedule by steps instead of minutes")
    p.add_argument("--stop-after", type=float, default=9.2, help="end this leg, minutes from start")
    p.add_argument("--leg-steps", type=int, default=0, help="end this leg after so many steps")
    p.add_argument("--final", action="store_true", help="finish the schedule within this leg")
    p.add_argument("--smoke", action="store_true", help="30 timed steps, export, exit")
    p.add_argument("--profile", action="store_true", help="with --smoke: table of GPU kernels")
    p.add_argument("--device", default="cuda")
    p.add_argument("--batch", type=int, default=48)
    p.add_argument("--length", type=int, default=1024)
    p.add_argument("--depth", type=int, default=3, help="MTP depths trained")
    p.add_argument("--mtp-weights", type=float, nargs="*", default=[0.3, 0.15, 0.1])
    p.add_argument("--index-weight", type=float, default=0.1)
    p.add_argument("--muon-lr", type=float, default=6e-3)
    p.add_argument("--adam-lr", type=float, default=3e-3)
    p.add_argument("--warmup", type=int, default=150, help="steps")
    p.add_argument("--flat", type=float, default=0.35, help="share of the run before the decay")
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--balance", type=float, default=2e-3, help="router bias step")
    p.add_argument("--qat-from-step", type=int, default=0, help="round experts to fp4 from here on")
    p.add_argument("--moe", choices=("auto", "grouped", "dense"), default="auto")
    p.add_argument("--sinkhorn", choices=("auto", "fused", "plain"), default="auto")
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--no-eval", action="store_true")
    p.add_argument("--seed", type=int, default=1)
    return p.parse_args(argv)


class Run:
    """One leg: model, optimisers, data and the place in the schedule."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        dynamo = torch._dynamo.config
        for name in ("recompile_limit", "cache_size_limit"):
            if hasattr(dynamo, name):
                setattr(dynamo, name, 64)
        cuda = args.device.startswith("cuda")
        shape = Shape()
        if args.config:
            shape = Shape.from_config(json.loads(args.config.read_text()))
        if args.synthetic:
            tokens = synthetic_tokens(args.synthetic, shape.vocab_size, args.seed)
        else:
            tokens = load_stream(args.data)
        say(f"{tokens.numel() / 1e6:.1f}M tokens")
        counts = torch.bincount(tokens.long(), minlength=shape.vocab_size).float()
        if counts.numel() > shape.vocab_size:
            raise SystemExit(f"token id {counts.numel() - 1} >= vocabulary {shape.vocab_size}")
        tokens = tokens.to(args.device)
        self.batches = Batches(tokens, length=args.length, batch=args.batch, seed=args.seed)

        self.model = Model(shape, compute=torch.bfloat16 if cuda else torch.float32)
        if args.init_from:
            self.model.load_state_dict(export.read_checkpoint(args.init_from).state_dict())
        else:
            self.model.initialise(args.seed, counts + 1)
        self.model.to(args.device)
        muon, groups = split_parameters(self.model)
        self.muon = Muon(muon, decay=0.05)
        self.adam = torch.optim.AdamW(
            groups, lr=args.adam_lr, betas=(0.9, 0.95), eps=1e-10, fused=cuda
        )
        self.parameters = list(self.model.parameters())
        self.step, self.spent = 0, 0.0
        log = args.init_from / "train.json" if args.init_from else None
        if log and log.exists():
            past = json.loads(log.read_text())
            self.step, self.spent = past["step"], past["minutes"] * 60
            say(f"weights of step {self.step} without optimiser state")
        self.history: list[dict[str, float]] = []
        self.state_file = args.work / "state.pt"
        args.work.mkdir(parents=True, exist_ok=True)
        if self.state_file.exists() and not args.smoke:
            self.load()
        choose_kernels(self.model, args)
        if cuda and not args.no_compile:
            self.model.compile_parts()
        params = sum(p.numel() for p in self.parameters)
        say(f"{params / 1e6:.1f}M parameters, {self.batches.per_epoch} steps an epoch")

    def load(self) -> None:
        """Continue from ``state.pt``."""
        state = torch.load(self.state_file, map_location="cpu", weights_only=False)
        self.model.load_state_dict(state["model"])
        self.adam.load_state_dict(state["adam"])
        for shape, buffer in state["muon"].items():
            self.muon.buffers[shape].copy_(buffer)
        self.step, self.spent = state["step"], state["spent"]
        self.history = state["history"]
        say(f"resumed at step {self.step}, {self.spent / 60:.2f} min trained")

    def save(self) -> None:
        """Write ``state.pt`` (over a temporary file, so that a kill leaves the old one)."""
        state = {
            "config": self.model.shape.to_config(),
            "model": self.model.state_dict(),
            "adam": self.adam.state_dict(),
            "muon": self.muon.buffers,
            "step": self.step,
            "spent": self.spent,
            "history": self.history,
            "args": {k: str(v) for k, v in vars(self.args).items()},
        }
        part = self.state_file.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.state_file)
        say(f"saved {self.state_file} at step {self.step}")

    def one_step(self, factor: float) -> tuple[Tensor, Tensor]:
        """Forward, backward and update; returns (losses ``[1 + depth + 1]``, gradient norm)."""
        a = self.args
        self.model.quantise = self.step >= a.qat_from_step
        tokens = self.batches.get(self.step)
        losses, index_loss, loads = self.model.losses(tokens, depth=a.depth)
        total = losses[0] + a.index_weight * index_loss
        for weight, loss in zip(a.mtp_weights, losses[1:], strict=False):
            total = total + weight * loss
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, a.clip)
        for group in self.adam.param_groups:
            group["lr"] = a.adam_lr * group["scale"] * factor
        self.adam.step()
        self.muon.step(a.muon_lr * factor)
        self.adam.zero_grad(set_to_none=True)
        for p in self.parameters:
            p.grad = None
        balance(self.model, loads, a.balance * factor)
        self.loads = loads
        self.step += 1
        return torch.stack([*losses, index_loss]).detach(), norm.detach()

    def train(self) -> None:
        """Steps until the schedule, the leg's time or its number of steps ends."""
        a = self.args
        cuda = a.device.startswith("cuda")
        leg_end = START + a.stop_after * 60
        first, begun = self.step, time.monotonic()
        spent_before = self.spent
        budget = a.minutes * 60
        if a.final:
            budget = min(budget, spent_before + leg_end - begun)
        events: list[Any] = []
        shown, shown_step = begun, self.step
        sums: Tensor | None = None
        while True:
            now = time.monotonic()
            # The first steps compile; their time is not the schedule's.
            if self.step - first == 3:
                begun = now
                if a.final:
                    budget = min(budget, spent_before + leg_end - now)
            if self.step - first >= 3:
                self.spent = spent_before + now - begun
            fraction = self.step / a.steps if a.steps else self.spent / budget
            done = fraction >= 1
            if done or now >= leg_end or (a.leg_steps and self.step - first >= a.leg_steps):
                break
            losses, norm = self.one_step(schedule(fraction, self.step, a.warmup, a.flat))
            sums = losses if sums is None else sums + losses
            if cuda:
                # Stay at most two steps ahead of the GPU, so that the clock means something.
                event = torch.cuda.Event()
                event.record()
                events.append(event)
                if len(events) > 2:
                    events.pop(0).synchronize()
            compiled = self.step - first <= 3
            now = time.monotonic()
            if compiled or now - shown > 10 or not cuda:
                steps = self.step - shown_step
                values = [float(v) for v in sums / steps]
                rate = steps * a.batch * a.length / (time.monotonic() - shown)
                worst = max(
                    float(v.max() / v.mean())
                    for v, b in zip(self.loads, [*self.model.layers, *self.model.mtp], strict=False)
                    if not b.ffn.hashed
                )
                self.history.append({"step": self.step, "spent": self.spent, "loss": values[0]})
                say(
                    f"step {self.step} {fraction * 100:5.1f}% loss {values[0]:.4f} "
                    f"mtp {' '.join(f'{v:.3f}' for v in values[1:-1])} index {values[-1]:.3f} "
                    f"grad {float(norm):.2f} load {worst:.2f} {rate / 1e3:.0f}k tok/s"
                )
                if not math.isfinite(values[0]):
                    raise SystemExit("the loss is not finite; state.pt keeps the last good state")
                shown, shown_step, sums = time.monotonic(), self.step, None
        if cuda:
            torch.cuda.synchronize()
        self.finished = done

    def finish(self) -> None:
        """Export and evaluate what was trained."""
        a = self.args
        if a.out is None:
            return
        total = export.write_checkpoint(self.model, a.out)
        files = sorted(f.name for f in a.out.iterdir())
        say(f"exported {total / 1e6:.2f} MB: {files}")
        log = {
            "history": self.history,
            "step": self.step,
            "minutes": self.spent / 60,
            "tokens": self.step * a.batch * a.length,
            "args": {k: str(v) for k, v in vars(a).items()},
        }
        (a.out / "train.json").write_text(json.dumps(log) + "\n")
        if not a.no_eval and a.data and (a.data / "heldout.bin").exists():
            result = evaluate.evaluate_folder(a.out, a.data, device=a.device, master=self.model)
            (a.out / "eval.json").write_text(json.dumps(result, indent=1) + "\n")
            say(json.dumps(result["summary"]))


def smoke(run: Run) -> None:
    """A few full-size steps: compile time, speed, memory and whether the loss falls."""
    a = run.args
    begun = time.monotonic()
    first = run.one_step(0.2)[0]
    torch.cuda.synchronize()
    say(f"first step (compiles) {time.monotonic() - begun:.1f}s losses {first.tolist()}")
    begun = time.monotonic()
    for _ in range(4):
        run.one_step(0.5)
    torch.cuda.synchronize()
    say(f"next four steps {time.monotonic() - begun:.2f}s")
    begun = time.monotonic()
    for _ in range(30):
        last = run.one_step(1.0)[0]
    torch.cuda.synchronize()
    each = (time.monotonic() - begun) / 30
    say(f"step {each * 1e3:.1f} ms, {a.batch * a.length / each / 1e3:.1f}k tok/s")
    say(f"losses {[f'{v:.3f}' for v in last.tolist()]}")
    say(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    say("the loss falls" if last[0] < first[0] - 0.2 else "THE LOSS DOES NOT FALL")
    if a.profile:
        kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=kinds) as prof:
            for _ in range(2):
                run.one_step(1.0)
            torch.cuda.synchronize()
        rows = sorted(prof.key_averages(), key=lambda r: -r.self_device_time_total)
        for r in rows[:32]:
            ms = r.self_device_time_total / 2e3
            print(f"  {ms:8.2f} ms/step x{r.count // 2:5d} {r.key[:110]}", flush=True)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run one leg; returns the step reached and the shown losses."""
    args = parse(argv)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args)
    if args.smoke:
        smoke(run)
        run.finish()
        if args.out:
            back = export.read_checkpoint(args.out)
            say(f"read back {sum(p.numel() for p in back.parameters()) / 1e6:.1f}M parameters")
        return {"step": run.step}
    run.train()
    run.save()
    run.finish()
    say(f"{'schedule complete' if run.finished else 'to be resumed'} at step {run.step}")
    return {"step": run.step, "losses": [h["loss"] for h in run.history]}


if __name__ == "__main__":
    main(sys.argv[1:])
