"""The contract between an engine and whatever proposes drafts; knows no tensor at run time.

A proposer may only cost or save time: every draft is verified by the target, and what an engine
hands out and takes in are copies, so none can change what is decoded. (Where drafts are judged by
the laws they were drawn from, the laws must be true: `Draft.laws`.) Four verbs are required
(`alloc_state`, `propose`, `after_verify`, `free_state`); everything else has a default that
declines by value, and the engine asks by calling.

The pair key, drawn once; the rest of the project refers to this drawing:

    token     t0   t1   t2   t3   t4        the sequence; t4 was sampled last
    streams   h0   h1   h2   h3             of the target, before collapse and before the final norm
    row key        0    1    2    3         key k joins (h_k, t_{k+1}) and predicts t_{k+2}

A drafter's row of key k has rotary position k. With P the position of the token sampled last (its
target row is not written yet), a propose begins with key P - 1, made from the target's streams, and
goes on with keys P, P + 1, .. made from the drafter's own. `Row` says where something is stored,
`Position` where a token stands, `PairKey` which pair a row was made from; two of the three always
differ by one, so each has a type of its own.

What an engine calls, in order, for one sequence:

    admission        alloc_state_for(prompt + max_tokens)
    prompt chunks    prefill_drafter(prompt, streams, first_position=..) for each chunk, or, where
                     `prefill_uses_shared_buffers`, once just before the first propose
    a kept prefix    install_drafter_kv(share_drafter_kv(..)) after admission, and catchup_drafter
                     for the one pair that the token behind the prefix completes
    a block's end    snapshot_drafter_kv(.., through_key), where prefixes are kept
    each step        propose or propose_batch -> target verifies -> after_verify(num_accepted)
                     -> catchup_batch (the accepted drafts with the target's own streams)
    undrafted steps  nothing; later catchup_drafter from last_pair_key on, or a shorter context
    drafts dropped   after_verify(0)
    the end          take_drafter_kv where rows are to outlive the sequence, then free_state
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from paceline.types import Draft, DrafterKv, DraftRequest, PairKey

if TYPE_CHECKING:
    import torch

__all__ = [
    "Batching",
    "Captured",
    "ContextFeed",
    "DraftBinding",
    "DraftProposer",
    "DraftRunner",
    "DraftShape",
    "Facts",
    "KvHandover",
]

S = TypeVar("S")


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftShape:
    """What the memory of a captured chain of drafts depends on.

    Attributes:
        width: sequences, padded ones included.
        pairs: rows of catch-up over all sequences, padded ones included: pairs that were accepted
            and not written yet.
        depth: drafts of one run, 1 for a single draft step.
    """

    width: int
    pairs: int
    depth: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftBinding:
    """A head's chain of drafts as an executor may capture it: fixed buffers, fixed shapes.

    The head picks one of `shapes`, pads on the host and uploads before the program runs, on the
    current stream; a runner only replays. A run neither waits for the host nor reads a value there,
    and no allocation depends on a value. It leaves its inputs as they are and gives the same each
    time, so it may be warmed up over any inputs. A padded sequence has the inert slot and depth 0;
    a sequence whose chain has ended goes on in the inert slot, from id 0, and counts as padded.

    Attributes:
        inputs: name to buffer. Of the sequences: `ids`, `keys`, `slots`, `first_keys`, `depths`
            [S] int64 and `hiddens` [S, hc_mult, hidden] (as in `MtpInputs`; `depths` is how many
            drafts each wants). Of the catch-up: `pair_ids`, `pair_keys`, `pair_slots`,
            `pair_rows` [C] int64, whose streams are the rows `pair_rows` of `pending`
            [C, hc_mult, hidden].
        outputs: name to buffer: `tokens` [S, D] int64, -1 from where a chain ended;
            `log_probs` [S, D] fp32 where measured; `streams` [S, hc_mult, hidden] of the last
            draft's row; `nonfinite` [1] int64, chains that a non-finite score ended in this run.
        shapes: the shapes the head asks a runner for.
        run: the program, eagerly on the first rows of the buffers; what is captured.
        make_inert: fills a shape's inputs with padding only, for a warm-up between proposes.
        vocab_rows: rows of the output head a draft is chosen from.
        inert_slot: slot of padded rows.
    """

    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    shapes: tuple[DraftShape, ...]
    run: Callable[[DraftShape], None]
    make_inert: Callable[[DraftShape], None]
    vocab_rows: int
    inert_slot: int

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of sequences there are shapes for, rising."""
        return tuple(sorted({shape.width for shape in self.shapes}))


