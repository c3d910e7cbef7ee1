"""Length arithmetic and block ownership, and that a rewind is exact in every cache."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import Rig, make_rig, visible_cache

from paceline.cache.blocks import BLOCK_TOKENS, BlockAllocator
from paceline.cache.state import SequenceCache
from paceline.models.deepseek_v4.checkpoint import Weights

WIDTH = 9
LIMIT = 640


def handle(allocator: BlockAllocator | None = None, *, limit: int = LIMIT) -> SequenceCache:
    allocator = allocator or BlockAllocator(-(-limit // BLOCK_TOKENS))
    return SequenceCache(allocator, slot=0, max_width=WIDTH, max_seq_len=limit)


def advance(rig: Rig, cache: SequenceCache, tokens: list[int], keep: int) -> torch.Tensor:
    """Run `tokens` at the handle's length and keep the first `keep`."""
    assert cache.reserve(len(tokens))
    logits, _ = rig.run((0, cache.length, tokens))
    cache.commit(keep)
    return logits


@pytest.mark.parametrize("seed", range(3))
def test_rewind_leaves_what_a_run_that_never_went_there_holds(
    tiny_weights: Weights, backend: str, seed: int
) -> None:
    rng = random.Random(seed)
    config = tiny_weights.config
    rig = make_rig(tiny_weights, config, backend=backend, max_seq_len=LIMIT, max_width=WIDTH)
    plain = make_rig(tiny_weights, config, backend=backend, max_seq_len=LIMIT, max_width=WIDTH)
    cache, twin = handle(), handle()
    kept: list[int] = []
    while cache.length < 300:
        width = rng.randint(1, WIDTH)
        tokens = [rng.randrange(8, 260) for _ in range(width)]
        accepted = rng.randint(1, width)
        advance(rig, cache, tokens, accepted)
        kept += tokens[:accepted]
        # As far back as the handle allows, often: the bound itself is under test.
        back = rng.choice([0, cache.rewindable, rng.randint(0, cache.rewindable)])
        cache.rewind(back)
        del kept[len(kept) - back :]
        assert cache.length == len(kept)
    while twin.length < len(kept):
        piece = kept[twin.length : twin.length + WIDTH]
        advance(plain, twin, piece, len(piece))
    window = config.sliding_window
    mine = visible_cache(rig.pools, 0, cache.length, window)
    theirs = visible_cache(plain.pools, 0, twin.length, window)
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name
    follow = [rng.randrange(8, 260) for _ in range(WIDTH)]
    assert torch.equal(advance(rig, cache, follow, 1), advance(plain, twin, follow, 1))


def test_rewind_ends_where_the_rings_end(tiny_weights: Weights, backend: str) -> None:
    """One row beyond `rewindable` the rings no longer hold what the next step reads."""
    config = tiny_weights.config
    rig = make_rig(tiny_weights, config, backend=backend, max_seq_len=LIMIT, max_width=WIDTH)
    plain = make_rig(tiny_weights, config, backend=backend, max_seq_len=LIMIT, max_width=WIDTH)
    ids = torch.randint(8, 260, (300,), generator=torch.Generator().manual_seed(3)).tolist()
    cache, twin = handle(), handle()
    while cache.length < 297:
        advance(rig, cache, ids[cache.length : cache.length + WIDTH], WIDTH)
    bound = cache.length - cache.rewindable
    with pytest.raises(ValueError, match="can be taken back"):
        cache.rewind(cache.rewindable + 1)
    while twin.length < bound - 1:
        piece = ids[twin.length : min(twin.length + WIDTH, bound - 1)]
        advance(plain, twin, piece, len(piece))
    beyond = [rig.run((0, bound - 1, ids[bound - 1 : bound]))[0]]
    beyond.append(plain.run((0, bound - 1, ids[bound - 1 : bound]))[0])
    assert not torch.equal(*beyond)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, WIDTH), st.integers(0, WIDTH), st.integers(0, 20))))
