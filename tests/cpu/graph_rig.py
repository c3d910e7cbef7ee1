"""Shared by the tests of captured steps: runners side by side, and poison for what is not read."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.cache.blocks import BlockAllocator
from paceline.cache.state import SequenceCache
from paceline.config import ModelConfig
from paceline.draft import DeepseekV4MtpHead, verify
from paceline.engine.graphs import Capture, GraphedDraftRunner, GraphPlan
from paceline.engine.runner import RowInputs, Runner
from paceline.models.deepseek_v4.build import Built
from paceline.models.step import TargetModel
from paceline.types import MAX_NUM_DRAFTS, DraftRequest

CPU = torch.device("cpu")
MAX_SEQ_LEN = 256
SLOTS = 8


def plan(
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8),
    max_width: int = MAX_NUM_DRAFTS + 1,
    context_caps: tuple[int, ...] = (128, 256),
) -> GraphPlan:
    return GraphPlan(batch_sizes=batch_sizes, max_width=max_width, context_caps=context_caps)


@dataclass
class Bench:
    """A runner and sequences of its own."""

    runner: Runner
    allocator: BlockAllocator
    live: dict[int, SequenceCache] = field(default_factory=dict)

    @classmethod
    def new(
        cls,
        model: TargetModel,
        config: ModelConfig,
        *,
        capture: Capture | None = None,
        graphs: GraphPlan | None = None,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
    ) -> Bench:
        blocks = SLOTS * (MAX_SEQ_LEN // 128)
        runner = Runner(
            model,
            config,
            num_slots=SLOTS,
            num_blocks=blocks,
            max_seq_len=MAX_SEQ_LEN,
            max_rows=160,
            device=device,
            dtype=dtype,
            capture=capture,
            plan=plan() if capture and graphs is None else graphs,
        )
        return cls(runner, BlockAllocator(blocks))

    def open(self, slot: int) -> None:
        self.live[slot] = SequenceCache(
            self.allocator, slot=slot, max_width=160, max_seq_len=MAX_SEQ_LEN
        )

    def row(
        self,
        slot: int,
        ids: Sequence[int],
        *,
        num_logits: int | None = None,
        num_hiddens: int | None = None,
        device_ids: Sequence[int] = (),
        device_log_probs: Sequence[float] = (),
    ) -> RowInputs:
        width = len(ids) + len(device_ids)
        device = self.runner.pools.window.device
        return RowInputs(
            cache=self.live[slot],
            ids=list(ids),
            num_logits=width if num_logits is None else num_logits,
            num_hiddens=width if num_hiddens is None else num_hiddens,
            device_ids=torch.tensor(list(device_ids), device=device) if device_ids else None,
            device_log_probs=(
                torch.tensor(list(device_log_probs), device=device) if device_log_probs else None
            ),
        )


def poison(runner: Runner) -> None:
    """Spoil whatever a step must not read, or must write before it reads it."""
    if runner._device_ids.is_cuda:
        torch.cuda.synchronize()
    runner._buffers._host.fill_(2**62)
    runner._buffers._device.fill_(2**62)
    runner._device_ids.fill_(-(2**61))
    runner._device_log_probs.fill_(7.0)
    if runner.graphs is not None:
        runner._logits.fill_(math.nan)
        runner._hiddens.fill_(math.nan)
        runner._packed.fill_(-99)
    pools = runner.pools
    for ring in (
        pools.window,
        pools.raw4_kv,
        pools.raw4_score,
        pools.index_raw_kv,
        pools.index_raw_score,
        pools.raw128_kv,
        pools.raw128_score,
    ):
        ring[:, pools.inert_slot] = math.nan
    pools.rows4[:, :32] = math.nan
    pools.index4[:, :32] = math.nan
    pools.rows128[:, 0] = math.nan
    pools.block_tables[pools.inert_slot] = 0


def drain(eager: Bench, graphed: Bench, *, vocab: int, num_steps: int, seed: int) -> list[int]:
    """Run both side by side: K changes in every step, eight sequences end one by one.

    Drafts come from host and device, right ones, wrong ones and ones that are no ids. Every output
    of `graphed`, poisoned before each step, must equal `eager`'s bit for bit.

    Returns:
        Accepted drafts of every sequence in every step.
    """
    rng = random.Random(seed)

    def both(rows: dict[int, tuple[list[int], list[int], bool]]) -> None:
        """(known ids, drafts, whether the drafts are on the device) by slot."""
        plain, padded = [], []
        for slot, (known, drafts, on_device) in rows.items():
            run_as = [min(max(token, 0), vocab - 1) for token in drafts]
            wanted = rng.randint(0, len(known) + len(drafts))
            plain.append(eager.row(slot, known + run_as, num_hiddens=wanted))
            plain[-1].num_logits = 1 + len(drafts)
            if on_device:
                measured = [-float(slot) - j / 8 for j in range(len(drafts))]
                padded.append(
                    graphed.row(
                        slot,
                        known,
                        num_hiddens=wanted,
                        device_ids=drafts,
                        device_log_probs=measured if slot % 2 else (),
                    )
                )
            else:
                padded.append(graphed.row(slot, known + run_as, num_hiddens=wanted))
            padded[-1].num_logits = 1 + len(drafts)
        want = eager.runner.run(plain)
        poison(graphed.runner)
        got = graphed.runner.run(padded)
        assert torch.equal(got.logits, want.logits)
        assert torch.equal(got.hiddens, want.hiddens)
        judged = verify.greedy(want.logits, [drafts for _, drafts, _ in rows.values()])
        verdicts = graphed.runner.read_verdicts()
        for (slot, (_, drafts, on_device)), verdict, told in zip(
            rows.items(), judged, verdicts, strict=True
        ):
            assert told is not None
            assert told.verdict == verdict
            if on_device:
                assert told.drafts == drafts
                if slot % 2:
                    assert told.log_probs == [-float(slot) - j / 8 for j in range(len(drafts))]
                else:
                    assert all(math.isnan(value) for value in told.log_probs)
        for row, other, verdict in zip(plain, padded, judged, strict=True):
            keep = len(row.ids) - row.num_logits + 1 + verdict.num_accepted
            row.cache.commit(keep)
            other.cache.commit(keep)
            newest[row.cache.slot] = verdict.next_token
            accepted.append(verdict.num_accepted)

    def oracle(slots: Sequence[int]) -> dict[int, list[int]]:
        """The target's next two tokens, from runs whose rows are not kept."""
        found: dict[int, list[int]] = {slot: [] for slot in slots}
        for _ in range(2):
            rows = [
                eager.row(slot, [newest[slot], *found[slot]], num_logits=1, num_hiddens=0)
                for slot in slots
            ]
            for slot, token in zip(
                slots, eager.runner.run(rows).logits.argmax(-1).tolist(), strict=True
            ):
                found[slot].append(token)
        return found

    newest: dict[int, int] = {}
    accepted: list[int] = []
    for slot in range(SLOTS):
        eager.open(slot)
        graphed.open(slot)
        both({slot: ([rng.randrange(vocab) for _ in range(100 + 3 * slot)], [], False)})
    for step in range(num_steps):
        gone = max(0, step - (num_steps - SLOTS))
        k = rng.randint(0, MAX_NUM_DRAFTS)
        rows = {}
        right = oracle(range(gone, SLOTS))
        for slot in range(gone, SLOTS):
            count = rng.choice((k, rng.randint(0, MAX_NUM_DRAFTS)))
            drafts = [*right[slot], *(rng.randrange(vocab) for _ in range(count))][:count]
            on_device = bool(drafts) and rng.random() < 0.6
            if drafts and rng.random() < 0.5:
                bad = rng.choice((-1, vocab, 2**40)) if on_device else rng.randrange(vocab)
                drafts[rng.randrange(len(drafts))] = bad
            rows[slot] = ([newest[slot]], drafts, on_device)
        both(rows)
    return accepted