class DraftRunner(Protocol):
    """A captured or planned chain of drafts over the buffers of a `DraftBinding`."""

    def serves(self, shape: DraftShape) -> bool:
        """Whether the shape can be run; the proposer runs others eagerly and counts them."""
        ...

    def run_draft(self, shape: DraftShape) -> None:
        """Do what the binding's `run` does for a shape that is served, bit for bit."""
        ...


class Facts:
    """What the engine reads once, when it is built.

    Attributes:
        block_gamma: fixed block of a drafter that drafts all tokens at once, the known token
            included; the engine then drafts `block_gamma - 1`. None: any number, one by one.
        needs_comm: drafting contains collectives, so all ranks must draft the same sequences in
            the same order. False: drafting is one rank's own business.
        prefill_uses_shared_buffers: `prefill_drafter` overwrites the target's step memory, so the
            engine puts it off until just before the first propose. False: at each prompt chunk.
    """

    block_gamma: int | None = None
    needs_comm: bool = False
    prefill_uses_shared_buffers: bool = False

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        """Say how many of a prompt's last rows of streams are worth retaining.

        Args:
            max_seq_len: most tokens a sequence may hold.

        Returns:
            Rows, at most `max_seq_len`. Default: all of them; 0: this proposer reads none.
        """
        return max_seq_len


class Batching(Generic[S]):
    """Drafting for several sequences in one pass. Both methods or neither."""

    def propose_batch(
        self, requests: Sequence[DraftRequest], states: Sequence[S]
    ) -> list[Draft] | None:
        """Draft for every request at once, each as `propose` would.

        Called in place of `propose` for groups of at most `propose_batch_max` sequences.

        Args:
            requests: one per sequence; numbers of drafts may differ.
            states: each sequence's own, in the same order, all distinct.

        Returns:
            One draft per request. Default: None, declined; then no state was touched and the
            engine calls `propose` for each.
        """
        return None

    def propose_batch_max(self) -> int:
        """Return the widest batch `propose_batch` takes. Default: 1, one sequence at a time."""
        return 1


