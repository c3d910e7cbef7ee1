"""What one target forward is told, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from paceline.cache.drafter import DrafterRing
from paceline.cache.pools import CachePools
from paceline.ops.dense import DenseWeight

__all__ = [
    "ChainingMtpBlock",
    "MtpBlock",
    "MtpInputs",
    "MtpOutput",
    "StepInputs",
    "TargetModel",
    "TargetOutput",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """Rows of several sequences, flat; written by the runner into buffers it owns.

    R rows; L of them ask for logits, H for their streams. Rows of one sequence stand together at
    rising, consecutive positions. N4 and N128 are the windows the step completes, padded per
    sequence to ceil(width / ratio): padded entries have destination 0 row space (block 0).

    Attributes:
        ids: [R] int64 token ids.
        positions: [R] int64 absolute positions.
        slots: [R] int64 ring slot of each row's sequence.
        close4_slots, close4_windows, close4_dest: [N4] int64: slot, window w (tokens 4 w ..
            4 w + 3) and flat row of `rows4` / `index4` it is written to.
        close128_slots, close128_windows, close128_dest: [N128] int64, likewise for ratio 128.
        logits_rows: [L] int64 rows whose logits are wanted.
        hidden_rows: [H] int64 rows whose streams are wanted.
        context_cap: positions are below it; a multiple of 128; sets the shapes of dense reads.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    close4_slots: torch.Tensor
    close4_windows: torch.Tensor
    close4_dest: torch.Tensor
    close128_slots: torch.Tensor
    close128_windows: torch.Tensor
    close128_dest: torch.Tensor
    logits_rows: torch.Tensor
    hidden_rows: torch.Tensor
    context_cap: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetOutput:
    """Step memory: dead at the next forward unless copied.

    Attributes:
        logits: [L, vocab] fp32, in the order of `logits_rows`.
        hiddens: [H, hc_mult, hidden] streams after the last layer, before collapse and norm.
        picks: [L] int64, each row's largest logit's id, -1 where not all of the row's logits are
            finite numbers or -inf, or none is finite; None where a model does not say. They are on
            the host by the time the forward returns.
    """

    logits: torch.Tensor
    hiddens: torch.Tensor
    picks: npt.NDArray[np.int64] | None = None


class TargetModel(Protocol):
    """A forward over ragged rows; the plain torch model and the fused CPU one both are."""

    def forward(self, inputs: StepInputs, pools: CachePools) -> TargetOutput:
        """Run the rows, write their cache rows into `pools`, return what was asked for."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpInputs:
    """Rows for the MTP block; rows of one sequence stand together at rising, consecutive keys.

    Attributes:
        embeds: [R, hidden] embedding of the token at key + 1.
        hiddens: [R, hc_mult, hidden] streams of position key: the target's, or in recursion the
            block's own output of the row before.
        keys: [R] int64 pair keys; also rotary positions (only differences matter).
        slots: [R] int64 drafter slots.
        first_keys: [R] int64 lowest key a row may attend to; rows below it were never written.
    """

    embeds: torch.Tensor
    hiddens: torch.Tensor
    keys: torch.Tensor
    slots: torch.Tensor
    first_keys: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpOutput:
    """Step memory of the block: dead at its next call unless copied.

    Attributes:
        normed: [R, hidden], collapsed and normed, ready for the shared head.
        streams: [R, hc_mult, hidden], un-collapsed, what recursion feeds back.
    """

    normed: torch.Tensor
    streams: torch.Tensor


class MtpBlock(Protocol):
    """The draft block; `DeepseekV4MtpModule` defines it, the fused CPU twin equals it."""

    def forward(self, inputs: MtpInputs, ring: DrafterRing) -> MtpOutput:
        """Write the rows' keys into `ring`, attend, return output of every row."""
        ...

    def write_rows(self, inputs: MtpInputs, ring: DrafterRing) -> None:
        """Write the rows' keys only; equal to what `forward` writes, at a fraction of the cost."""
        ...


@runtime_checkable
class ChainingMtpBlock(MtpBlock, Protocol):
    """A draft block that also runs a whole greedy chain of one sequence in one call."""

    def can_chain(self, embed_tokens: DenseWeight, lm_head: DenseWeight) -> bool:
        """Whether `draft_greedy` takes these tables."""
        ...

    def draft_greedy(
        self,
        *,
        ids: torch.Tensor,
        hiddens: torch.Tensor,
        keys: torch.Tensor,
        slots: torch.Tensor,
        first_keys: torch.Tensor,
        ring: DrafterRing,
        embed_tokens: DenseWeight,
        lm_head: DenseWeight,
        num_rows: int,
        count: int,
        min_log_prob: float,
        column_ids: torch.Tensor | None,
    ) -> list[tuple[int, float]]:
        """Draft at most `count` tokens: what `forward`, the head and the best id give in turn.

        Rows as in `MtpInputs`, all of one sequence, with ids [R] for embeddings. All but the last
        are written only; the last gives the first draft, and each draft's own row the next. The
        first `num_rows` rows of `lm_head` (0: all) are scored; `column_ids` [that many] int64 says
        which id each stands for where that is not its place.

        Returns:
            (id, log-probability) of each draft. The last may be the one that ended the chain: less
            likely than `min_log_prob`, or -1 where the scores were not finite. One row was written
            for each entry, for keys[-1] and on. Log-probabilities have the bits that
        `lm_head.log_prob_of_best` gives for the same scores.
        """
        ...
