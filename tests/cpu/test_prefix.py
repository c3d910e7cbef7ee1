"""Kept prefixes: which, for how long, and that going on from one is running it all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import RULES, VOCAB, Checked, ToyModel, continuation, decode, oracle, run, toy_config

from paceline.cache.blocks import BLOCK_TOKENS, BlockAllocator
from paceline.cache.pools import CachePools
from paceline.cache.prefix import PrefixTree
from paceline.cache.snapshot import RingSnapshot, block_bytes
from paceline.draft import DeepseekV4MtpHead, DraftProposer, OracleProposer
from paceline.engine import Engine
from paceline.engine.drafting import Drafting, Fed
from paceline.engine.sequence import BatchRow, Sequence
from paceline.models.deepseek_v4.build import Built, build
from paceline.models.deepseek_v4.checkpoint import Weights
from paceline.models.step import StepInputs, TargetOutput
from paceline.types import Draft, DrafterKv, DraftRequest, FinishReason, SamplingParams

CPU = torch.device("cpu")
BUDGET = 1 << 30


def ids_of(count: int, *, seed: int = 0, low: int = 8, high: int = 260) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(low, high) for _ in range(count)]


# The tree


class Tree:
    """A tree of small texts beside what is expected of it: texts of whole blocks by use."""

    def __init__(self, budget: int, blocks: int) -> None:
        self.allocator = BlockAllocator(blocks)
        self.dropped: list[str] = []
        self.tree: PrefixTree[str] = PrefixTree(
            self.allocator, budget_bytes=budget, block_bytes=10, drop=self.dropped.append
        )

    def put(self, text: str, payload: str, size: int = 5, *, keep: bool = False) -> bool:
        """Keep one letter per block; the writer's own blocks go home unless it keeps them."""
        blocks = self.allocator.allocate(len(text)) or []
        assert len(blocks) == len(text), "the test has too few blocks"
        put = self.tree.put(spell(text), blocks, len(text) * BLOCK_TOKENS, payload, size)
        if not keep:
            self.allocator.release(blocks)
        return put is not None

    def texts(self, *among: str) -> list[str]:
        found = []
        for text in among:
            node = self.tree.find(spell(text), len(text) * BLOCK_TOKENS)
            if node is not None and node.payload is not None:
                found.append(text)
        return found


def spell(text: str) -> list[int]:
    return [ord(letter) for letter in text for _ in range(BLOCK_TOKENS)]


def test_a_path_ends_where_texts_part() -> None:
    subject = Tree(BUDGET, 8)
    subject.put("abc", "1")
    subject.put("abd", "2")
    tokens = spell("abdx")
    assert [n.length for n in subject.tree.path(tokens, limit=len(tokens))] == [128, 256, 384]
    assert [n.payload for n in subject.tree.path(tokens, limit=len(tokens))] == [None, None, "2"]
    # One token short of the third block there are two.
    assert len(subject.tree.path(tokens, limit=383)) == 2
    tokens[130] += 1
    assert len(subject.tree.path(tokens, limit=len(tokens))) == 1
    assert subject.tree.num_blocks == 4
    assert subject.tree.num_bytes == 4 * 10 + 2 * 5
    subject.tree.clear()
    assert subject.allocator.all_home
    assert subject.tree.num_bytes == 0
    assert sorted(subject.dropped) == ["1", "2"]


def test_texts_with_equal_hashes_are_two() -> None:
    # Python hashes -1 and -2 alike, so these tuples collide; they must not be taken for another.
    subject = Tree(BUDGET, 4)
    one, two = [-1] * BLOCK_TOKENS, [-2] * BLOCK_TOKENS
    assert hash(tuple(one)) == hash(tuple(two))
    blocks = subject.allocator.allocate(1)
    assert blocks is not None
    subject.tree.put(one, blocks, BLOCK_TOKENS, "one", 1)
    assert subject.tree.find(two, BLOCK_TOKENS) is None
    assert subject.tree.path(two, limit=BLOCK_TOKENS) == []


def test_the_least_recently_used_leaf_goes_first() -> None:
    subject = Tree(10 * 5 + 4 * 5, 16)
    for text in ("a", "ab", "c", "cd"):
        assert subject.put(text, text)
    node = subject.tree.find(spell("ab"), 256)
    assert node is not None
    subject.tree.touch(node)
    # 60 of 70 bytes are used; two more blocks with payloads cost 30.
    assert subject.put("e", "e")
    assert subject.texts("a", "ab", "c", "cd", "e") == ["a", "ab", "c", "e"]
    assert subject.put("f", "f")
    assert subject.texts("a", "ab", "c", "e", "f") == ["a", "ab", "e", "f"]
    assert subject.tree.num_evicted == 2
    assert subject.tree.num_bytes <= subject.tree.budget_bytes


def test_no_text_evicts_its_own_beginning() -> None:
    subject = Tree(35, 16)
    assert subject.put("a", "a")
    assert subject.put("ab", "ab")
    assert not subject.put("abc", "abc")
    assert subject.texts("a", "ab", "abc") == ["a", "ab"]
    assert subject.dropped == []
    assert not subject.put("x", "x", size=26)
    assert subject.texts("a", "ab") == ["a", "ab"]
    # A new payload in the place of the old one counts for itself only.
    assert subject.put("ab", "again", size=10)
    assert subject.dropped == ["ab"]
    assert subject.tree.num_bytes == 35
    assert not subject.put("ab", "too big", size=11)


