"""Proposers of drafts, the contract they keep, and the rules that judge their drafts."""

from paceline.draft.deepseek_v4 import DeepseekV4MtpHead, DeepseekV4MtpState
from paceline.draft.doubles import (
    AntiProposer,
    NgramProposer,
    NullProposer,
    OracleProposer,
    RandomProposer,
    ScriptedProposer,
)
from paceline.draft.proposer import DraftBinding, DraftProposer, DraftRunner

__all__ = [
    "AntiProposer",
    "DeepseekV4MtpHead",
    "DeepseekV4MtpState",
    "DraftBinding",
    "DraftProposer",
    "DraftRunner",
    "NgramProposer",
    "NullProposer",
    "OracleProposer",
    "RandomProposer",
    "ScriptedProposer",
]
