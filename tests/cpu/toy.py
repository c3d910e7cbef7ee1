"""A target that is arithmetic, and proposers for it; for tests of everything around a model.

The toy keeps each token where the caches' rules put it (block table, position), reads its history
back from there and hashes it. A block given twice, a rejected draft left visible, a wrong position
or a row of another sequence therefore changes what it says, as it would with a real model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from paceline.cache.blocks import BLOCK_TOKENS
from paceline.cache.pools import CachePools
from paceline.config import ModelConfig
from paceline.draft import DraftProposer
from paceline.engine import Emission, Engine
from paceline.models.step import StepInputs, TargetOutput
from paceline.types import Draft, DrafterKv, DraftRequest, FinishReason, SamplingParams

VOCAB = 61
EOS = 1
MASK = (1 << 31) - 1


def toy_config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 4,
        "qk_rope_head_dim": 2,
        "q_lora_rank": 4,
        "o_lora_rank": 4,
        "o_groups": 1,
        "sliding_window": 128,
        "compress_ratios": (0, 4, 128),
        "index_n_heads": 1,
        "index_head_dim": 4,
        "index_topk": 4,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 4,
        "num_hash_layers": 0,
        "routed_scaling_factor": 1.0,
        "swiglu_limit": 10.0,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": None,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_ids": (EOS,),
    }
    return ModelConfig(**{**values, **changes})


def next_token(history: list[int] | np.ndarray) -> int:
    """What the toy says after `history`; never the end of sequence by itself, except rarely."""
    state = 7
    for token in history:
        state = (state * 1103515245 + int(token) * 40503 + 12345) & MASK
    return (state >> 7) % VOCAB


def continuation(prompt: list[int], count: int, *, stop: tuple[int, ...] = ()) -> list[int]:
    """The toy's greedy tokens, told directly."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class ToyModel:
    """`TargetModel` over hashes.

    Args:
        poison: a token id after which logits are NaN.
    """

    def __init__(self, *, poison: int | None = None) -> None:
        self.poison = poison
        self.memory: np.ndarray | None = None
        self.rows: list[int] = []
        self.sequences: list[int] = []

    def forward(self, inputs: StepInputs, pools: CachePools) -> TargetOutput:
        tables = pools.block_tables.numpy()
        if self.memory is None:
            self.memory = np.full(pools.rows128.shape[1] * BLOCK_TOKENS, -1, dtype=np.int64)
        ids, positions, slots = (t.numpy() for t in (inputs.ids, inputs.positions, inputs.slots))
        assert positions.max() < inputs.context_cap
        assert inputs.context_cap % BLOCK_TOKENS == 0
        self.rows.append(len(ids))
        self.sequences.append(len(set(slots.tolist())))
        self._check_windows(inputs, tables)
        logits = np.zeros((len(inputs.logits_rows), VOCAB), dtype=np.float32)
        streams = np.zeros((len(ids), 2, 8), dtype=np.float32)
        said = {}
        for row, (token, position, slot) in enumerate(zip(ids, positions, slots, strict=True)):
            blocks = tables[slot]
            assert blocks[position // BLOCK_TOKENS] > 0
            self.memory[
                blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
            ] = token
            at = np.arange(position + 1)
            history = self.memory[blocks[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS]
            assert (history >= 0).all()
            said[row] = -1 if self.poison in history else next_token(history)
            streams[row, :, 0] = position
            streams[row, :, 1] = token
            streams[row, :, 2] = said[row]
        for index, row in enumerate(inputs.logits_rows.tolist()):
            if said[row] < 0:
                logits[index] = np.nan
            else:
                logits[index, said[row]] = 2.0
                logits[index, (said[row] + 1) % VOCAB] = 1.0
        return TargetOutput(
            logits=torch.from_numpy(logits),
            hiddens=torch.from_numpy(streams)[inputs.hidden_rows],
        )

    @staticmethod
    def _check_windows(inputs: StepInputs, tables: np.ndarray) -> None:
        """The windows that close are exactly those whose last position is among the rows."""
        for ratio, slots, windows, dest in (
            (4, inputs.close4_slots, inputs.close4_windows, inputs.close4_dest),
            (128, inputs.close128_slots, inputs.close128_windows, inputs.close128_dest),
        ):
            per_block = BLOCK_TOKENS // ratio
            inert = len(tables) - 1
            told = {
                (s, w, d)
                for s, w, d in zip(slots.tolist(), windows.tolist(), dest.tolist(), strict=True)
                if s != inert
            }
            due = set()
            widths: dict[int, int] = {}
            for position, slot in zip(
                inputs.positions.tolist(), inputs.slots.tolist(), strict=True
            ):
                widths[slot] = widths.get(slot, 0) + 1
                if (position + 1) % ratio == 0:
                    w = position // ratio
                    block = int(tables[slot, w // per_block])
                    due.add((slot, w, block * per_block + w % per_block))
            assert told == due
            assert len(slots) == sum(-(-n // ratio) for n in widths.values())
            for s, w, d in zip(slots.tolist(), windows.tolist(), dest.tolist(), strict=True):
                if s == inert:
                    assert (w, d) == (0, 0)


class Checked(DraftProposer[dict[str, Any]]):
    """Drafts by a rule, and checks all that the engine says on the way.

    Args:
        rule: (history, number wanted, step) -> draft ids.
        batch: widest batch taken; 1 leaves batching to the engine's loop.
        deferred: ask for the prompt at the first propose only.
        hidden_rows: prompt rows wanted.
    """

    def __init__(
        self, rule: Any, *, batch: int = 1, deferred: bool = False, hidden_rows: int = 128
    ) -> None:
        self.rule = rule
        self.batch = batch
        self.prefill_uses_shared_buffers = deferred
        self.hidden_rows = hidden_rows
        self.live: list[dict[str, Any]] = []
        self.calls: dict[str, int] = {}

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        return min(max_seq_len, self.hidden_rows)

    def alloc_state(self) -> dict[str, Any]:
        raise AssertionError("the engine knows the budget")

    def alloc_state_for(self, budget_tokens: int) -> dict[str, Any]:
        state: dict[str, Any] = {
            "budget": budget_tokens,
            "pairs": {},
            "pending": 0,
            "step": 0,
            "next": None,
        }
        self.live.append(state)
        return state

    def prefill_drafter(
        self, prompt_tokens: Any, hiddens: torch.Tensor, state: Any, *, first_position: int = 0
    ) -> int:
        self._count("prefill_drafter")
        for offset, stream in enumerate(hiddens):
            key = first_position + offset
            assert stream[0, 0] == key
            assert stream[0, 1] == prompt_tokens[key]
            assert key not in state["pairs"]
            if key + 1 < len(prompt_tokens):
                state["pairs"][key] = prompt_tokens[key + 1]
        return len(hiddens)

    def propose_batch_max(self) -> int:
        return self.batch

    def propose_batch(self, requests: Any, states: Any) -> list[Draft] | None:
        self._count("propose_batch")
        if self.batch == 1:
            return None
        assert 1 < len(requests) <= self.batch
        return [self._draft(r, s) for r, s in zip(requests, states, strict=True)]

    def propose(self, request: DraftRequest, state: Any) -> Draft:
        self._count("propose")
        return self._draft(request, state)

    def _draft(self, request: DraftRequest, state: Any) -> Draft:
        assert state["pending"] == 0, "the verdict of the draft before was not told"
        history = request.history
        assert request.position == len(history) - 1
        assert request.last_token == history[-1]
        assert request.target_hidden[0, 0] == request.position - 1
        assert request.target_hidden[0, 1] == history[-2]
        assert request.num_drafts >= 1
        assert request.position + request.num_drafts < state["budget"] - 1
        self._note(state, request.position - 1, history[-1])
        tokens = list(self.rule(list(history), request.num_drafts, state["step"]))
        state["step"] += 1
        state["pending"] = len(tokens)
        return Draft(tokens=tokens)

    def _note(self, state: Any, key: int, token: int) -> None:
        newest = max(state["pairs"], default=None)
        # A step whose forward failed is done again, from the same pair.
        again = newest == key and state["pairs"][key] == token
        if newest is not None and newest < key - 1 and self.hidden_rows < 128:
            # So few streams are retained that a gap may stay; what lies below it is dropped.
            state["pairs"].clear()
            newest = None
        assert newest is None or newest == key - 1 or again, f"pair {key} after {newest}"
        state["pairs"][key] = token

    def after_verify(self, num_accepted: int, state: Any) -> None:
        self._count("after_verify")
        assert 0 <= num_accepted <= state["pending"]
        assert state["pending"] > 0, "told of a draft that was empty"
        state["pending"] = 0

    def catchup_batch(self, tokens: Any, hiddens: Any, first_pos: Any, states: Any) -> int:
        self._count("catchup_batch")
        assert len({id(s) for s in states}) == len(states) <= max(1, self.batch)
        rows = 0
        for ids, streams, first, state in zip(tokens, hiddens, first_pos, states, strict=True):
            assert len(ids) == len(streams) > 0
            before = state["pairs"][first - 2]
            for offset, (token, stream) in enumerate(zip(ids, streams, strict=True)):
                assert stream[0, 0] == first + offset - 1
                assert stream[0, 1] == before
                self._note(state, first + offset - 1, token)
                before = token
                rows += 1
        return rows

    def catchup_drafter(
        self, tokens: Any, hiddens: torch.Tensor, row_base: int, pos_base: int, state: Any
    ) -> int:
        self._count("catchup_drafter")
        assert row_base == len(state["pairs"])
        for offset, (token, stream) in enumerate(zip(tokens, hiddens, strict=True)):
            assert stream[0, 0] == pos_base + offset - 1
            self._note(state, pos_base + offset - 1, token)
        return len(tokens)

    def drafter_rows(self, state: Any) -> int:
        return len(state["pairs"])

    def last_pair_key(self, state: Any) -> Any:
        return max(state["pairs"], default=None)

    def free_state(self, state: Any) -> None:
        self.live.remove(state)


class Carrying(Checked):
    """Hands its pairs over, and knows which values are whose."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.carried: dict[int, dict[int, int]] = {}
        self.num_taken = 0
        self.refuses = False

    def take_drafter_kv(self, state: Any) -> DrafterKv | None:
        assert not state["pending"], "drafts without a verdict"
        if not state["pairs"]:
            return None
        self.num_taken += 1
        pairs, state["pairs"] = state["pairs"], {}
        self.carried[self.num_taken] = pairs
        return DrafterKv(blocks=[self.num_taken], rows=len(pairs), last_pair_key=max(pairs))

    def install_drafter_kv(self, kv: DrafterKv, state: Any) -> bool:
        assert not state["pairs"]
        if self.refuses:
            return False
        state["pairs"] = self.carried.pop(kv.blocks[0])
        return True

    def free_drafter_kv(self, kv: DrafterKv) -> None:
        del self.carried[kv.blocks[0]]


def oracle(history: list[int], count: int, step: int) -> list[int]:
    return continuation(history, count)


def anti(history: list[int], count: int, step: int) -> list[int]:
    return [(token + 1) % VOCAB for token in continuation(history, count)]


def scattered(history: list[int], count: int, step: int) -> list[int]:
    """Right for a number of drafts that changes from step to step, then wrong; sometimes short."""
    good = (next_token([*history, step]) + step) % (count + 1)
    right = continuation(history, count)
    drafts = [token if j < good else (token + 3) % VOCAB for j, token in enumerate(right)]
    return drafts[: count - (step % 3 == 2)]


def random_ids(history: list[int], count: int, step: int) -> list[int]:
    return [next_token([*history, step, j]) for j in range(count)]


RULES = {"oracle": oracle, "anti": anti, "scattered": scattered, "random": random_ids}


def toy_engine(
    *, model: ToyModel | None = None, config: ModelConfig | None = None, **options: Any
) -> Engine:
    options.setdefault("max_seq_len", 512)
    return Engine(model or ToyModel(), config or toy_config(), **options)


def run(engine: Engine, *, limit: int = 5000) -> dict[int, list[Emission]]:
    """Step until idle; emissions by request."""
    out: dict[int, list[Emission]] = {}
    while engine.has_work:
        limit -= 1
        assert limit, "the engine does not come to an end"
        for emission in engine.step():
            out.setdefault(emission.request_id, []).append(emission)
    engine.check_idle()
    return out


def decode(
    engine: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[tuple[list[int], FinishReason | None]]:
    """Tokens and finish reason of each prompt, all queued at once."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    ids = [engine.add(p, s) for p, s in zip(prompts, each, strict=True)]
    emissions = run(engine)
    return [
        (
            [t for e in emissions[i] for t in e.token_ids],
            emissions[i][-1].finish_reason,
        )
        for i in ids
    ]