class ContextFeed(Generic[S]):
    """What a drafter learns from the target beside its requests.

    Any feeding method asks for `drafter_rows` and `last_pair_key` too. A drafter copies what it
    keeps: the caller's tensors are dead after the call returns.
    """

    def prefill_drafter(
        self,
        prompt_tokens: Sequence[int],
        hiddens: torch.Tensor,
        state: S,
        *,
        first_position: int = 0,
    ) -> int:
        """Write rows for a stretch of the prompt, before the sequence's first propose.

        Called for each chunk of a prompt, in order, or once for the whole of it. A pair is written
        where both its streams and its token are there; the pair of the prompt's last position waits
        for the token sampled from it and is the first row of the first propose.

        Args:
            prompt_tokens: the whole prompt, in every call; where rows are copied for a cache of
                prefixes, the prompt up to the end of this piece.
            hiddens: [n, hc_mult, hidden], streams of positions first_position ..
                first_position + n - 1.
            state: the sequence's own.
            first_position: position of `hiddens[0]`.

        Returns:
            Rows written; fewer than n where older ones could never be read. Default: 0.
        """
        return 0

    def catchup_drafter(
        self,
        tokens: Sequence[int],
        hiddens: torch.Tensor,
        row_base: int,
        pos_base: int,
        state: S,
    ) -> int:
        """Append rows for pairs that were decoded while nothing was drafted.

        Called before a propose that follows such a stretch. Rows that are not adjacent to the ones
        held replace them: a drafter never attends over a gap.

        Args:
            tokens: ids at positions pos_base .. pos_base + n - 1.
            hiddens: [n, hc_mult, hidden], row j of position pos_base + j - 1: what `tokens[j]` is
                paired with.
            row_base: the append point; must equal `drafter_rows(state)`.
            pos_base: position of `tokens[0]`, whose row gets pair key pos_base - 1.
            state: the sequence's own.

        Returns:
            Rows written; fewer than n where older ones could never be read. Default: 0, this
            proposer keeps no context.

        Raises:
            ValueError: `row_base` is not the append point.
        """
        return 0

    def catchup_batch(
        self,
        tokens: Sequence[Sequence[int]],
        hiddens: Sequence[torch.Tensor],
        first_pos: Sequence[int],
        states: Sequence[S],
    ) -> int:
        """Rewrite the rows of accepted drafts from the target's own streams.

        Called once after the `after_verify` calls of a step. All or nothing: 0 for a request that
        was not empty means that no state was touched.

        Args:
            tokens: [i] the accepted drafts of sequence i; may be empty.
            hiddens: [i] [n, hc_mult, hidden]; row j is paired with tokens[i][j], so it holds the
                streams of position first_pos[i] + j - 1.
            first_pos: [i] position of tokens[i][0]; its row gets pair key first_pos[i] - 1.
            states: each sequence's own, all distinct.

        Returns:
            Rows taken over all sequences. Default: 0.
        """
        return 0

    def drafter_rows(self, state: S) -> int:
        """Return the rows held, a count of storage and no position. Default: 0, none or unknown."""
        return 0

    def last_pair_key(self, state: S) -> PairKey | None:
        """Return the key of the newest row. Default: None, no rows or not tracked."""
        return None


class KvHandover(Generic[S]):
    """Moving a drafter's rows from one sequence to a later one. The first three or none.

    A `DrafterKv` has exactly one owner: the state it is in, whoever took it out, or nobody once it
    is freed. Its rows have keys last_pair_key - rows + 1 .. last_pair_key, without a gap.

    `snapshot_drafter_kv` and `share_drafter_kv` are for a cache of prefixes, which hands the same
    rows to several sequences while the one they came from goes on; a proposer without them is
    served by recomputing.
    """

    def take_drafter_kv(self, state: S) -> DrafterKv | None:
        """Move the rows out of a state that is about to be freed.

        Returns:
            The rows, now the caller's; the state is as freshly allocated. Default: None, nothing
            to hand over.
        """
        return None

    def install_drafter_kv(self, kv: DrafterKv, state: S) -> bool:
        """Move rows into an empty state.

        Returns:
            True: the state owns them. Default: False, refused; the caller still owns `kv` and must
            install it elsewhere or free it.
        """
        return False

    def free_drafter_kv(self, kv: DrafterKv) -> None:
        """Release rows nobody will install. A second call does nothing. Default: nothing."""

    def snapshot_drafter_kv(self, state: S, through_key: int) -> DrafterKv | None:
        """Copy the rows of keys up to `through_key` out of a state that goes on.

        Args:
            state: the sequence's own; nothing about it changes.
            through_key: newest key wanted.

        Returns:
            The rows there are, at most the newest a propose can read, now the caller's. Default:
            None, nothing to copy.
        """
        return None

    def share_drafter_kv(self, kv: DrafterKv) -> DrafterKv | None:
        """Make a second value of the same rows, which are not copied and never change.

        Returns:
            A value with an owner of its own: it is installed or freed apart from `kv`. Default:
            None, rows cannot be shared.
        """
        return None


class Captured:
    """Running the chain of drafts as a captured program, and leaving drafts on the device.

    `circuit_draft` and `set_circuit_draft` come together.
    """

    def circuit_draft(self) -> DraftBinding | None:
        """Describe the chain of drafts to an executor. Default: None, it cannot be captured."""
        return None

    def set_circuit_draft(self, runner: DraftRunner | None) -> None:
        """Run `runner` in place of the head's own forward, or its own again with None.

        Drafts are the same bit for bit. Default: ignored.
        """

    def read_deferred_draft_token(self) -> int | None:
        """Fetch the first draft of the last propose with `draft_embed_target`; waits for it.

        Returns:
            Its id; of a batch, that of its first such sequence. None: nothing was left on the
            device, or nothing was drafted. Default: None, nothing is ever deferred and `propose`
            returned the ids.
        """
        return None


