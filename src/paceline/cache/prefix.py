"""Which beginnings of texts are kept: a tree of blocks by the ids they stand for. No tensor.

A node is one block of `BLOCK_TOKENS` ids behind the node of the ids before it, so that a path from
the root spells a text and two texts share the nodes they begin with. Children are found by the ids
themselves: Python hashes the tuple and then compares it whole, so no two texts are ever taken for
one another.

A node holds its block once in the allocator, beside whoever else uses it, and a payload: what must
be restored at the node's end and is not in blocks. Ids that were evicted and whose continuation is
kept again are nodes without a payload, which are passed through and never restored.

Use of a node is noted for its ancestors after it, root last. The node used least recently is
therefore always a leaf, and no path ever loses its middle.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from paceline.cache.blocks import BLOCK_TOKENS, BlockAllocator
from paceline.types import BlockId

__all__ = ["PrefixNode", "PrefixTree"]

P = TypeVar("P")

Ids = tuple[int, ...]


class PrefixNode(Generic[P]):
    """A kept block; made and changed by its tree only.

    Attributes:
        parent: the block before, or None for the root.
        ids: the block's own ids; none for the root.
        length: tokens from the text's beginning to the block's end.
        block: where its compressed rows are; 0 for the root and for a node that was evicted.
        payload: what to restore at `length`, or None.
    """

    __slots__ = ("block", "children", "ids", "length", "parent", "payload", "payload_bytes")

    def __init__(self, parent: PrefixNode[P] | None, ids: Ids, block: BlockId) -> None:
        self.parent = parent
        self.ids = ids
        self.block = block
        self.length: int = 0 if parent is None else parent.length + BLOCK_TOKENS
        self.children: dict[Ids, PrefixNode[P]] = {}
        self.payload: P | None = None
        self.payload_bytes = 0

    @property
    def is_kept(self) -> bool:
        """Whether it is still in the tree."""
        return self.block != 0


class PrefixTree(Generic[P]):
    """Keeps blocks and payloads by the ids that lead to them, least recently used out first.

    Invariant: `num_bytes` is `num_blocks` blocks and all payloads, and never above the budget.

    Args:
        allocator: whose blocks are kept.
        budget_bytes: most bytes of blocks and payloads together.
        block_bytes: bytes of a block's rows over all layers.
        drop: called with each payload the tree lets go.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        budget_bytes: int,
        block_bytes: int,
        drop: Callable[[P], None],
    ) -> None:
        self.budget_bytes = budget_bytes
        self.num_bytes = 0
        self.num_evicted = 0
        self._allocator = allocator
        self._block_bytes = block_bytes
        self._drop = drop
        self._root: PrefixNode[P] = PrefixNode(None, (), BlockId(0))
        self._order: OrderedDict[PrefixNode[P], None] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        """Blocks held."""
        return len(self._order)

    @property
    def num_shared(self) -> int:
        """Blocks of these that somebody else holds too."""
        return sum(self._allocator.holders(node.block) > 1 for node in self._order)

    def path(self, tokens: Sequence[int], *, limit: int) -> list[PrefixNode[P]]:
        """The nodes that the first `limit` tokens begin with, from the first block on."""
        return list(self._walk(tokens, limit))

    def find(
        self, tokens: Sequence[int], length: int, *, after: PrefixNode[P] | None = None
    ) -> PrefixNode[P] | None:
        """Find the node of the first `length` tokens.

        Args:
            tokens: a text of at least `length` ids.
            length: a multiple of `BLOCK_TOKENS`.
            after: a node of this text found before, where the search may begin.
        """
        parent = self._parent(tokens, length, after)
        return None if parent is None else parent.children.get(_block_ids(tokens, length))

    def touch(self, node: PrefixNode[P]) -> None:
        """Note that a node was used."""
        up: PrefixNode[P] | None = node
        while up is not None and up.is_kept:
            self._order.move_to_end(up)
            up = up.parent

    def put(
        self,
        tokens: Sequence[int],
        blocks: Sequence[BlockId],
        length: int,
        payload: P,
        payload_bytes: int,
        *,
        after: PrefixNode[P] | None = None,
    ) -> PrefixNode[P] | None:
        """Keep the first `length` tokens; what is kept of them already is used and stays.

        Args:
            tokens: a text of at least `length` ids.
            blocks: the text's blocks in order, held by the caller; those of new nodes are shared.
            length: a multiple of `BLOCK_TOKENS`, at least one.
            payload: what to restore there; takes the place of one that was kept before.
            payload_bytes: its bytes.
            after: as in `find`.

        Returns:
            The node, or None where there is no room beside its own ancestors: then nothing changed
            but for what was evicted, and the payload is still the caller's.
        """
        assert len(tokens) >= length, f"{len(tokens)} ids for a text of {length}"
        parent = self._parent(tokens, length, after)
        if parent is None:
            path = list(self._walk(tokens, length - BLOCK_TOKENS))
            parent = path[-1] if path else self._root
        node = self.find(tokens, length, after=parent)
        self.touch(node or parent)
        missing = 0 if node is not None else (length - parent.length) // BLOCK_TOKENS
        more = missing * self._block_bytes + payload_bytes
        if not self._make_room(more, beside=parent, gone=node):
            return None
        if node is None:
            node = parent
            while node.length < length:
                node = self._add(node, tokens, blocks)
            self.touch(node)
        elif node.payload is not None:
            self._drop(node.payload)
        node.payload = payload
        self.num_bytes += payload_bytes - node.payload_bytes
        node.payload_bytes = payload_bytes
        return node

    def evict(self, count: int) -> int:
        """Give up blocks that nobody else holds, and what continues them.

        Args:
            count: how many are lacking.

        Returns:
            Blocks that became free: at least `count`, or all that could.
        """
        before = self._allocator.num_free
        for node in list(self._order):
            if self._allocator.num_free - before >= count:
                break
            if node.is_kept and self._allocator.holders(node.block) == 1:
                for one in reversed(_subtree(node)):
                    self._remove(one)
        return self._allocator.num_free - before

    def clear(self) -> None:
        """Let everything go."""
        for node in list(self._order):
            self._remove(node)

    def _walk(self, tokens: Sequence[int], length: int) -> Iterator[PrefixNode[P]]:
        node = self._root
        for end in range(BLOCK_TOKENS, length + 1, BLOCK_TOKENS):
            child = node.children.get(_block_ids(tokens, end))
            if child is None:
                return
            yield child
            node = child

    def _parent(
        self, tokens: Sequence[int], length: int, after: PrefixNode[P] | None
    ) -> PrefixNode[P] | None:
        """The node that one of `length` tokens hangs on, if it is kept."""
        wanted = length - BLOCK_TOKENS
        if wanted == 0:
            return self._root
        if after is not None and after.is_kept and after.length == wanted:
            return after
        for node in self._walk(tokens, wanted):
            if node.length == wanted:
                return node
        return None

    def _add(
        self, parent: PrefixNode[P], tokens: Sequence[int], blocks: Sequence[BlockId]
    ) -> PrefixNode[P]:
        ids = _block_ids(tokens, parent.length + BLOCK_TOKENS)
        node = PrefixNode(parent, ids, blocks[parent.length // BLOCK_TOKENS])
        self._allocator.share(node.block)
        parent.children[ids] = node
        self._order[node] = None
        self.num_bytes += self._block_bytes
        return node

    def _make_room(self, more: int, *, beside: PrefixNode[P], gone: PrefixNode[P] | None) -> bool:
        """Evict until `more` bytes fit the budget.

        Args:
            more: bytes to come.
            beside: a node just used; it and its ancestors stay.
            gone: a child of it that stays but for its payload, or None.
        """
        staying = more
        up: PrefixNode[P] | None = beside
        while up is not None and up.is_kept:
            staying += self._block_bytes + up.payload_bytes
            up = up.parent
        if gone is not None:
            staying += self._block_bytes
            more -= gone.payload_bytes
        if staying > self.budget_bytes:
            return False
        # What stays was used last, so it is never the oldest while anything else is there.
        while self.num_bytes + more > self.budget_bytes:
            self._remove(next(iter(self._order)))
        return True

    def _remove(self, node: PrefixNode[P]) -> None:
        assert node.parent is not None, "the root is no block"
        assert not node.children, "a node goes after those that continue it"
        del node.parent.children[node.ids]
        del self._order[node]
        self._allocator.release([node.block])
        self.num_bytes -= self._block_bytes + node.payload_bytes
        self.num_evicted += 1
        if node.payload is not None:
            self._drop(node.payload)
        node.block, node.payload, node.payload_bytes = BlockId(0), None, 0


def _subtree(node: PrefixNode[P]) -> list[PrefixNode[P]]:
    """A node and all that continue it, each before those behind it."""
    nodes = [node]
    for one in nodes:
        nodes.extend(one.children.values())
    return nodes


def _block_ids(tokens: Sequence[int], end: int) -> Ids:
    return tuple(tokens[end - BLOCK_TOKENS : end])
