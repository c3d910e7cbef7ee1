"""On the model that ships: drafts never change a token, whatever drafts and however batched."""

from __future__ import annotations

import inspect
import json.decoder
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import LLM, SamplingParams
from paceline.draft import AntiProposer, DraftProposer, OracleProposer, RandomProposer
from paceline.llm import ProposerContext

NUM_PROMPTS = 40
NUM_TOKENS = 50
BATCHES = [1, 2, 3, 8]


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return paceline.bundled_model_path()
    except paceline.CheckpointError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, num_drafts=3, max_seq_len=1024) as made:
        yield made


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    """Stretches of Python source, 1 to 300 tokens long, some across windows of 128."""
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(inspect.getsource(textwrap) + inspect.getsource(json.decoder))
    lengths = [1, 2, 3, 5, 126, 127, 128, 129, 200, 300, *range(8, 128, 4)]
    return [ids[37 * n : 37 * n + length] for n, length in enumerate(lengths[:NUM_PROMPTS])]


@pytest.fixture(scope="module")
def plain(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Without drafts, one prompt after another."""
    tokens = run(llm, prompts, batch=1, num_drafts=0)
    assert sum(map(len, tokens)) == NUM_PROMPTS * NUM_TOKENS >= 2000
    return tokens


def run(llm: LLM, prompts: list[list[int]], *, batch: int, num_drafts: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, num_drafts=num_drafts)
    results: list[Any] = []
    for start in range(0, len(prompts), batch):
        results += llm.generate(list(prompts[start : start + batch]), params)
    llm.engine.check_idle()
    assert llm.engine.num_proposer_failures == 0
    return [result.token_ids for result in results]


@pytest.mark.parametrize("num_drafts", range(9))
def test_every_number_of_drafts(
    llm: LLM, prompts: list[list[int]], plain: list[list[int]], num_drafts: int
) -> None:
    assert run(llm, prompts, batch=8, num_drafts=num_drafts) == plain


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_every_batch(
    llm: LLM, prompts: list[list[int]], plain: list[list[int]], num_drafts: int, batch: int
) -> None:
    assert run(llm, prompts, batch=batch, num_drafts=num_drafts) == plain


def test_requests_of_every_kind_together(
    llm: LLM, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    each = [
        SamplingParams(max_tokens=1 + n % NUM_TOKENS, ignore_eos=True, num_drafts=n % 9)
        for n in range(7, 7 + len(prompts))
    ]
    for result, params, want in zip(llm.generate(list(prompts), each), each, plain, strict=True):
        assert result.token_ids == want[: params.max_tokens]


def test_drafts_are_accepted_at_all(llm: LLM, prompts: list[list[int]]) -> None:
    (result,) = llm.generate(prompts[9], SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    assert result.speculation.num_accepted > 0


@pytest.mark.parametrize("name", ["oracle", "anti", "random"])
def test_other_proposers(
    path: Path, prompts: list[list[int]], plain: list[list[int]], name: str
) -> None:
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, plain, strict=True)]

    def make(context: ProposerContext) -> DraftProposer[Any]:
        vocab = context.config.vocab_size
        proposers: dict[str, DraftProposer[Any]] = {
            "oracle": OracleProposer(texts),
            "anti": AntiProposer(texts, vocab_size=vocab),
            "random": RandomProposer(seed=1, vocab_size=vocab),
        }
        return proposers[name]

    with LLM(path, num_drafts=3, max_seq_len=1024, proposer=make) as llm:
        for num_drafts in (2, 8):
            before = llm.engine.num_forwards
            assert run(llm, prompts, batch=8, num_drafts=num_drafts) == plain
            steps = llm.engine.num_forwards - before
            if name == "oracle":
                # Every step but a prompt's is as wide as it can be.
                assert steps < 5 * (20 + NUM_TOKENS // (num_drafts + 1))
