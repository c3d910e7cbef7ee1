"""Captured CUDA graphs: replays equal the same steps run as they are, and one read a step."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

CUDA = torch.device("cuda")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module", params=list(DTYPES))
def parts(request: pytest.FixtureRequest) -> Any:
    """(built, config, dtype) of the bundled model."""
    from paceline import bundled_model_path
    from paceline.models.deepseek_v4.build import build
    from paceline.models.deepseek_v4.checkpoint import load_weights

    weights = load_weights(bundled_model_path())
    dtype = DTYPES[request.param]
    return build(weights, weights.config, device=CUDA, dtype=dtype), weights.config, dtype


def benches(parts: Any) -> Any:
    """A runner that runs padded steps as they are, and one that captures them."""
    from graph_rig import Bench

    from paceline.engine.graphs import CudaCapture, EagerCapture

    built, config, dtype = parts
    return [
        Bench.new(built.model, config, capture=capture, device=CUDA, dtype=dtype)
        for capture in (EagerCapture(), CudaCapture(CUDA))
    ]


def test_decode_and_every_verify_width_replay_bit_equal(parts: Any) -> None:
    from graph_rig import SLOTS, poison

    rng = random.Random(4)
    vocab = parts[1].vocab_size
    eager, graphed = benches(parts)
    for slot in range(SLOTS):
        prompt = [rng.randrange(vocab) for _ in range(90 + slot)]
        for bench in (eager, graphed):
            bench.open(slot)
            bench.runner.run([bench.row(slot, prompt, num_logits=1)])
            bench.live[slot].commit(len(prompt))
    for batch in (8, 1, 4, 2):
        for width in range(1, 10):
            rows = {slot: [rng.randrange(vocab) for _ in range(width)] for slot in range(batch)}
            outputs = []
            for bench in (eager, graphed):
                poison(bench.runner)
                outputs.append(bench.runner.run([bench.row(s, ids) for s, ids in rows.items()]))
            want, got = outputs
            assert torch.isfinite(want.logits).all(), (batch, width)
            assert torch.equal(got.logits, want.logits), (batch, width)
            assert torch.equal(got.hiddens, want.hiddens), (batch, width)
            told = [bench.runner.read_verdicts() for bench in (eager, graphed)]
            assert [t.verdict for t in told[0]] == [t.verdict for t in told[1]], (batch, width)
            for bench in (eager, graphed):
                for slot in rows:
                    bench.live[slot].commit(1)
    assert graphed.runner.num_replays == eager.runner.num_replays >= 36


def test_replays_while_k_changes_and_the_batch_drains(parts: Any) -> None:
    from graph_rig import drain

    eager, graphed = benches(parts)
    accepted = drain(eager, graphed, vocab=parts[1].vocab_size, num_steps=26, seed=5)
    # The other one also plays the oracle, in two runs more for each step.
    assert 3 * graphed.runner.num_replays == eager.runner.num_replays == 3 * 26
    assert {0, 1, 2} <= set(accepted)


def test_the_chain_of_k_drafts_replays_bit_equal(parts: Any) -> None:
    from graph_rig import drain_drafts, make_head

    from paceline.engine.graphs import CudaCapture

    built, config, _ = parts
    own, captured = make_head(built, config), make_head(built, config)
    assert drain_drafts(own, captured, config, CudaCapture(CUDA), num_steps=40, seed=8) > 20


def test_every_shape_of_the_chain_can_be_captured(parts: Any) -> None:
    from graph_rig import make_head

    from paceline.engine.graphs import CudaCapture, GraphedDraftRunner

    built, config, _ = parts
    binding = make_head(built, config).circuit_draft()
    runner = GraphedDraftRunner(binding, CudaCapture(CUDA))
    seconds = runner.capture()
    print(f"{len(runner.shapes)} chains captured in {seconds:.1f} s")
    assert set(runner.shapes) == set(binding.shapes)
    generator = torch.Generator().manual_seed(2)
    for shape in binding.shapes:
        binding.make_inert(shape)
        binding.inputs["hiddens"].copy_(
            torch.randn(binding.inputs["hiddens"].shape, generator=generator)
        )
        binding.inputs["slots"][: shape.width].copy_(torch.arange(shape.width))
        binding.inputs["keys"][: shape.width].fill_(50)
        binding.inputs["first_keys"][: shape.width].fill_(50)
        binding.inputs["depths"][: shape.width].fill_(shape.depth)
        found = []
        for run in (binding.run, runner.run_draft):
            for buffer in binding.outputs.values():
                buffer.fill_(-7)
            run(shape)
            found.append({name: buffer.clone() for name, buffer in binding.outputs.items()})
        assert (found[0]["tokens"][: shape.width, : shape.depth] >= 0).all(), shape
        for name in found[0]:
            assert torch.equal(found[0][name], found[1][name]), (shape, name)


def test_the_devices_verdict_is_the_hosts() -> None:
    from paceline.draft import verify
    from paceline.draft.verify_device import packed_verdicts, unpack

    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        logits = torch.randn((9, 64), generator=generator)
        best = logits.argmax(-1).tolist()
        logits[int(torch.randint(0, 9, (), generator=generator)), 3] = math.nan
        counts, firsts = [4, 0, 2], [0, 5, 6]
        drafts = [[best[0], best[1], -1, 5], [], [best[6], best[7]]]
        rows = torch.arange(9)
        ids = torch.tensor([0, *drafts[0], 0, 0, *drafts[2]])
        packed = packed_verdicts(
            logits.to(CUDA),
            ids.to(CUDA),
            rows.to(CUDA),
            torch.tensor(firsts, device=CUDA),
            torch.tensor(counts, device=CUDA),
            max_drafts=8,
        )
        told = unpack(packed.cpu().numpy(), counts)
        assert [one.verdict for one in told] == verify.greedy(logits, drafts)


# The engine


def make_llm(parts: Any, capture: Any, *, num_drafts: int) -> Any:
    """The bundled model behind an engine that captures through `capture`."""
    from paceline import LLM, bundled_model_path
    from paceline.draft import DeepseekV4MtpHead
    from paceline.engine import Engine
    from paceline.text import Tokenizer

    built, config, dtype = parts
    head = DeepseekV4MtpHead.new(
        built.mtp, built.embed_tokens, built.lm_head, config, 0, 1024, num_slots=8
    )
    engine = Engine(
        built.model,
        config,
        proposer=head,
        num_drafts=num_drafts,
        max_seq_len=1024,
        max_num_seqs=8,
        device=CUDA,
        dtype=dtype,
        capture=capture,
    )
    tokenizer = Tokenizer(
        bundled_model_path(), vocab_size=config.vocab_size, bos_token_id=config.bos_token_id
    )
    return LLM.from_engine(engine, tokenizer)


def requests(llm: Any) -> list[Any]:
    """Eight prompts with numbers of drafts and lengths of their own: the batch drains."""
    from paceline import SamplingParams

    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from device import read_prompts

    return [
        (prompt, SamplingParams(max_tokens=20 + 8 * i, ignore_eos=True, num_drafts=k))
        for i, (prompt, k) in enumerate(zip(read_prompts(8), (8, 0, 3, 1, 4, 2, 7, 5), strict=True))
    ]


def test_tokens_are_those_of_the_same_steps_run_as_they_are(parts: Any) -> None:
    from paceline.engine.graphs import CudaCapture, EagerCapture

    texts = []
    for capture in (EagerCapture(), CudaCapture(CUDA)):
        llm = make_llm(parts, capture, num_drafts=3)
        prompts, params = zip(*requests(llm), strict=True)
        results = llm.generate(list(prompts), list(params))
        texts.append([result.token_ids for result in results])
        runner, head = llm.engine._runner, llm.engine.drafting.proposer
        assert llm.engine.num_proposer_failures == 0
        assert runner.num_replays > runner.num_forwards // 2
        assert head.num_circuit_runs > 10
        assert sum(result.speculation.num_accepted for result in results) > 20
    assert texts[0] == texts[1]


@pytest.fixture
def guard() -> Iterator[Any]:
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


def test_a_step_reads_the_device_once(
    parts: Any, guard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.engine.graphs import CudaCapture

    llm = make_llm(parts, CudaCapture(CUDA), num_drafts=3)
    engine, runner = llm.engine, llm.engine._runner
    asked = requests(llm)
    prompts, params = zip(*asked, strict=True)
    # The first time captures what is wanted; the second time wants nothing else.
    first = llm.generate(list(prompts), list(params))
    reads = 0
    fetch = runner._fetch

    def counted(values: torch.Tensor) -> Any:
        nonlocal reads
        reads += 1
        guard("default")
        try:
            return fetch(values)
        finally:
            guard("error")

    monkeypatch.setattr(runner, "_fetch", counted)
    captured = len(runner.graphs.shapes)
    got: dict[int, list[int]] = {
        engine.add(result.prompt_token_ids, param): []
        for result, param in zip(first, params, strict=True)
    }
    steps = 0
    while engine.has_work:
        reads = 0
        torch.cuda.synchronize()
        # Any other wait of the host for the device raises from here on.
        guard("error")
        try:
            emissions = engine.step()
        finally:
            guard("default")
        assert reads == bool(emissions)
        for emission in emissions:
            got[emission.request_id] += emission.token_ids
        steps += 1
    assert steps > 30
    assert engine.num_proposer_failures == 0, "a wait inside the proposer is contained and counted"
    assert len(runner.graphs.shapes) == captured
    assert list(got.values()) == [result.token_ids for result in first]
