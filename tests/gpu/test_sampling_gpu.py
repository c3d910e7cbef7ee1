"""Sampling on a CUDA device: drafts are picked there, nothing fails, and laws are the target's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PROMPTS = ["def main(argv):\n", "import argparse\n", "class Node:\n    def __init__", "The whale"]
KNOBS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5, "min_p": 0.05},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "temperature": 0.8},
    {"logit_bias": {7: 3.0, 11: -5.0}},
    {"temperature": 0.0},
    {"min_tokens": 8, "stop_token_ids": list(range(200, 400))},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    from paceline import LLM

    with LLM(device="cuda", dtype="float32", num_drafts=3, max_seq_len=512) as made:
        yield made


def params_of(num_drafts: int) -> list[Any]:
    from paceline import SamplingParams

    return [
        SamplingParams(
            **{"max_tokens": 40, "seed": seed, "num_drafts": num_drafts, "logprobs": 2, **knobs}
        )
        for seed, knobs in enumerate(KNOBS)
    ]


def test_drafts_are_picked_on_the_device_for_every_knob(llm: Any) -> None:
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(KNOBS))]
    off = llm.generate(prompts, params_of(0))
    same = 0
    for num_drafts in (1, 3, 8):
        on = llm.generate(prompts, params_of(num_drafts))
        assert llm.engine.num_proposer_failures == 0
        for a, b in zip(on, off, strict=True):
            assert a.error is None
            assert a.logprobs is not None
            assert len(a.logprobs) == len(a.token_ids)
            # Products of another width round differently, so that a near-tie may fall otherwise.
            agreed = next(
                (
                    i
                    for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False))
                    if x != y
                ),
                min(len(a.token_ids), len(b.token_ids)),
            )
            same += agreed == len(a.token_ids) == len(b.token_ids)
        assert all(r.speculation.num_drafted > 0 for r in on if len(r.token_ids) > 4)
        assert sum(r.speculation.num_accepted for r in on) > 20
    assert same >= 3 * len(KNOBS) - 3
    llm.engine.check_idle()


def test_a_mixed_batch_is_what_each_request_is_alone(llm: Any) -> None:
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(KNOBS))]
    together = llm.generate(prompts, params_of(3))
    alone = [llm.generate(p, one)[0] for p, one in zip(prompts, params_of(3), strict=True)]
    equal = [a.token_ids == b.token_ids for a, b in zip(together, alone, strict=True)]
    assert sum(equal) >= len(KNOBS) - 2


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_the_rejection_rules_run_on_a_device(acceptance: Any) -> None:
    from paceline import LLM

    with LLM(device="cuda", num_drafts=3, max_seq_len=512, acceptance=acceptance) as llm:
        results = llm.generate([PROMPTS[i % len(PROMPTS)] for i in range(len(KNOBS))], params_of(3))
        assert llm.engine.num_proposer_failures == 0
        assert all(r.error is None for r in results)
        assert llm.engine.speculation.acceptance_rate > 0.1


def test_prompt_log_probabilities_and_answers_on_a_device(llm: Any) -> None:
    from paceline import SamplingParams

    params = SamplingParams(
        max_tokens=6, temperature=1.0, n=3, seed=1, prompt_logprobs=2, logprobs=1
    )
    results = llm.generate(PROMPTS[0] * 30, params)
    forced = dataclasses.replace(params, n=1, max_tokens=1)
    for result in results:
        ids = [*result.prompt_token_ids, *result.token_ids]
        (told,) = llm.generate(ids, forced)
        listed = [*result.prompt_logprobs, *result.logprobs]
        assert len(listed) == len(ids) == len(told.prompt_logprobs)
        for got, want in zip(listed[1:], told.prompt_logprobs[1:], strict=True):
            assert got.id == want.id
            assert got.logprob == pytest.approx(want.logprob, abs=1e-3)


def test_picks_by_race_are_the_samplers_own() -> None:
    from paceline.draft import verify
    from paceline.sampling.request import Sampler
    from paceline.types import SamplingParams

    logits = torch.randn(64, 8192, generator=torch.Generator().manual_seed(0)) * 3
    samplers = [
        Sampler(
            SamplingParams(temperature=0.5 + row / 40, seed=row), vocab_size=8192, prompt_ids=[1]
        )
        for row in range(64)
    ]
    picks = verify.race_rows(
        logits.cuda(),
        [s.key(0) for s in samplers],
        [s.knobs.temperature for s in samplers],
    )
    assert picks == [s.pick(row) for s, row in zip(samplers, logits, strict=True)]
