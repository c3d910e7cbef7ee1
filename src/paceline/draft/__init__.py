"""Proposers of drafts, the contract they keep, and the rules that judge their drafts."""

from paceline.draft.checks import ContractReport, check_proposer
from paceline.draft.combined import CombinedProposer, CombinedState
from paceline.draft.deepseek_v4 import DeepseekV4MtpHead, DeepseekV4MtpState
from paceline.draft.doubles import (
    AntiProposer,
    BlockProposer,
    CommProposer,
    ContextProposer,
    CyclingProposer,
    DeferredProposer,
    FixedLawProposer,
    NullProposer,
    OracleProposer,
    PoisonProposer,
    RandomProposer,
    ScriptedProposer,
    SharedBuffersProposer,
    WrappingProposer,
)
from paceline.draft.ngram import NgramProposer, NgramState
from paceline.draft.planned import PlannedDraftRunner
from paceline.draft.proposer import DraftBinding, DraftProposer, DraftRunner, DraftShape
from paceline.draft.prune import prune_drafts

__all__ = [
    "AntiProposer",
    "BlockProposer",
    "CombinedProposer",
    "CombinedState",
    "CommProposer",
    "ContextProposer",
    "ContractReport",
    "CyclingProposer",
    "DeepseekV4MtpHead",
    "DeepseekV4MtpState",
    "DeferredProposer",
    "DraftBinding",
    "DraftProposer",
    "DraftRunner",
    "DraftShape",
    "FixedLawProposer",
    "NgramProposer",
    "NgramState",
    "NullProposer",
    "OracleProposer",
    "PlannedDraftRunner",
    "PoisonProposer",
    "RandomProposer",
    "ScriptedProposer",
    "SharedBuffersProposer",
    "WrappingProposer",
    "check_proposer",
    "prune_drafts",
]