def make_head(built: Built, config: ModelConfig) -> DeepseekV4MtpHead:
    """A head with a slot for each sequence."""
    assert built.mtp is not None
    return DeepseekV4MtpHead.new(
        built.mtp,
        built.embed_tokens,
        built.lm_head,
        config,
        0,
        MAX_SEQ_LEN,
        num_slots=SLOTS,
        confidence=True,
    )


def drain_drafts(
    own: DeepseekV4MtpHead,
    captured: DeepseekV4MtpHead,
    config: ModelConfig,
    capture: Capture,
    *,
    num_steps: int,
    seed: int,
) -> int:
    """Draft with two heads side by side: K changes in every step, eight sequences end one by one.

    `captured` runs its chains through `capture`, but for those of five drafts, and what it must not
    read is poisoned before each step; drafts and rows must equal those of `own` bit for bit.

    Returns:
        Chains that were replayed.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    device, dtype = own.ring.rows.device, own.ring.rows.dtype
    binding = captured.circuit_draft()
    assert binding is not None
    served = [shape for shape in binding.shapes if shape.depth != 5]
    runner = GraphedDraftRunner(binding, capture, shapes=served)
    captured.set_circuit_draft(runner)
    heads = (own, captured)

    def streams_of(count: int) -> torch.Tensor:
        shape = (count, config.hc_mult, config.hidden_size)
        return torch.randn(shape, generator=generator).to(device, dtype)

    states = [[head.alloc_state() for _ in range(SLOTS)] for head in heads]
    positions = [40 + 9 * slot for slot in range(SLOTS)]
    for slot, position in enumerate(positions):
        tokens = [rng.randrange(config.vocab_size) for _ in range(position + 1)]
        hiddens = streams_of(position)
        for head_, some in zip(heads, states, strict=True):
            head_.prefill_drafter(tokens, hiddens, some[slot])

    def spoil() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        for name, buffer in {**binding.inputs, **binding.outputs}.items():
            if name == "pending":
                continue
            buffer.fill_(math.nan if buffer.is_floating_point() else -(2**60))
        captured.ring.rows[binding.inert_slot] = math.nan

    fallbacks = 0
    for step in range(num_steps):
        live = list(range(max(0, step - (num_steps - SLOTS)), SLOTS))
        k = rng.randint(0, MAX_NUM_DRAFTS)
        wanted = [rng.choice((k, max(1, k // 2))) for _ in live]
        live = [slot for slot, count in zip(live, wanted, strict=True) if count]
        wanted = [count for count in wanted if count]
        if not live:
            continue
        last = [rng.randrange(config.vocab_size) for _ in live]
        hidden = streams_of(len(live))
        drafts = []
        for head_, some in zip(heads, states, strict=True):
            spoil()
            requests = [
                DraftRequest(
                    last_token=last[row],
                    position=positions[slot],
                    target_hidden=hidden[row],
                    num_drafts=wanted[row],
                    history=[],
                )
                for row, slot in enumerate(live)
            ]
            drafts.append(head_.propose_batch(requests, [some[slot] for slot in live]))
        assert drafts[0] == drafts[1]
        assert [draft.num_tokens for draft in drafts[0]] == wanted
        fallbacks += max(wanted) == 5
        for row, slot in enumerate(live):
            accepted = rng.randint(0, wanted[row])
            tokens = drafts[0][row].tokens[:accepted]
            rows = streams_of(accepted)
            for head_, some in zip(heads, states, strict=True):
                head_.after_verify(accepted, some[slot])
                head_.catchup_batch([tokens], [rows], [positions[slot] + 1], [some[slot]])
            positions[slot] += 1 + accepted
    for slot in range(SLOTS):
        first, rows = own.held_rows(states[0][slot])
        other_first, others = captured.held_rows(states[1][slot])
        assert first == other_first
        assert torch.equal(rows, others)
    assert fallbacks > 0
    assert captured.num_circuit_fallbacks == fallbacks
    assert captured.num_circuit_runs == runner.num_replays
    return runner.num_replays