def test_blocks_on_demand_come_from_those_nobody_uses() -> None:
    subject = Tree(BUDGET, 5)
    subject.put("ab", "ab", keep=True)
    subject.put("cd", "cd")
    assert subject.allocator.num_free == 1
    assert subject.tree.evict(1) == 1
    assert subject.texts("ab", "cd") == ["ab"]
    node = subject.tree.find(spell("c"), 128)
    assert node is not None
    assert subject.tree.evict(5) == 1
    assert not node.is_kept
    assert subject.tree.evict(1) == 0
    assert subject.texts("ab") == ["ab"]
    assert subject.tree.num_shared == 2
    subject.tree.clear()
    assert subject.allocator.num_free == 3


def test_a_free_parent_of_a_used_block_can_be_given_up() -> None:
    subject = Tree(BUDGET, 4)
    subject.put("a", "a")
    mine = subject.allocator.allocate(2)
    assert mine is not None
    # Written by somebody with a block of its own for the text before.
    subject.tree.put(spell("ab"), mine, 256, "ab", 5)
    assert subject.tree.evict(1) == 1
    assert subject.tree.num_blocks == 0
    assert subject.allocator.num_free == 2


def test_a_middle_that_was_evicted_is_passed_through() -> None:
    subject = Tree(BUDGET, 8)
    subject.put("abc", "deep")
    node = subject.tree.path(spell("ab"), limit=256)[-1]
    assert node.payload is None
    assert subject.put("ab", "middle")
    assert node.payload == "middle"
    assert subject.tree.num_blocks == 3


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_history_agrees_with_a_list(data: st.DataObject) -> None:
    """Against a plain list of texts by use, evicted from the front, leaves first."""
    budget = data.draw(st.integers(10, 120))
    subject = Tree(budget, 200)
    used: list[str] = []  # least recently used first
    sizes: dict[str, int] = {}

    def cost(texts: Items[str]) -> int:
        return sum(10 + sizes.get(text, 0) for text in texts)

    def use(text: str) -> None:
        for end in range(len(text), 0, -1):
            if text[:end] in used:
                used.remove(text[:end])
                used.append(text[:end])

    for step in range(data.draw(st.integers(1, 25))):
        text = data.draw(st.text("ab", min_size=1, max_size=4))
        what = data.draw(st.sampled_from(["put", "put", "put", "touch", "evict"]))
        if what == "put":
            size = data.draw(st.integers(0, 20))
            prefixes = [text[:end] for end in range(1, len(text) + 1)]
            held = [p for p in prefixes if p in used]
            use(held[-1] if held else "")
            # What must stay or come: the text's own path, with its new payload.
            fits = cost([p for p in prefixes if p != text]) + 10 + size <= budget
            if fits:
                missing = [p for p in prefixes if p not in used]
                more = 10 * len(missing) + size - sizes.get(text, 0)
                while cost(used) + more > budget:
                    sizes.pop(used.pop(0), None)
                used += missing
                use(text)
                sizes[text] = size
            assert subject.put(text, f"{step}", size) == fits
        elif what == "touch":
            node = subject.tree.find(spell(text), len(text) * BLOCK_TOKENS)
            assert (node is not None) == (text in used)
            if node is not None:
                subject.tree.touch(node)
                use(text)
        else:
            count = data.draw(st.integers(0, 3))
            assert subject.tree.evict(count) == min(count, len(used))
            for gone in used[:count]:
                sizes.pop(gone, None)
            del used[:count]
        assert subject.tree.num_blocks == len(used)
        assert subject.tree.num_bytes == cost(used) <= budget
        assert subject.allocator.num_free == 200 - len(used)
    subject.tree.clear()
    assert subject.allocator.all_home


# The rings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 5, 9, 200])
def test_restored_rings_hold_what_the_next_step_reads(dtype: torch.dtype, width: int) -> None:
    """Every row a step at the block's end can see, in any slot, wherever the ring turns over."""
    config = toy_config(compress_ratios=(0, 4, 128, 4), num_hidden_layers=4)
    pools = CachePools.allocate(
        config,
        num_slots=3,
        num_blocks=2,
        max_seq_len=2048,
        max_width=width,
        device=CPU,
        dtype=dtype,
    )
    noise = torch.Generator().manual_seed(width)
    names = ("window", "raw4_kv", "raw4_score", "index_raw_kv", "index_raw_score")
    for name in names:
        ring = getattr(pools, name)
        ring.copy_(torch.randn(ring.shape, generator=noise))
    for end in (128, 256, 1024, 1920):
        taken = RingSnapshot.take(pools, 1, end, window=128)
        assert taken.num_bytes == sum(r.numel() * r.element_size() for r in taken.rows)
        before = {name: getattr(pools, name).clone() for name in names}
        others = [getattr(pools, name)[:, 0].clone() for name in names]
        taken.restore(pools, 2)
        for name in names:
            ring = getattr(pools, name)
            back = torch.arange(end - (127 if name == "window" else 4), end) % ring.shape[2]
            assert torch.equal(ring[:, 2][:, back], before[name][:, 1][:, back]), name
            rest = torch.ones(ring.shape[2], dtype=torch.bool)
            rest[back] = False
            assert torch.equal(ring[:, 2][:, rest], before[name][:, 2][:, rest]), name
        assert all(
            torch.equal(getattr(pools, n)[:, 0], o) for n, o in zip(names, others, strict=True)
        )
    with pytest.raises(AssertionError, match="130 is no block's end"):
        RingSnapshot.take(pools, 1, 130, window=128)


def test_bytes_of_a_block_are_its_rows() -> None:
    config = toy_config(compress_ratios=(0, 4, 128, 4), num_hidden_layers=4)
    pools = CachePools.allocate(
        config,
        num_slots=1,
        num_blocks=6,
        max_seq_len=512,
        max_width=4,
        device=CPU,
        dtype=torch.bfloat16,
    )
    d, i = config.head_dim, config.index_head_dim
    assert block_bytes(pools) == 2 * 32 * (d * 2 + i * 4) + 1 * d * 2


