"""Which drafter: by name, and never two where one can serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import write_tiny
from typer.testing import CliRunner

from paceline import LLM, SamplingParams
from paceline.cli import app
from paceline.draft import (
    CombinedProposer,
    DeepseekV4MtpHead,
    DraftProposer,
    NgramProposer,
    NullProposer,
)
from paceline.types import CheckpointError, ConfigError

PHRASE = [5, 9, 17, 300, 2, 44, 8, 61, 7]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def proposer_of(llm: LLM) -> Any:
    drafting = llm.engine.drafting
    return None if drafting is None else drafting.proposer


@pytest.fixture(scope="module")
def headless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("headless"), drafter=None)


def test_each_name_gives_its_drafter_and_no_other_tokens(tiny_path: Path) -> None:
    kinds: dict[Any, Any] = {
        None: DeepseekV4MtpHead,
        "mtp": DeepseekV4MtpHead,
        "ngram": NgramProposer,
        "mtp+ngram": CombinedProposer,
    }
    tokens = []
    for drafter, kind in kinds.items():
        with LLM(tiny_path, drafter=drafter) as llm:
            assert llm.num_drafts == 3
            assert isinstance(proposer_of(llm), kind)
            (result,) = llm.generate([PHRASE * 5], PARAMS)
            tokens.append(result.token_ids)
            # What an untrained model says repeats nothing, so a lookup may find nothing.
            assert result.speculation.num_drafted > 0 or drafter == "ngram"
    assert all(ids == tokens[0] for ids in tokens)


def test_no_drafts_means_no_drafter(tiny_path: Path) -> None:
    for drafter in ("mtp", "ngram", "mtp+ngram"):
        with LLM(tiny_path, drafter=drafter, num_drafts=0) as llm:  # type: ignore[arg-type]
            assert proposer_of(llm) is None


def test_lookup_needs_no_head(headless: Path) -> None:
    with LLM(headless, drafter="ngram") as llm:
        assert isinstance(proposer_of(llm), NgramProposer)
        assert llm.num_drafts == 3


@pytest.mark.parametrize("drafter", ["mtp", "mtp+ngram"])
def test_a_head_that_is_not_there_is_refused_with_what_was_found(
    headless: Path, drafter: Any
) -> None:
    with pytest.raises(CheckpointError, match=r"no drafter \(no mtp\.\* tensors\)"):
        LLM(headless, drafter=drafter)


def test_a_drafter_of_another_kind_is_told(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, drafter="dspark")
    with pytest.raises(CheckpointError, match="DSpark"):
        LLM(path, drafter="mtp")


@pytest.mark.parametrize(
    ("proposer", "name"),
    [(NullProposer(), "NullProposer"), (NullProposer, "NullProposer")],
)
def test_two_drafters_are_refused_by_name(tiny_path: Path, proposer: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"drafter is 'ngram' and proposer is {name}; only one"):
        LLM(tiny_path, drafter="ngram", proposer=proposer)


def test_unknown_names_are_refused_with_the_known(tiny_path: Path) -> None:
    bad: Any = "eagle"
    with pytest.raises(
        ConfigError, match=r"drafter is 'eagle'; allowed are 'mtp', 'ngram', 'mtp\+ngram'"
    ):
        LLM(tiny_path, drafter=bad)


def test_a_combined_proposer_is_one(tiny_path: Path) -> None:
    def make(context: Any) -> DraftProposer[Any]:
        built = context.built
        head = DeepseekV4MtpHead.new(
            built.mtp,
            built.embed_tokens,
            built.lm_head,
            context.config,
            0,
            context.max_seq_len,
            num_slots=context.max_num_seqs,
        )
        return CombinedProposer(NgramProposer(), head)

    with LLM(tiny_path, proposer=make) as llm:
        assert llm.generate([PHRASE * 3], PARAMS)[0].speculation.num_drafted > 0


def test_the_command_line_knows_it(tiny_path: Path) -> None:
    runner = CliRunner()
    args = ["generate", str(tiny_path), "-p", "abcabcabcabc", "-n", "8", "--ignore-eos", "--json"]
    texts = set()
    for more in ([], ["--drafter", "ngram"], ["--drafter", "mtp+ngram"], ["-k", "0"]):
        done = runner.invoke(app, [*args, *more])
        assert done.exit_code == 0, done.output
        texts.add(tuple(json.loads(done.stdout)["token_ids"]))
    assert len(texts) == 1
    done = runner.invoke(app, [*args, "--drafter", "eagle"])
    assert done.exit_code != 0
    told = f"{done.output}{done.exception}"
    assert "drafter is 'eagle'" in told