def test_any_history_keeps_lengths_and_blocks_right(
    history: list[tuple[int, int, int]],
) -> None:
    allocator = BlockAllocator(5)
    cache, length, high = handle(allocator), 0, 0
    for width, accepted, back in history:
        if length + width > LIMIT:
            break
        assert cache.reserve(width)
        high = max(high, length + width)
        cache.commit(min(accepted, width))
        length += min(accepted, width)
        # Positions high - (127 + WIDTH) and on are in the rings; a step at L reads from L - 127.
        allowed = max(0, length - max(0, high - WIDTH))
        assert cache.rewindable == allowed
        if back > allowed:
            with pytest.raises(ValueError, match="can be taken back"):
                cache.rewind(back)
        else:
            cache.rewind(back)
            length -= back
        assert cache.length == length
        assert len(cache.blocks) == -(-high // BLOCK_TOKENS)
        assert len(set(cache.blocks)) == len(cache.blocks)
        assert allocator.num_free == 5 - len(cache.blocks)
    cache.free()
    cache.free()
    assert allocator.all_home


def test_what_is_out_of_bounds_is_refused_and_changes_nothing() -> None:
    allocator = BlockAllocator(1)
    cache = handle(allocator)
    for width in (0, WIDTH + 1):
        with pytest.raises(ValueError, match=f"width is {width}"):
            cache.reserve(width)
    assert cache.reserve(3)
    with pytest.raises(ValueError, match="3 are reserved"):
        cache.commit(4)
    cache.commit(3)
    with pytest.raises(ValueError, match="0 are reserved"):
        cache.commit(1)
    full = handle(BlockAllocator(2), limit=10)
    assert full.reserve(9)
    full.commit(9)
    with pytest.raises(ValueError, match="beyond the limit of 10"):
        full.reserve(2)
    while cache.length < BLOCK_TOKENS - 2:
        assert cache.reserve(1)
        cache.commit(1)
    assert not cache.reserve(3)
    assert (cache.length, len(cache.blocks), allocator.num_free) == (BLOCK_TOKENS - 2, 1, 0)


def test_a_shared_block_is_home_when_its_last_holder_lets_go() -> None:
    allocator = BlockAllocator(3)
    taken = allocator.allocate(2)
    assert taken is not None
    assert 0 not in taken
    assert allocator.allocate(2) is None
    assert allocator.num_free == 1
    allocator.share(taken[0])
    assert allocator.holders(taken[0]) == 2
    allocator.release(taken)
    assert (allocator.holders(taken[0]), allocator.num_free) == (1, 2)
    assert not allocator.all_home
    allocator.release(taken[:1])
    assert allocator.all_home
    with pytest.raises(AssertionError, match="is not held"):
        allocator.release(taken[:1])


def test_blocks_may_be_held_ahead_of_their_rows() -> None:
    allocator = BlockAllocator(3)
    cache = handle(allocator)
    assert cache.hold(BLOCK_TOKENS + 1)
    assert (len(cache.blocks), allocator.num_free, cache.length) == (2, 1, 0)
    assert cache.hold(5)
    assert cache.reserve(WIDTH)
    assert cache.blocks_wanted(2 * BLOCK_TOKENS) == 0
    assert cache.blocks_wanted(2 * BLOCK_TOKENS + 1) == 1
    assert not cache.hold(3 * BLOCK_TOKENS + 1)
    assert (len(cache.blocks), allocator.num_free) == (2, 1)
    cache.free()
    assert allocator.all_home


def test_a_handle_that_goes_on_from_shared_blocks_frees_its_own_hold_and_rewinds_no_further() -> (
    None
):
    allocator = BlockAllocator(4)
    kept = allocator.allocate(2)
    assert kept is not None
    for block in kept:
        allocator.share(block)
    start = 2 * BLOCK_TOKENS
    cache = SequenceCache(
        allocator, slot=1, max_width=WIDTH, max_seq_len=LIMIT, length=start, blocks=kept
    )
    assert (cache.length, cache.rewindable, cache.blocks) == (start, 0, kept)
    for width in (WIDTH, WIDTH, 3):
        assert cache.reserve(width)
        cache.commit(width)
    # The rings were filled from 127 rows before its beginning on, and hold a step's width beyond.
    assert cache.rewindable == WIDTH
    cache.rewind(WIDTH)
    assert cache.reserve(1)
    cache.commit(1)
    assert cache.rewindable == 1
    cache.free()
    assert [allocator.holders(block) for block in kept] == [1, 1]
    assert allocator.num_free == 2
    short = SequenceCache(
        allocator, slot=1, max_width=WIDTH, max_seq_len=LIMIT, length=start, blocks=kept
    )
    assert short.reserve(4)
    short.commit(4)
    assert short.rewindable == 4
    with pytest.raises(ValueError, match="4 can be taken back"):
        short.rewind(5)
    with pytest.raises(AssertionError, match="1 blocks for 129 tokens"):
        SequenceCache(
            allocator, slot=1, max_width=WIDTH, max_seq_len=LIMIT, length=129, blocks=kept[:1]
        )