# The engine over the toy


def toy(**options: Any) -> Engine:
    options.setdefault("prefix_cache_bytes", BUDGET)
    options.setdefault("max_seq_len", 1024)
    options.setdefault("max_num_seqs", 2)
    return Engine(
        options.pop("model", None) or ToyModel(),
        options.pop("config", toy_config(eos_token_ids=())),
        **options,
    )


def cached(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[list[int], int]:
    """Tokens of one request and how many of its prompt's were not computed."""
    number = engine.add(prompt, params)
    emissions = run(engine)[number]
    assert emissions[-1].finish_reason is not FinishReason.ERROR
    return [t for e in emissions for t in e.token_ids], emissions[-1].cached_tokens


class Reader(DraftProposer[list[int]]):
    """Wants a window of streams, drafts nothing; cannot copy what it made of them."""

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        return min(128, max_seq_len)

    def alloc_state(self) -> list[int]:
        return []

    def propose(self, request: DraftRequest, state: list[int]) -> Draft:
        return Draft(tokens=[])

    def after_verify(self, num_accepted: int, state: list[int]) -> None:
        raise AssertionError("nothing was drafted")

    def free_state(self, state: list[int]) -> None:
        return None


class Carrying(Checked):
    """`Checked` with rows that can be copied; sees to it that a proposal lacks none of its window.

    Attributes:
        kept: pairs by handle of the values handed out.
        shared: how many second values were made.
    """

    def __init__(self, rule: Any, *, batch: int = 1, window: int = 128) -> None:
        super().__init__(rule, batch=batch, hidden_rows=window)
        self.window = window
        self.kept: dict[int, dict[int, int]] = {}
        self.shared = 0
        self._handles = iter(range(10**9))

    def _draft(self, request: DraftRequest, state: Any) -> Draft:
        drafted = super()._draft(request, state)
        place, history = request.position, request.history
        for key in range(max(0, place - self.window), place):
            assert state["pairs"].get(key) == history[key + 1], f"pair {key} at {place}"
        return drafted

    def _carry(self, pairs: dict[int, int]) -> DrafterKv | None:
        if not pairs:
            return None
        handle = next(self._handles)
        self.kept[handle] = pairs
        return DrafterKv(
            blocks=[handle], rows=len(pairs), last_pair_key=max(pairs), num_bytes=8 * len(pairs)
        )

    def snapshot_drafter_kv(self, state: Any, through_key: int) -> DrafterKv | None:
        oldest = through_key - self.window + 2
        return self._carry({k: t for k, t in state["pairs"].items() if oldest <= k <= through_key})

    def share_drafter_kv(self, kv: DrafterKv) -> DrafterKv | None:
        self.shared += 1
        return self._carry(dict(self.kept[kv.blocks[0]]))

    def take_drafter_kv(self, state: Any) -> DrafterKv | None:
        pairs, state["pairs"] = state["pairs"], {}
        return self._carry(pairs)

    def install_drafter_kv(self, kv: DrafterKv, state: Any) -> bool:
        assert not state["pairs"]
        state["pairs"] = self.kept.pop(kv.blocks[0])
        return True

    def free_drafter_kv(self, kv: DrafterKv) -> None:
        del self.kept[kv.blocks[0]]


class Flat:
    """A target whose rows cost nothing; says the position, has streams of it."""

    def forward(self, inputs: StepInputs, pools: CachePools) -> TargetOutput:
        said = inputs.positions[inputs.logits_rows] % VOCAB
        logits = torch.nn.functional.one_hot(said, VOCAB).float()
        streams = inputs.positions[inputs.hidden_rows].float()
        return TargetOutput(logits=logits, hiddens=streams[:, None, None].expand(-1, 2, 8).clone())


def edges() -> Iterator[int]:
    """Every length next to a block's end up to 4,200 tokens, and some between."""
    between = set(random.Random(5).sample(range(1, 4201), 60))
    for length in range(1, 4201):
        if length % BLOCK_TOKENS in (0, 1, 127) or length in between or length in (1, 2, 3, 4200):
            yield length


@pytest.mark.parametrize("drafts", [0, 3])
def test_hit_length_follows_the_formula_from_1_to_4200_tokens(drafts: int) -> None:
    """128 * floor((tokens - 1) / 128) of a prompt that was read before; drafts cost it one block at
    most, and that only where the rows they need were not kept."""
    engine = toy(
        model=Flat(),
        config=toy_config(eos_token_ids=(), max_position_embeddings=8192),
        max_seq_len=4300,
        max_num_seqs=1,
        max_num_batched_tokens=1024,
        proposer=Reader() if drafts else None,
        num_drafts=drafts,
    )
    text = ids_of(4200, high=VOCAB, low=0)
    # Of two tokens none can be drafted.
    plain, drafted = SamplingParams(max_tokens=2), SamplingParams(max_tokens=9)
    asked = 0
    for length in edges():
        engine.clear_prefix_cache()
        assert cached(engine, text[:length], plain)[1] == 0
        expected = 128 * ((length - 1) // 128)
        assert cached(engine, text[:length], plain)[1] == expected
        if drafts:
            found = cached(engine, text[:length], drafted)[1]
            # A whole window is left to read only where the prompt ends at a block's end.
            assert found == (expected if length % 128 == 0 else max(0, expected - 128))
        asked += 1
    assert asked > 150
    assert engine.num_proposer_failures == 0


def test_drafts_cost_no_block_where_the_rows_were_kept() -> None:
    proposer = Carrying(lambda history, count, step: [])
    engine = toy(proposer=proposer, num_drafts=3, max_num_batched_tokens=300)
    text = ids_of(700, high=VOCAB, low=0)
    for length in (1, 127, 128, 129, 130, 255, 256, 257, 400, 513, 700):
        engine.clear_prefix_cache()
        assert not proposer.kept
        for found in (0, 128 * ((length - 1) // 128)):
            assert cached(engine, text[:length], SamplingParams(max_tokens=4))[1] == found
    assert engine.num_proposer_failures == 0
    assert proposer.shared == 8


def test_rows_missing_after_a_turn_without_drafts_are_made_and_kept() -> None:
    proposer = Carrying(oracle)
    engine = toy(proposer=proposer, num_drafts=3)
    text = ids_of(300, high=VOCAB, low=0)
    drafted = SamplingParams(max_tokens=20)
    cached(engine, text, SamplingParams(max_tokens=20, num_drafts=0))
    # 256 are there, 128 are used: the block between rebuilds the drafter's window.
    assert cached(engine, text, drafted) == (continuation(text, 20), 128)
    assert cached(engine, text, drafted) == (continuation(text, 20), 256)
    assert cached(engine, text, SamplingParams(max_tokens=20, num_drafts=0))[1] == 256
    assert engine.num_proposer_failures == 0


@pytest.mark.parametrize("rule", ["none", "oracle", "scattered"])
@pytest.mark.parametrize("answer", range(6, 12))
def test_rows_are_kept_of_blocks_that_the_last_steps_passed(rule: str, answer: int) -> None:
    """The last step asks no proposal, so the drafter is a pair behind when its block ends."""
    rules = {**RULES, "none": lambda history, count, step: []}
    proposer = Carrying(rules[rule])
    engine = toy(proposer=proposer, num_drafts=3)
    text = ids_of(251, high=VOCAB, low=0)
    tokens, _ = cached(engine, text, SamplingParams(max_tokens=answer))
    follow = [*text, *tokens, 4]
    want = continuation(follow, 30)
    assert cached(engine, follow, SamplingParams(max_tokens=30)) == (want, 256)
    assert proposer.shared == 1
    assert engine.num_proposer_failures == 0


@pytest.mark.parametrize("oldest", [128, 129, 200])
def test_rows_that_do_not_fill_the_window_are_not_kept(oldest: int) -> None:
    """As after a pre-emption: the newest rows were brought along, older ones are not made again."""
    proposer = Carrying(oracle)
    drafting = Drafting(proposer, vocab_size=VOCAB, max_seq_len=600, max_num_seqs=1, snapshots=True)
    one = Sequence(
        id=0,
        tokens=ids_of(300),
        prompt_len=300,
        params=SamplingParams(max_tokens=9),
        max_emitted=9,
        max_drafts=3,
    )
    drafting.open(one)
    proposer.live[0]["pairs"] = dict.fromkeys(range(oldest, 299), 5)
    fed = Fed(BatchRow(one, 200, 60, 300, reads=True), [], 0, 0, 60, ends=[256])
    drafting._copy_rows(fed, 256)
    assert list(fed.copied) == ([256] if oldest == 128 else [])
    assert len(proposer.kept) == len(fed.copied)


@pytest.mark.parametrize("common", [0, 1, 127, 128, 129, 255, 256, 300])
def test_hit_length_where_texts_part(common: int) -> None:
    engine = toy()
    first = ids_of(300, low=0, high=VOCAB)
    params = SamplingParams(max_tokens=30)
    tokens, _ = cached(engine, first, params)
    whole = [*first, *tokens]
    other = [*whole[:common], (whole[common] + 1) % VOCAB, *ids_of(200, seed=2, low=0, high=VOCAB)]
    got, found = cached(engine, other, params)
    assert found == 128 * (common // 128)
    assert got == continuation(other, 30)
    assert engine.num_prefix_lookups == 2
    assert engine.num_prefix_hits == (1 if found else 0)
    assert engine.num_prefix_tokens == found


def test_what_was_emitted_is_kept_as_the_prompt_is() -> None:
    """The next turn's text is prompt, answer and more: all whole blocks of it that were run."""
    engine = toy()
    for answer in (90, 127, 128, 129, 200):
        engine.clear_prefix_cache()
        first = ids_of(100, seed=answer, low=0, high=VOCAB)
        tokens, _ = cached(engine, first, SamplingParams(max_tokens=answer))
        follow = [*first, *tokens, 1, 2, 3]
        # The last token was emitted and never run.
        assert cached(engine, follow, SamplingParams(max_tokens=5)) == (
            continuation(follow, 5),
            128 * ((100 + answer - 1) // 128),
        )


def test_the_last_step_is_kept_too() -> None:
    engine = toy()
    text = ids_of(128, low=0, high=VOCAB)
    cached(engine, text, SamplingParams(max_tokens=1))
    assert cached(engine, [*text, 5], SamplingParams(max_tokens=1))[1] == 128


@pytest.mark.parametrize("at", range(252, 262))
def test_accepted_drafts_behind_a_stop_token_are_nobodys(at: int) -> None:
    """The prompt is such that a stop token ends the text near a block's end, drafts accepted
    beyond it; a later request that says the same further must not find them."""
    prompt = ids_of(at, seed=1, low=0, high=VOCAB)
    text = continuation(prompt, 40)
    index = next(i for i in range(2, 40) if text[i] not in text[:i])
    params = SamplingParams(max_tokens=40, stop_token_ids=[text[index]])
    engine = toy(proposer=Checked(oracle, hidden_rows=0), num_drafts=8)
    tokens, _ = cached(engine, prompt, params)
    assert tokens == text[: index + 1]
    assert engine.prefix is not None
    assert engine.prefix.tree.num_blocks == (at + index + 1) // 128
    whole = [*prompt, *text, 3]
    got, found = cached(engine, whole, SamplingParams(max_tokens=4))
    assert found <= 128 * ((at + index + 1) // 128)
    assert got == continuation(whole, 4)


def test_a_corrupted_commit_is_kept_under_the_ids_emitted() -> None:
    """A step that says something else than the text: the next turn goes by what was said."""

    class Wrong(ToyModel):
        def forward(self, inputs: StepInputs, pools: CachePools) -> TargetOutput:
            out = super().forward(inputs, pools)
            if len(inputs.ids) == 1 and int(inputs.positions[0]) == 200:
                out.logits.zero_()
                out.logits[0, 17] = 1.0
            return out

    engine = toy(model=Wrong())
    prompt = ids_of(150, low=0, high=VOCAB)
    tokens, _ = cached(engine, prompt, SamplingParams(max_tokens=150))
    right = continuation(prompt, 150)
    # Position 200 is the prompt's end plus 50, and says the answer's token 51.
    assert tokens[:51] == right[:51]
    assert tokens[51] == 17 != right[51]
    for text in (tokens, right):
        whole = [*prompt, *text, 2]
        got, found = cached(engine, whole, SamplingParams(max_tokens=6))
        assert got == continuation(whole, 6)
        assert found == (256 if text is tokens else 128)


@pytest.mark.parametrize("phase", range(7))
def test_after_an_abort_the_same_prompt_is_as_cold(phase: int) -> None:
    """Aborted after any number of steps: what was committed is right, and nothing else is there."""
    engine = toy(proposer=Checked(oracle, hidden_rows=0), num_drafts=3, max_num_batched_tokens=100)
    prompt = ids_of(251, low=0, high=VOCAB)
    number = engine.add(prompt, SamplingParams(max_tokens=60))
    committed = len(prompt)
    for _ in range(phase):
        committed += sum(len(e.token_ids) for e in engine.step())
    assert engine.abort(number)
    engine.check_idle()
    whole = [*prompt, *continuation(prompt, 60)]
    got, found = cached(engine, whole, SamplingParams(max_tokens=9))
    assert got == continuation(whole, 9)
    assert found <= 128 * (committed // 128)


class Poisoned(ToyModel):
    """Streams are not finite behind `poison`, whether or not anybody asks for logits."""

    def forward(self, inputs: StepInputs, pools: CachePools) -> TargetOutput:
        assert self.poison is not None
        out = super().forward(inputs, pools)
        for index, row in enumerate(inputs.hidden_rows.tolist()):
            slot = int(inputs.slots[row])
            at = torch.arange(int(inputs.positions[row]) + 1)
            blocks = pools.block_tables[slot, at // BLOCK_TOKENS]
            assert self.memory is not None
            if self.poison in self.memory[(blocks * BLOCK_TOKENS + at % BLOCK_TOKENS).numpy()]:
                out.hiddens[index] = torch.nan
        return out


def test_nothing_of_a_failed_request_is_kept_from_where_it_failed() -> None:
    poison = 60
    text = ids_of(400, low=0, high=60)
    engine = toy(model=Poisoned(poison=poison), max_num_batched_tokens=256)
    pools = engine._runner.pools
    bad = [*text[:200], poison, *text[201:]]
    number = engine.add(bad, SamplingParams(max_tokens=5))
    assert run(engine)[number][-1].finish_reason is FinishReason.ERROR
    assert engine.prefix is not None
    assert engine.prefix.tree.num_blocks == 1
    # What only the failed one wrote is scrubbed, what is kept is not.
    (node,) = engine.prefix.tree.path(text, limit=128)
    pools.rows4.fill_(1.0)
    number = engine.add(bad, SamplingParams(max_tokens=5))
    emission = run(engine)[number][-1]
    assert (emission.finish_reason, emission.cached_tokens) == (FinishReason.ERROR, 128)
    kept = pools.rows4.view(pools.rows4.shape[0], -1, 32, pools.rows4.shape[-1])
    assert bool((kept[:, node.block] == 1).all())
    assert not bool(kept[:, 0].any())
    assert cached(engine, text, SamplingParams(max_tokens=1)) == (continuation(text, 1), 128)


def test_cached_blocks_give_way_to_running_requests() -> None:
    """A full pool of kept blocks: a request with drafts evicts what it needs and goes on."""
    engine = toy(
        proposer=Checked(oracle, hidden_rows=0),
        num_drafts=4,
        num_blocks=4,
        max_seq_len=512,
        max_num_seqs=2,
    )
    for seed in range(4):
        prompt = ids_of(129, seed=seed, low=0, high=VOCAB)
        assert cached(engine, prompt, SamplingParams(max_tokens=2))[1] == 0
    assert engine.prefix is not None
    assert engine.prefix.tree.num_blocks >= 2
    prompts = [ids_of(200, seed=9, low=0, high=VOCAB), ids_of(30, seed=8, low=0, high=VOCAB)]
    got = decode(engine, prompts, SamplingParams(max_tokens=250))
    assert [tokens for tokens, _ in got] == [continuation(p, 250) for p in prompts]
    engine.clear_prefix_cache()
    assert engine.num_free_blocks == 4


def test_the_byte_budget_is_kept() -> None:
    probe = toy()
    cached(probe, ids_of(129, low=0, high=VOCAB), SamplingParams(max_tokens=1))
    assert probe.prefix is not None
    one = probe.prefix.tree.num_bytes
    engine = toy(prefix_cache_bytes=3 * one)
    assert engine.prefix is not None
    for seed in range(6):
        cached(engine, ids_of(300, seed=seed, low=0, high=VOCAB), SamplingParams(max_tokens=3))
        assert engine.prefix.tree.num_bytes <= 3 * one
    assert engine.prefix.tree.num_blocks == 3
    assert engine.prefix.tree.num_evicted > 0
    newest = ids_of(300, seed=5, low=0, high=VOCAB)
    assert cached(engine, newest, SamplingParams(max_tokens=3))[1] == 256


def test_blocks_in_use_outlive_their_eviction() -> None:
    engine = toy(max_num_batched_tokens=64)
    text = ids_of(300, low=0, high=VOCAB)
    cached(engine, text, SamplingParams(max_tokens=3))
    number = engine.add(text, SamplingParams(max_tokens=40))
    emissions = engine.step()
    engine.clear_prefix_cache()
    other = engine.add(ids_of(300, seed=3, low=0, high=VOCAB), SamplingParams(max_tokens=40))
    out = run(engine)
    tokens = [t for e in [*emissions, *out[number]] if e.request_id == number for t in e.token_ids]
    assert tokens == continuation(text, 40)
    assert [t for e in out[other] for t in e.token_ids] == continuation(
        ids_of(300, seed=3, low=0, high=VOCAB), 40
    )


def test_a_preempted_request_goes_on_from_its_own_blocks() -> None:
    engine = toy(num_blocks=5, max_num_seqs=2, max_seq_len=640, max_num_batched_tokens=300)
    prompts = [ids_of(120, seed=s, low=0, high=VOCAB) for s in range(2)]
    got = decode(engine, prompts, SamplingParams(max_tokens=350))
    assert [tokens for tokens, _ in got] == [continuation(p, 350) for p in prompts]
    assert engine.num_preemptions > 0
    assert engine.num_prefix_lookups == 2 + engine.num_preemptions
    assert engine.num_prefix_hits > 0


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_history_of_turns_says_what_a_cold_engine_says(data: st.DataObject) -> None:
    """Texts that begin alike come, go on, are aborted and evicted; the toy reads every token back
    from the blocks, so that one wrong block changes what it says."""
    slots = data.draw(st.integers(1, 3))
    kinds = {
        "none": lambda: Checked(oracle, hidden_rows=0, batch=2),
        "feeds": lambda: Checked(RULES["scattered"], hidden_rows=40, batch=2),
        "carries": lambda: Carrying(RULES["scattered"], batch=2),
        "short": lambda: Carrying(RULES["scattered"], window=20),
    }
    kind = data.draw(st.sampled_from(sorted(kinds)))
    engine = toy(
        proposer=kinds[kind](),
        num_drafts=data.draw(st.sampled_from([0, 3, 8])),
        max_num_seqs=slots,
        max_num_batched_tokens=data.draw(st.sampled_from([slots, 50, 256])),
        num_blocks=data.draw(st.integers(5, 12)),
        max_seq_len=600,
        prefix_cache_bytes=data.draw(st.sampled_from([60_000, BUDGET])),
    )
    texts = [ids_of(330, seed=s, low=0, high=VOCAB) for s in range(2)]
    said: dict[int, list[int]] = {}
    want: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 20))):
        what = data.draw(st.sampled_from(["add", "add", "step", "step", "abort", "run"]))
        if what == "add":
            text = data.draw(st.sampled_from(texts))
            prompt = text[: data.draw(st.integers(1, len(text)))]
            count = data.draw(st.integers(1, 100))
            few = data.draw(st.sampled_from([None, 0, 2]))
            number = engine.add(prompt, SamplingParams(max_tokens=count, num_drafts=few))
            said[number], want[number] = [], continuation(prompt, count)
            if len(prompt) + count < 400:
                texts.append([*prompt, *want[number]])
        elif what == "abort" and said:
            number = data.draw(st.sampled_from(sorted(said)))
            engine.abort(number)
            want[number] = want[number][: len(said[number])]
        else:
            for _ in range(40 if what == "run" else 1):
                for emission in engine.step():
                    said[emission.request_id] += emission.token_ids
    for number, emissions in run(engine).items():
        said[number] += [t for e in emissions for t in e.token_ids]
    assert said == want
    assert engine.num_proposer_failures == 0
    engine.clear_prefix_cache()
    assert engine.num_free_blocks == engine._scheduler.allocator.num_blocks
    proposer = engine.drafting.proposer if engine.drafting else None
    if isinstance(proposer, Carrying):
        assert not proposer.kept


# The real model: a hit leaves what a cold run leaves


def exact_state(engine: Engine, number: int) -> dict[str, torch.Tensor]:
    """Copies of all that the next step of a running request can read, its drafter's rows too."""
    sequence = engine._requests[number].sequence
    handle, pools = sequence.handle, engine._runner.pools
    slot, length = handle.slot, handle.length
    seen = {}
    for names, first in (
        (("window",), length - 127),
        (("raw4_kv", "raw4_score", "index_raw_kv", "index_raw_score"), length // 4 * 4 - 4),
        (("raw128_kv", "raw128_score"), length // 128 * 128),
    ):
        back = torch.arange(max(0, first), length)
        for name in names:
            ring = getattr(pools, name)
            seen[name] = ring[:, slot][:, back % ring.shape[2]].clone()
    for name, ratio in (("rows4", 4), ("index4", 4), ("rows128", 128)):
        rows = torch.arange(length // ratio)
        per_block = BLOCK_TOKENS // ratio
        blocks = torch.tensor([*handle.blocks, 0])[rows // per_block]
        seen[name] = getattr(pools, name)[:, blocks * per_block + rows % per_block].clone()
    drafting = engine.drafting
    if drafting is not None and drafting.has_state(sequence):
        head = drafting.proposer
        assert isinstance(head, DeepseekV4MtpHead)
        first_key, held = head.held_rows(drafting._states[number])
        # The next proposal's row has key length - 1 and sees 127 keys before it.
        wanted = max(0, length - 128)
        assert first_key <= wanted
        assert first_key + held.shape[0] == length - 1
        seen["drafter"] = held[wanted - first_key :].clone()
    return seen


class Pair:
    """An engine that keeps prefixes and one that keeps none, over the same weights."""

    def __init__(
        self, built: Built, config: Any, *, dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        options = {"max_seq_len": 700, "max_num_seqs": 2, "max_num_batched_tokens": 150, **options}
        self.heads = []
        self.engines = []
        for size in (BUDGET, 0):
            head = DeepseekV4MtpHead.new(
                built.mtp,
                built.embed_tokens,
                built.lm_head,
                config,
                0,
                options["max_seq_len"],
                num_slots=options["max_num_seqs"],
            )
            self.heads.append(head)
            self.engines.append(
                Engine(
                    built.model,
                    config,
                    proposer=head,
                    num_drafts=3,
                    prefix_cache_bytes=size,
                    dtype=dtype,
                    **options,
                )
            )

    def scramble(self) -> None:
        """Leave noise in every ring, as other sequences would: a slot comes back as it was else."""
        for engine, head in zip(self.engines, self.heads, strict=True):
            pools = engine._runner.pools
            for name in (
                "window",
                "raw4_kv",
                "raw4_score",
                "index_raw_kv",
                "index_raw_score",
                "raw128_kv",
                "raw128_score",
            ):
                getattr(pools, name).normal_()
            head.ring.rows.normal_()

    def run(
        self, prompt: list[int], params: SamplingParams, *, look: Items[int] = ()
    ) -> tuple[list[int], int]:
        """Tokens and cached tokens, after making sure that both engines agree.

        State is compared whenever both have emitted one of `look` tokens.
        """
        self.scramble()
        tokens: list[list[int]] = []
        states: list[dict[int, dict[str, torch.Tensor]]] = []
        found = 0
        for engine in self.engines:
            number = engine.add(prompt, params)
            said: list[int] = []
            state: dict[int, dict[str, torch.Tensor]] = {}
            while engine.has_work:
                for emission in engine.step():
                    said += emission.token_ids
                    found = max(found, emission.cached_tokens)
                    if emission.finish_reason is None and len(said) in look:
                        state[len(said)] = exact_state(engine, number)
            tokens.append(said)
            states.append(state)
            engine.check_idle()
            assert engine.num_proposer_failures == 0
        assert tokens[0] == tokens[1]
        assert states[0].keys() == states[1].keys()
        for count, state in states[0].items():
            for name, rows in state.items():
                assert torch.equal(rows, states[1][count][name]), (name, count)
        self.compared = sum(map(len, states[0].values()))
        return tokens[0], found


def built_as(weights: Weights, backend: Any) -> Built:
    return build(weights, weights.config, device=CPU, dtype=torch.float32, backend=backend)


@pytest.fixture(scope="module")
def parts(tiny_weights: Weights) -> Built:
    """Over whatever is fast here; what depends on the backend takes `both`."""
    return built_as(tiny_weights, "auto")


@pytest.fixture(scope="module")
def both(tiny_weights: Weights, backend: str) -> Built:
    return built_as(tiny_weights, backend)


def turns(pair: Pair, first: int, answers: int, look: range) -> None:
    """A conversation of three turns of `answers` tokens each, compared all along."""
    prompt, ran = ids_of(first, seed=first), 0
    params = SamplingParams(max_tokens=answers, ignore_eos=True)
    for turn in range(3):
        answer, found = pair.run(prompt, params, look=look)
        assert pair.compared > 10
        assert found == 128 * (ran // 128)
        # The answer's last token was not run.
        ran = len(prompt) + len(answer) - 1
        prompt = [*prompt, *answer, *ids_of(60 + turn, seed=turn)]


@pytest.mark.parametrize("first", [100, 127, 128, 129, 257])
def test_a_hit_and_a_cold_run_leave_equal_state(
    tiny_weights: Weights, parts: Built, first: int
) -> None:
    """Target caches and drafter rows, bit for bit, and the tokens."""
    turns(Pair(parts, tiny_weights.config), first, 60, range(1, 60, 3))


def test_a_hit_is_exact_in_either_backend(tiny_weights: Weights, both: Built) -> None:
    turns(Pair(both, tiny_weights.config), 120, 14, range(1, 14))


@pytest.mark.parametrize("ahead", [1, 2, 3, 4, 5, 126, 127, 128, 129])
def test_the_first_steps_behind_a_hit_are_those_of_a_cold_run(
    tiny_weights: Weights, parts: Built, ahead: int
) -> None:
    """`ahead` tokens are read behind the block's end; all that the next step sees is compared."""
    pair = Pair(parts, tiny_weights.config, max_num_batched_tokens=64)
    text = ids_of(256 + ahead, seed=ahead)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    pair.run([*text[:256], 9], params)
    _, found = pair.run(text, params, look=range(1, 6))
    assert found == 256
    assert pair.compared > 0


@pytest.mark.parametrize("drafts", [0, 1, 8, None])
def test_blocks_are_kept_whoever_drafts(
    tiny_weights: Weights, parts: Built, drafts: int | None
) -> None:
    """A first turn without drafts, or with other numbers, serves a second with drafts."""
    pair = Pair(parts, tiny_weights.config)
    prompt = ids_of(130, seed=4)
    answer, _ = pair.run(prompt, SamplingParams(max_tokens=140, ignore_eos=True, num_drafts=drafts))
    prompt = [*prompt, *answer, 5]
    for want in ((128 if drafts == 0 else 256), 256):
        _, found = pair.run(
            prompt, SamplingParams(max_tokens=20, ignore_eos=True), look=range(1, 20)
        )
        assert found == want


def test_a_hit_is_exact_in_half_precision(tiny_weights: Weights) -> None:
    config = tiny_weights.config
    built = build(tiny_weights, config, device=CPU, dtype=torch.bfloat16, backend="torch")
    pair = Pair(built, config, dtype=torch.bfloat16)
    prompt = ids_of(140, seed=2)
    answer, _ = pair.run(prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    _, found = pair.run([*prompt, *answer, 9], params, look=range(1, 12, 3))
    assert found == 128
    assert pair.compared > 0


def test_shared_blocks_are_never_written(tiny_weights: Weights, parts: Built) -> None:
    """Two texts part behind shared blocks; both say what they say cold and the blocks stay."""
    pair = Pair(parts, tiny_weights.config)
    warm = pair.engines[0]
    text = ids_of(300, seed=6)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    pair.run(text, params)
    assert warm.prefix is not None
    shared = [node.block for node in warm.prefix.tree.path(text, limit=256)]
    assert len(shared) == 2
    pools = warm._runner.pools

    def contents() -> list[torch.Tensor]:
        return [
            pools.rows4.view(pools.rows4.shape[0], -1, 32, pools.rows4.shape[-1])[
                :, shared
            ].clone(),
            pools.index4.view(pools.index4.shape[0], -1, 32, pools.index4.shape[-1])[
                :, shared
            ].clone(),
            pools.rows128[:, shared].clone(),
        ]

    before = contents()
    both = [[*text[:256], *ids_of(60, seed=s)] for s in (7, 8)]
    # At once in one engine, then each against a cold one.
    together = decode(warm, both, params)
    for prompt, (tokens, _) in zip(both, together, strict=True):
        said, found = pair.run(prompt, params)
        assert found == 256
        assert said == tokens
    assert all(torch.equal(x, y) for x, y in zip(before, contents(), strict=True))


def test_rows_are_copied_out_and_back_without_a_leak(tiny_weights: Weights, parts: Built) -> None:
    pair = Pair(parts, tiny_weights.config, num_blocks=7)
    head, warm = pair.heads[0], pair.engines[0]
    assert warm.prefix is not None
    for seed in range(5):
        prompt = ids_of(260, seed=seed)
        for _ in range(2):
            pair.run(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
        with_rows = sum(
            node.payload is not None and node.payload.drafter is not None
            for node in warm.prefix.tree.path(prompt, limit=260)
        )
        assert with_rows == 2
        assert head.num_carried == warm.prefix.tree.num_blocks
    assert warm.prefix.tree.num_evicted > 0
    warm.clear_prefix_cache()
    assert head.num_carried == 0
    assert head.num_free_slots == head.num_slots
    assert warm.num_free_blocks == 7


def test_a_second_turn_reads_its_new_tokens_only(tiny_weights: Weights, parts: Built) -> None:
    """Target rows and drafter rows of the second turn: less than a block and what is new."""
    pair = Pair(parts, tiny_weights.config)
    warm, head = pair.engines[0], pair.heads[0]
    rows: list[int] = []
    fed: list[int] = []
    forward, append = warm._runner._model.forward, head.catchup_drafter
    prompt = ids_of(250, seed=3)
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    answer, _ = pair.run(prompt, params)

    class Counting:
        def forward(self, inputs: StepInputs, pools: CachePools) -> TargetOutput:
            rows.append(len(inputs.ids))
            return forward(inputs, pools)

    def counted(tokens: Any, *rest: Any) -> int:
        fed.append(len(tokens))
        return append(tokens, *rest)

    warm._runner._model = Counting()
    head.catchup_drafter = counted  # type: ignore[method-assign]
    whole = [*prompt, *answer, *ids_of(20, seed=8)]
    number = warm.add(whole, SamplingParams(max_tokens=1, num_drafts=3, ignore_eos=True))
    run(warm)
    assert number
    assert sum(rows) == len(whole) - 256
    number = warm.add(whole, SamplingParams(max_tokens=3, num_drafts=3, ignore_eos=True))
    warm.step()
    assert sum(fed) <= len(whole) - 256
    run(warm)


def test_preempted_requests_draft_on_as_if_nothing_happened(
    tiny_weights: Weights, parts: Built
) -> None:
    pair = Pair(parts, tiny_weights.config, num_blocks=5, max_seq_len=600)
    prompts = [ids_of(120, seed=s) for s in range(2)]
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    warm, cold = (decode(engine, prompts, params) for engine in pair.engines)
    assert warm == cold
    assert pair.engines[0].num_preemptions > 0
    assert pair.engines[0].num_proposer_failures == 0


def test_an_oracle_serves_as_before(tiny_weights: Weights, parts: Built) -> None:
    """Every draft accepted, so that steps pass block ends in the middle of their drafts."""
    config = tiny_weights.config
    prompt = ids_of(100, seed=1)
    options: dict[str, Any] = {"max_seq_len": 700, "max_num_seqs": 1}
    plain = Engine(parts.model, config, **options)
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    ((text, _),) = decode(plain, [prompt], params)
    engine = Engine(
        parts.model,
        config,
        proposer=OracleProposer([[*prompt, *text]]),
        num_drafts=8,
        prefix_cache_bytes=BUDGET,
        **options,
    )
    assert cached(engine, prompt, params) == (text, 0)
    follow = [*prompt, *text[:-3], 9]
    ((want, _),) = decode(plain, [follow], params)
    assert cached(engine, follow, params) == (want, 256)
