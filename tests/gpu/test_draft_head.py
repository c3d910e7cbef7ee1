"""The draft head on a CUDA device: no waiting while drafting, and the same drafts read or not."""

from __future__ import annotations

import dataclasses
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
MAX_SEQ_LEN = 512


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def parts(request: pytest.FixtureRequest) -> Any:
    """(built, config, dtype) of the bundled model."""
    from paceline import bundled_model_path
    from paceline.models.deepseek_v4.build import build
    from paceline.models.deepseek_v4.checkpoint import load_weights

    weights = load_weights(bundled_model_path())
    return build(weights, weights.config, device=CUDA, dtype=request.param), weights.config


@pytest.fixture
def forbid() -> Iterator[Any]:
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


def make_head(parts: Any, **options: Any) -> Any:
    from paceline.draft import DeepseekV4MtpHead

    built, config = parts
    options = {"num_slots": 4, **options}
    return DeepseekV4MtpHead.new(
        built.mtp, built.embed_tokens, built.lm_head, config, 0, MAX_SEQ_LEN, **options
    )


class Text:
    """A committed text with streams on the device, and the engine's side of the contract."""

    def __init__(self, head: Any, config: Any, seed: int, length: int) -> None:
        shape = (MAX_SEQ_LEN, config.hc_mult, config.hidden_size)
        generator = torch.Generator().manual_seed(seed)
        self.head, self.rng = head, random.Random(seed)
        self.streams = torch.randn(shape, generator=generator).to(CUDA, head.ring.rows.dtype)
        self.vocab = config.vocab_size
        self.target = torch.zeros(config.hidden_size, dtype=head.ring.rows.dtype, device=CUDA)
        self.tokens = [self.rng.randrange(self.vocab) for _ in range(length)]
        self.state = head.alloc_state_for(MAX_SEQ_LEN)

    def prefill(self) -> None:
        half = len(self.tokens) // 2
        for start, stop in ((0, half), (half, len(self.tokens))):
            self.head.prefill_drafter(
                self.tokens, self.streams[start:stop], self.state, first_position=start
            )
        self.tokens.append(self.rng.randrange(self.vocab))

    def request(self, num_drafts: int, *, stay: bool, broken: bool = False) -> Any:
        from paceline.types import DraftRequest

        position = len(self.tokens) - 1
        hidden = self.streams[position - 1]
        return DraftRequest(
            last_token=self.tokens[-1],
            position=position,
            target_hidden=hidden * float("nan") if broken else hidden,
            num_drafts=num_drafts,
            history=self.tokens,
            draft_embed_target=self.target if stay else None,
        )

    def settle(self, drafted: list[int], num_drafted: int, accept: int) -> None:
        position = len(self.tokens) - 1
        if num_drafted:
            self.head.after_verify(min(accept, len(drafted)), self.state)
        accepted = drafted[:accept]
        self.tokens += [*accepted, self.rng.randrange(self.vocab)]
        true = self.streams[position : position + len(accepted)]
        self.head.catchup_batch([accepted], [true], [position + 1], [self.state])


def drafted(ids: list[int]) -> list[int]:
    return ids[: ids.index(-1)] if -1 in ids else ids