_TOGETHER: tuple[tuple[type, tuple[str, ...], tuple[str, ...]], ...] = (
    (Batching, ("propose_batch", "propose_batch_max"), ("propose_batch", "propose_batch_max")),
    (
        ContextFeed,
        ("prefill_drafter", "catchup_drafter", "catchup_batch"),
        ("drafter_rows", "last_pair_key"),
    ),
    (
        KvHandover,
        ("take_drafter_kv", "install_drafter_kv", "free_drafter_kv"),
        ("take_drafter_kv", "install_drafter_kv", "free_drafter_kv"),
    ),
    (
        KvHandover,
        ("snapshot_drafter_kv", "share_drafter_kv"),
        ("snapshot_drafter_kv", "share_drafter_kv", "install_drafter_kv", "free_drafter_kv"),
    ),
    (
        Captured,
        ("circuit_draft", "set_circuit_draft"),
        ("circuit_draft", "set_circuit_draft"),
    ),
)
"""(concern, methods that ask for company, the company they ask for)."""


class DraftProposer(Facts, Batching[S], ContextFeed[S], KvHandover[S], Captured, ABC, Generic[S]):
    """Proposes tokens for the target to verify. `S` is the proposer's own state of one sequence.

    The engine keeps a state for each sequence, passes it back and never looks inside. A proposer
    that overrides half of a concern is refused when its class is made.

    Raises:
        TypeError: at class creation, naming the method that is missing.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Refuse half a concern."""
        super().__init_subclass__(**kwargs)
        for concern, asking, company in _TOGETHER:
            given = [name for name in asking if getattr(cls, name) is not getattr(concern, name)]
            lacking = [name for name in company if getattr(cls, name) is getattr(concern, name)]
            if given and lacking:
                raise TypeError(
                    f"{cls.__name__} defines {', '.join(given)} but not {', '.join(lacking)}; "
                    f"these methods of {concern.__name__} come together"
                )

    @abstractmethod
    def alloc_state(self) -> S:
        """Return fresh state for one sequence; the caller gives it back through `free_state`."""

    def alloc_state_for(self, budget_tokens: int) -> S:
        """Return fresh state for a sequence that will hold at most `budget_tokens` tokens.

        Called at admission with prompt + max_tokens; a larger number than the context means that
        the budget is unknown. Default: `alloc_state`, the budget does not matter.
        """
        return self.alloc_state()

    @abstractmethod
    def propose(self, request: DraftRequest, state: S) -> Draft:
        """Draft what may follow `request.last_token`.

        Called after the verdict of the step before was handed over. With P the request's position,
        draft j is a guess of the token at P + 1 + j. A drafter with context writes its row of key
        P - 1 from `request.target_hidden` here.

        Args:
            request: the sequence as it stands.
            state: its own.

        Returns:
            At most `request.num_drafts` tokens; fewer, or none, is an answer. A proposer that
            cannot go on (non-finite values, say) ends the chain there and does not raise. Where
            `draft_embed_target` is given, ids may stay on the device (`Draft.device_tokens`).
        """

    @abstractmethod
    def after_verify(self, num_accepted: int, state: S) -> None:
        """Take notice of the verdict and forget the rows it refuted.

        Called once for every draft that was not empty: with the leading drafts accepted, or with 0
        where the drafts were dropped unverified.

        Raises:
            ValueError: more than the last propose drafted.
        """

    @abstractmethod
    def free_state(self, state: S) -> None:
        """Give back all that the state holds. A second call does nothing."""

    def last_confidence(self, state: S) -> float | None:
        """Return the least probability, 0 to 1, the drafter gave to a token of its last draft.

        Default: None, not measured.
        """
        return None
