"""Which drafter: by name, and never two where one can serve."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
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


class Own(NullProposer):
    """Takes nothing."""


class OfContext(NullProposer):
    def __init__(self, context: Any) -> None:
        self.room = context.max_seq_len


class Half(DraftProposer[None]):
    def alloc_state(self) -> None:
        return None


@pytest.mark.parametrize(
    ("proposer", "what"),
    [
        (
            Own,
            r"proposer is the class Own, which does not take a ProposerContext .*; allowed are an "
            r"instance of a DraftProposer, and a callable .*; Own\(\) would be an instance",
        ),
        (Half, "the class Half, which lacks after_verify, free_state, propose; allowed are"),
        (int, "proposer is the class int, no DraftProposer; allowed are"),
        (3, "proposer is 3; allowed are an instance of a DraftProposer, and a callable"),
        (lambda: NullProposer(), "cannot be called with a ProposerContext"),
        (lambda context: 3, "the proposer factory made a int; a DraftProposer is needed"),
    ],
)
def test_what_is_no_proposer_is_refused(tiny_path: Path, proposer: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        LLM(tiny_path, proposer=proposer)


def test_a_class_that_takes_the_context_makes_one(tiny_path: Path) -> None:
    with LLM(tiny_path, proposer=OfContext) as llm:
        assert proposer_of(llm).room == llm.max_seq_len


# module:name on the command line


OWN = """
from paceline.draft import NgramProposer

class Mine(NgramProposer):
    pass

def make(context):
    return Mine()

class Space:
    instance = Mine()

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with modules of the user's, none imported before."""
    for name, text in (
        ("own_drafter", OWN),
        ("own_broken", "1 / 0"),
        ("own_lacking", "import no_such_package"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    return tmp_path


@pytest.mark.parametrize("given", ["own_drafter:make", "own_drafter:Space.instance"])
def test_a_drafter_of_ones_own_is_named_by_module(
    folder: Path, tiny_path: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["generate", str(tiny_path), "-p", "abcabcabcabc", "-n", "8", "--ignore-eos", "--json"]
    seen: list[str] = []
    inner = LLM.__init__

    def init(llm: LLM, *rest: Any, **named: Any) -> None:
        inner(llm, *rest, **named)
        seen.append(type(proposer_of(llm)).__name__)

    monkeypatch.setattr(LLM, "__init__", init)
    plain, own = (
        CliRunner().invoke(app, [*args, *more]) for more in (["-k", "0"], ["--drafter", given])
    )
    assert own.exit_code == 0, own.output
    assert json.loads(own.stdout)["token_ids"] == json.loads(plain.stdout)["token_ids"]
    assert seen == ["NoneType", "Mine"]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("own:", "--drafter is 'own:'; allowed are mtp, ngram, mtp+ngram, and module:name"),
        ("no_such:make", "there is no module 'no_such' in"),
        ("own_drafter.sub:make", "there is no module 'own_drafter.sub' in"),
        ("own_drafter:nothing", "but own_drafter has no nothing; allowed are mtp"),
        ("own_drafter:number", "--drafter own_drafter:number is 3; allowed are an instance"),
        ("own_drafter:Mine", None),
        ("own_broken:make", "importing own_broken raised ZeroDivisionError: division by zero"),
        ("own_lacking:make", "own_lacking needs no_such_package"),
    ],
)
def test_a_drafter_that_is_not_there_is_told(
    folder: Path, tiny_path: Path, given: str, what: str | None
) -> None:
    args = ["generate", str(tiny_path), "-p", "abc", "-n", "2", "--drafter", given]
    done = CliRunner().invoke(app, args)
    if what is None:
        # All its arguments are by name.
        what = "proposer is the class Mine, which does not take a ProposerContext"
    assert done.exit_code == 2, done.output
    assert what in done.output


@pytest.mark.parametrize("verb", ["generate", "chat", "bench", "serve"])
def test_every_verb_that_drafts_takes_it(folder: Path, tiny_path: Path, verb: str) -> None:
    args = [verb, str(tiny_path), "--drafter", "no_such:make"]
    args += ["-p", "abc"] if verb == "generate" else []
    done = CliRunner().invoke(app, args, input="")
    assert done.exit_code == 2, done.output
    assert "there is no module 'no_such'" in done.output


PAGE = Path(__file__).parents[2] / "docs" / "custom_proposer.md"


def test_the_pages_own_proposer_runs_as_it_says(tmp_path: Path) -> None:
    """The module as it stands there, and the commands on it, with fewer tokens."""
    page = PAGE.read_text(encoding="utf-8")
    (module,) = re.findall(r"`echo\.py`:\n\n```python\n(.*?)```", page, re.DOTALL)
    (commands,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    (tmp_path / "echo.py").write_text(module, encoding="utf-8")
    lines = commands.splitlines()
    assert [shlex.split(line)[:2] for line in lines] == [
        ["python", "echo.py"],
        ["paceline", "bench"],
    ]
    less = ["-n", "24", "--repeats", "1", "--json", "numbers.json"]
    env = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    for line, more in zip(lines, ([], less), strict=True):
        words = shlex.split(line)
        words[:1] = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "paceline"]
        done = subprocess.run(
            [*words, *more], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=env
        )
        assert done.returncode == 0, done.stderr
    off, *rungs = json.loads((tmp_path / "numbers.json").read_text())["runs"]
    assert off["speculation"]["num_drafted"] == 0
    for rung in rungs:
        assert rung["speculation"]["drafted_by"].keys() == {"Echo"}
        assert rung["speculation"]["num_accepted"] > 0
        assert rung["tokens_equal"]