@pytest.mark.parametrize("breaks", [False, True])
def test_nothing_waits_and_the_drafts_are_those_that_are_read(
    parts: Any, forbid: Any, breaks: bool
) -> None:
    stays, reads = make_head(parts), make_head(parts)
    left = [Text(stays, parts[1], i, 20 + 60 * i) for i in range(3)]
    read = [Text(reads, parts[1], i, 20 + 60 * i) for i in range(3)]
    torch.cuda.synchronize()
    forbid("error")
    for text in (*left, *read):
        text.prefill()
    rng = random.Random(1)
    for turn in range(12):
        counts = [rng.randint(1, 6) for _ in range(3)]
        accepts = [rng.randint(0, 6) for _ in range(3)]
        bad = [breaks and turn in (3, 4, 9) and i == turn % 3 for i in range(3)]
        asked = [
            t.request(n, stay=True, broken=b) for t, n, b in zip(left, counts, bad, strict=True)
        ]
        drafts = stays.propose_batch(asked, [t.state for t in left])
        forbid("default")
        ids = [draft.device_tokens.tolist() for draft in drafts]
        first = stays.read_deferred_draft_token()
        assert first == (ids[0][0] if ids[0][0] >= 0 else None)
        for text, row in zip(left, ids, strict=True):
            expected = stays._embed_tokens.gather(torch.tensor([max(row[0], 0)], device=CUDA))
            assert torch.equal(text.target, expected[0])
        expected = reads.propose_batch(
            [t.request(n, stay=False, broken=b) for t, n, b in zip(read, counts, bad, strict=True)],
            [t.state for t in read],
        )
        assert [drafted(row) for row in ids] == [draft.tokens for draft in expected]
        forbid("error")
        for i in range(3):
            left[i].settle(drafted(ids[i]), counts[i], accepts[i])
            read[i].settle(expected[i].tokens, len(expected[i].tokens), accepts[i])
    forbid("default")
    assert stays.num_nonfinite == reads.num_nonfinite == (3 if breaks else 0)
    for one, other in zip(left, read, strict=True):
        ours, theirs = stays.held_rows(one.state), reads.held_rows(other.state)
        assert ours[0] == theirs[0]
        assert torch.equal(ours[1], theirs[1])
        assert torch.isfinite(ours[1]).all()


def test_a_captured_chain_replays_while_nothing_waits(parts: Any, forbid: Any) -> None:
    from paceline.engine.graphs import CudaCapture, GraphedDraftRunner

    eager = make_head(parts, confidence=True, min_probability=0.001)
    bound = make_head(parts, confidence=True, min_probability=0.001)
    runner = GraphedDraftRunner(bound.circuit_draft(), CudaCapture(CUDA))
    runner.capture([shape for shape in bound.circuit_draft().shapes if shape.depth <= 4])
    bound.set_circuit_draft(runner)
    ours = [Text(bound, parts[1], i, 30 + 50 * i) for i in range(3)]
    theirs = [Text(eager, parts[1], i, 30 + 50 * i) for i in range(3)]
    for text in (*ours, *theirs):
        text.prefill()
    rng = random.Random(2)
    for turn in range(15):
        size = 3 - turn // 5
        counts = [rng.randint(1, 4) for _ in range(size)]
        accepts = [rng.randint(0, 4) for _ in range(size)]
        asked = [t.request(n, stay=True) for t, n in zip(ours[:size], counts, strict=True)]
        # What padding holds does not matter.
        bound.circuit_draft().inputs["hiddens"].fill_(float("nan"))
        bound.ring.rows[bound.ring.inert_slot].fill_(float("nan"))
        forbid("error")
        drafts = bound.propose_batch(asked, [t.state for t in ours[:size]])
        forbid("default")
        confidence = [bound.last_confidence(t.state) for t in ours[:size]]
        ids = [drafted(draft.device_tokens.tolist()) for draft in drafts]
        expected = eager.propose_batch(
            [t.request(n, stay=False) for t, n in zip(theirs[:size], counts, strict=True)],
            [t.state for t in theirs[:size]],
        )
        assert ids == [draft.tokens for draft in expected]
        assert confidence == [eager.last_confidence(t.state) for t in theirs[:size]]
        for i in range(size):
            ours[i].settle(ids[i], counts[i], accepts[i])
            theirs[i].settle(expected[i].tokens, len(expected[i].tokens), accepts[i])
    assert (bound.num_circuit_runs, bound.num_circuit_fallbacks) == (15, 0)


def test_rows_carried_out_and_in_draft_on_alike(parts: Any) -> None:
    head = make_head(parts)
    stays = make_head(parts)
    text, twin = Text(head, parts[1], 5, 200), Text(stays, parts[1], 5, 200)
    for each in (text, twin):
        each.prefill()
    for turn in range(9):
        if turn % 3 == 2:
            kv = head.take_drafter_kv(text.state)
            share = head.share_drafter_kv(kv)
            head.free_drafter_kv(kv)
            assert head.install_drafter_kv(share, text.state)
            assert head.num_carried == 0
        drafts = [
            each.head.propose(each.request(4, stay=False), each.state) for each in (text, twin)
        ]
        assert drafts[0] == dataclasses.replace(drafts[1])
        for each, draft in zip((text, twin), drafts, strict=True):
            each.settle(draft.tokens, len(draft.tokens), turn % 4)
