"""The engine's cache of prefixes: what a request need not compute since another one did.

Joins the tree of blocks (`paceline.cache.prefix`, which knows no tensor) with what must be copied
and put back (`paceline.cache.snapshot`, and the drafter's rows through the engine's drafting).

Only what a step committed is kept, under the ids the caller was given: a draft that was not
accepted, an accepted one that a stop token cut off, and anything a failed step wrote never are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.cache.blocks import BLOCK_TOKENS, BlockAllocator
from paceline.cache.pools import CachePools
from paceline.cache.prefix import PrefixNode, PrefixTree
from paceline.cache.snapshot import RingSnapshot, block_bytes
from paceline.engine.drafting import Drafting
from paceline.engine.sequence import Admission, BatchRow, PrefixHit, Sequence
from paceline.types import DrafterKv

__all__ = ["PrefixCache", "Snapshot"]


@dataclass(slots=True, eq=False)
class Snapshot:
    """All that a sequence of `rings.length` tokens needs and blocks do not hold.

    Attributes:
        rings: the target's ring rows.
        streams: [hc_mult, hidden], the target's streams of the last of the tokens: the pair they
            make with the token that follows is the first row the drafter still lacks.
        drafter: the drafter's rows of the pairs before, owned by the cache; None where nothing was
            drafted, or the proposer cannot copy its rows.
    """

    rings: RingSnapshot
    streams: torch.Tensor
    drafter: DrafterKv | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all of it."""
        own = self.rings.num_bytes + self.streams.numel() * self.streams.element_size()
        return own + (0 if self.drafter is None else self.drafter.num_bytes)


class PrefixCache:
    """Finds, restores and keeps prefixes for an engine's scheduler.

    Args:
        allocator: the blocks, shared with the sequences.
        pools: the target's caches.
        window: positions a query sees, its own included.
        budget_bytes: most bytes of kept blocks and snapshots together.
        drafting: the engine's, made with `snapshots`; None without a proposer.

    Attributes:
        tree: what is kept.
        num_lookups: admissions; a request that was pre-empted is admitted again.
        num_hits: those that found a prefix.
        num_tokens: tokens they did not compute.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        pools: CachePools,
        *,
        window: int,
        budget_bytes: int,
        drafting: Drafting | None,
    ) -> None:
        self.num_lookups = 0
        self.num_hits = 0
        self.num_tokens = 0
        self.tree: PrefixTree[Snapshot] = PrefixTree(
            allocator,
            budget_bytes=budget_bytes,
            block_bytes=block_bytes(pools),
            drop=self._drop,
        )
        self._allocator = allocator
        self._pools = pools
        self._window = window
        self._drafting = drafting
        self._newest: dict[int, PrefixNode[Snapshot]] = {}
        self._dropped: list[DrafterKv] = []

    # What the scheduler asks

    def match(self, sequence: Sequence) -> PrefixHit | None:
        """Find the longest prefix of a sequence to go on from; its blocks are shared once more.

        At least one token is left to read. Where the sequence will draft and the drafter's rows
        were not kept, one block is read anew, which rebuilds the drafter's window from the
        target's own streams. Nothing is found for one whose prompt has to run.
        """
        if sequence.needs_prompt_rows:
            return None
        path = self.tree.path(sequence.tokens, limit=len(sequence.tokens) - 1)
        whole = [node for node in path if node.payload is not None]
        if not whole:
            return None
        best = whole[-1]
        drafting = self._drafting
        if drafting is not None and drafting.wants_rows(sequence, best.length):
            enough = best.length - BLOCK_TOKENS
            fitting = [
                node
                for node in whole
                if node.length <= enough
                or (node.payload is not None and node.payload.drafter is not None)
            ]
            if not fitting:
                return None
            best = fitting[-1]
        self.tree.touch(best)
        blocks = [node.block for node in path[: best.length // BLOCK_TOKENS]]
        for block in blocks:
            self._allocator.share(block)
        return PrefixHit(length=best.length, blocks=blocks, snapshot=best.payload)

    def evict(self, count: int) -> int:
        """Give up blocks that only the cache holds; at least `count`, or all there are."""
        return self.tree.evict(count)

    # Admission

    def admit(self, admission: Admission) -> None:
        """Put a newly admitted sequence where its prefix ends; its drafter's state is open."""
        sequence, hit = admission.sequence, admission.hit
        self.num_lookups += 1
        if sequence.num_cached is None:
            sequence.num_cached = 0 if hit is None else min(hit.length, sequence.prompt_len)
        if hit is None:
            return
        self.num_hits += 1
        self.num_tokens += hit.length
        snapshot = hit.snapshot
        assert isinstance(snapshot, Snapshot), "the hit is another cache's"
        snapshot.rings.restore(self._pools, sequence.handle.slot)
        if self._drafting is not None:
            self._drafting.go_on(sequence, hit.length, snapshot.drafter, snapshot.streams)

    # What a step leaves

    def streams_wanted(self, row: BatchRow, num_rows: int) -> int:
        """Say of how many of a row's last positions the streams are needed, drafts included."""
        before = row.first % BLOCK_TOKENS
        return max(0, before + num_rows - BLOCK_TOKENS + 1)

    def ends(self, row: BatchRow) -> list[int]:
        """Block ends that a committed row passed and that are worth keeping.

        What follows the last token the caller was given is nobody's text, and is left out.
        """
        sequence = row.sequence
        stop = min(sequence.handle.length, len(sequence.tokens))
        first = row.first // BLOCK_TOKENS * BLOCK_TOKENS + BLOCK_TOKENS
        if first > stop:
            return []
        return [end for end in range(first, stop + 1, BLOCK_TOKENS) if self._lacks(sequence, end)]

    def take(self, sequence: Sequence, end: int, streams: torch.Tensor) -> Snapshot:
        """Copy what the block's end needs, before anything else runs.

        Args:
            sequence: whose row passed `end` in this step and is committed.
            end: of `ends`.
            streams: [hc_mult, hidden] of position end - 1; copied.
        """
        slot = sequence.handle.slot
        rings = RingSnapshot.take(self._pools, slot, end, window=self._window)
        return Snapshot(rings, streams.clone())

    def keep(self, sequence: Sequence, snapshot: Snapshot, drafter: DrafterKv | None) -> None:
        """Keep a block and its snapshot, or drop both where there is no room or they are no good.

        The last position sees all of its window in every layer, so that its streams are finite only
        where the rows behind it are.

        Args:
            sequence: still holding its blocks.
            snapshot: of `take`.
            drafter: the drafter's rows of keys up to `rings.length - 2`; the cache's from now on.
        """
        snapshot.drafter = drafter
        node = None
        if bool(torch.isfinite(snapshot.streams).all()):
            node = self.tree.put(
                sequence.tokens,
                sequence.handle.blocks,
                snapshot.rings.length,
                snapshot,
                snapshot.num_bytes,
                after=self._newest.get(sequence.id),
            )
        if node is not None:
            self._newest[sequence.id] = node
        elif drafter is not None:
            self._dropped.append(drafter)

    # Letting go

    def settle(self) -> None:
        """Free the drafter's rows of what was dropped; nobody may still go on from it."""
        for kv in self._dropped:
            if self._drafting is not None:
                self._drafting.free_rows(kv)
        self._dropped.clear()

    def forget(self, sequence: Sequence) -> None:
        """Take notice that a sequence ended; what was kept of it stays."""
        self._newest.pop(sequence.id, None)

    def clear(self) -> None:
        """Let everything go that is kept; running sequences keep the blocks they share."""
        self.tree.clear()
        self.settle()

    def _lacks(self, sequence: Sequence, end: int) -> bool:
        node = self.tree.find(sequence.tokens, end, after=self._newest.get(sequence.id))
        if node is None or node.payload is None:
            return True
        # One that was not drafted for may have been first here; another brings the rows it lacks.
        drafting = self._drafting
        brings = drafting is not None and drafting.snapshots and drafting.has_state(sequence)
        if node.payload.drafter is None and brings:
            return True
        self.tree.touch(node)
        self._newest[sequence.id] = node
        return False

    def _drop(self, snapshot: Snapshot) -> None:
        if snapshot.drafter is not None:
            self._dropped.append(snapshot.drafter)
