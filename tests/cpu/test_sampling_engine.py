"""Sampling through the engine: what is emitted does not depend on what is drafted."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sampling_kit import p_value
from sampling_toy import Asked, Picking, SpreadToy, alone, logits_of, outcome, prompt_of, tokens_of
from support import make_rig
from toy import EOS, RULES, VOCAB, Carrying, run, toy_config, toy_engine

from paceline import SamplingParams
from paceline.cache.pools import CachePools
from paceline.draft import DeepseekV4MtpHead
from paceline.engine import Emission, Engine
from paceline.models.deepseek_v4.checkpoint import Weights
from paceline.models.step import StepInputs, TargetOutput
from paceline.sampling.logprobs import token_logprobs
from paceline.types import ConfigError, DraftRequest, FinishReason, RequestError

DRAFTERS = {
    "exact": Picking,
    "near": lambda: Picking(0.6),
    "anti": lambda: Carrying(anti),
    "random": lambda: Carrying(RULES["random"], batch=4),
}


def anti(history: list[int], count: int, step: int) -> list[int]:
    """Whatever is least likely to be picked at any temperature."""
    return [int(logits_of(history).argmin())] * count


KNOBS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.3},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.2},
    "logit_bias": {"logit_bias": {7: 3.0, 11: -5.0, 13: 2.5}},
    "allowed_token_ids": {"allowed_token_ids": list(range(3, 25))},
    "bad_words": {"bad_word_ids": [(9,), (20, 21), (5, 6, 7)]},
    "min_tokens": {"min_tokens": 18, "stop_token_ids": list(range(20, 40))},
}


# The drafter-invariant rule


@pytest.mark.parametrize("knob", KNOBS)
def test_drafts_change_nothing_with_any_knob(knob: str) -> None:
    asked = Asked(prompt_of(9, 1), KNOBS[knob])
    want = alone(asked)
    for name, make in DRAFTERS.items():
        accepted = drafted = 0
        for num_drafts in range(1, 9):
            proposer = make()
            engine = toy_engine(model=SpreadToy(), proposer=proposer, num_drafts=num_drafts)
            number = asked.add(engine)
            assert outcome(run(engine)[number]) == want
            drafted += engine.speculation.num_drafted
            accepted += engine.speculation.num_accepted
            assert engine.num_proposer_failures == 0
        assert drafted > 0
        if name == "exact":
            assert accepted == drafted
        elif name == "near":
            assert 0 < accepted < drafted


def random_knobs(rng: random.Random) -> dict[str, Any]:
    knobs: dict[str, Any] = {"seed": rng.randrange(1 << 64), "max_tokens": rng.randrange(1, 30)}
    if rng.random() < 0.75:
        knobs["temperature"] = rng.choice([0.3, 0.8, 1.0, 1.7])
    choices: dict[str, Any] = {
        "top_p": rng.uniform(0.3, 1.0),
        "top_k": rng.randrange(1, 20),
        "min_p": rng.uniform(0.0, 0.3),
        "repetition_penalty": rng.uniform(0.7, 2.0),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "logit_bias": {rng.randrange(VOCAB): rng.uniform(-6, 6) for _ in range(5)},
        "allowed_token_ids": rng.sample(range(2, VOCAB), rng.randrange(4, 40)),
        "bad_word_ids": [tuple(rng.sample(range(VOCAB), rng.randrange(1, 4))) for _ in range(3)],
        "min_tokens": rng.randrange(0, knobs["max_tokens"] + 1),
        "stop_token_ids": rng.sample(range(VOCAB), 3),
        "ignore_eos": True,
    }
    for name, value in choices.items():
        if rng.random() < 0.35:
            knobs[name] = value
    return knobs


@pytest.mark.parametrize("part", range(10))
def test_drafts_and_company_change_nothing_in_random_combinations(part: int) -> None:
    rng = random.Random(part)
    for round_ in range(4):
        asked = [
            Asked(
                prompt_of(rng.randrange(2, 14), rng.randrange(100)),
                random_knobs(rng),
                num_drafts=rng.choice([*range(9), "auto"]),
            )
            for _ in range(5)
        ]
        want = [alone(one) for one in asked]
        proposer: Any = rng.choice([Picking(0.0, batch=4), Picking(0.5), Picking(0.5, batch=3)])
        engine = toy_engine(
            model=SpreadToy(),
            proposer=proposer,
            num_drafts=3,
            max_num_seqs=rng.choice([2, 5]),
            max_num_batched_tokens=rng.choice([8, 64]),
        )
        numbers = [one.add(engine) for one in asked]
        out: dict[int, list[Emission]] = {number: [] for number in numbers}
        # Of its own: how many steps there are is a matter of time where a number of drafts is auto.
        chance, steps = random.Random(f"{part} {round_}"), 0
        while engine.has_work:
            for emission in engine.step():
                out[emission.request_id].append(emission)
            steps += 1
            if round_ % 2 and (steps == 1 or chance.random() < 0.3):
                engine._scheduler.preempt_last()
        engine.check_idle()
        assert [outcome(out[number]) for number in numbers] == want
        assert engine.num_proposer_failures == 0
        assert bool(engine.num_preemptions) == bool(round_ % 2)


def test_unseeded_requests_and_samples_of_one_seed_all_differ() -> None:
    engine = toy_engine(model=SpreadToy())
    asked = Asked(prompt_of(6, 2), {"temperature": 1.0})
    numbers = [asked.add(engine, seed=None) for _ in range(6)]
    numbers += [asked.add(engine, sample=sample) for sample in range(6)]
    out = run(engine)
    texts = {tuple(tokens_of(out[number])) for number in numbers}
    assert len(texts) == 12
    assert tokens_of(out[numbers[6]]) == alone(asked)[0]


# The rejection rules


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_drafts_of_the_targets_own_law_are_all_accepted(acceptance: Any) -> None:
    for knobs in KNOBS.values():
        proposer = Picking()
        engine = toy_engine(
            model=SpreadToy(), proposer=proposer, num_drafts=4, acceptance=acceptance
        )
        number = Asked(prompt_of(7, 4), knobs).add(engine)
        assert len(run(engine)[number]) > 1
        assert engine.speculation.num_accepted == engine.speculation.num_drafted > 0
        assert proposer.laws_given > 0


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_rejection_keeps_the_law_and_accepts_more(acceptance: Any) -> None:
    """Second and third tokens together, against the exact law; one false alarm in a thousand."""
    prompt, knobs = prompt_of(5, 8), {"temperature": 1.0, "top_k": 3, "max_tokens": 4}
    engine = toy_engine(
        model=SpreadToy(),
        config=toy_config(eos_token_ids=()),
        proposer=Picking(0.8),
        num_drafts=3,
        acceptance=acceptance,
        max_num_seqs=16,
        max_num_batched_tokens=256,
    )
    numbers = [Asked(prompt, knobs).add(engine, seed=seed) for seed in range(2500)]
    out = run(engine, limit=20000)

    def top3(ids: list[int]) -> dict[int, float]:
        row = logits_of(ids).astype(np.float64)
        best = np.argsort(-row)[:3]
        mass = np.exp(row[best] - row[best[0]])
        return dict(zip(best.tolist(), (mass / mass.sum()).tolist(), strict=True))

    joint = {
        (a, b, c): pa * pb * pc
        for a, pa in top3(prompt).items()
        for b, pb in top3([*prompt, a]).items()
        for c, pc in top3([*prompt, a, b]).items()
    }
    cells = {key: index for index, key in enumerate(joint)}
    seen = np.zeros(len(cells), np.int64)
    for number in numbers:
        seen[cells[tuple(tokens_of(out[number])[:3])]] += 1  # type: ignore[index]
    assert p_value(seen, np.array(list(joint.values()))) > 1e-3
    assert 0 < engine.speculation.num_accepted < engine.speculation.num_drafted


def test_rejection_at_temperature_zero_is_greedy() -> None:
    asked = Asked(prompt_of(9, 3), {"repetition_penalty": 1.4})
    plain = Asked(prompt_of(9, 3), {})
    for one in (asked, plain):
        engine = toy_engine(
            model=SpreadToy(), proposer=Picking(0.5), num_drafts=5, acceptance="rejection"
        )
        number = one.add(engine)
        assert outcome(run(engine)[number]) == alone(one)


def test_a_rule_must_be_known_and_fit_the_pruning() -> None:
    with pytest.raises(ConfigError, match="acceptance is 'greedy'; allowed are 'invariant', 'rej"):
        toy_engine(acceptance="greedy")
    with pytest.raises(ConfigError, match="allowed are 1 and 0, since the law would change"):
        toy_engine(acceptance="block", proposer=Picking(), num_drafts=2, keep_drafts=0.5)


# Failures


@pytest.mark.parametrize("num_drafts", [0, 1, 4])
@pytest.mark.parametrize("knob", ["temperature", "top_k", "repetition_penalty", "bad_words"])
def test_a_row_without_a_law_ends_that_request_only(knob: str, num_drafts: int) -> None:
    other = Asked(prompt_of(8, 6), KNOBS[knob], num_drafts)
    want = alone(other)
    tokens = alone(Asked(prompt_of(9, 5), KNOBS[knob]))[0]
    at = next(i for i, token in enumerate(tokens) if token not in want[0] and i > 2)
    failing = Asked(prompt_of(9, 5), KNOBS[knob], num_drafts)
    at = tokens.index(tokens[at])
    for model, error in (
        (SpreadToy(poison=tokens[at]), "non-finite logits"),
        (SpreadToy(barren=tokens[at]), "non-finite logits"),
    ):
        if tokens[at] in failing.prompt or tokens[at] in other.prompt:
            continue
        engine = toy_engine(model=model, proposer=Picking(), num_drafts=3)
        numbers = [one.add(engine) for one in (failing, other)]
        out = run(engine)
        assert outcome(out[numbers[0]]) == (tokens[: at + 1], FinishReason.ERROR, error)
        assert outcome(out[numbers[1]]) == want


def test_where_every_allowed_id_is_impossible_the_request_ends() -> None:
    class Impossible(SpreadToy):
        def forward(self, inputs: StepInputs, pools: CachePools) -> TargetOutput:
            output = super().forward(inputs, pools)
            output.logits[:, [4, 5, 6]] = -math.inf
            return output

    for temperature in (0.0, 1.0):
        engine = toy_engine(model=Impossible(), proposer=Picking(), num_drafts=2)
        knobs = {"allowed_token_ids": [4, 5, 6], "temperature": temperature}
        number = Asked(prompt_of(5, 1), knobs).add(engine)
        got = outcome(run(engine)[number])
        assert got == ([], FinishReason.ERROR, "no token is allowed here")


def test_what_the_engine_cannot_serve_is_refused_at_the_door() -> None:
    engine = toy_engine(model=SpreadToy())
    for knobs, message in (
        ({"stop": ["x"]}, r"stop is \('x',\), but there is no tokenizer"),
        ({"bad_words": ["x"]}, r"bad_words is \('x',\), but there is no tokenizer"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias holds 61; allowed are ids 0 to 60"),
        ({"allowed_token_ids": [3, 99]}, "allowed_token_ids holds 99; allowed are ids 0 to 60"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "leave no token"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add([3, 4], SamplingParams(**knobs))
    engine.check_idle()


# Log-probabilities


@pytest.mark.parametrize("num_drafts", [0, 4])
@pytest.mark.parametrize("knob", ["top_p", "repetition_penalty", "min_tokens", None])
def test_log_probabilities_are_the_raw_logits_at_every_position(
    knob: str | None, num_drafts: int
) -> None:
    asked = Asked(prompt_of(21, 9), KNOBS[knob] if knob else {})
    engine = toy_engine(
        model=SpreadToy(), proposer=Picking(0.4), num_drafts=num_drafts, max_num_batched_tokens=8
    )
    number = asked.add(engine, logprobs=3, prompt_logprobs=2)
    emissions: list[Emission] = []
    while engine.has_work:
        emissions += engine.step()
        if len(emissions) == 1 and not engine.num_preemptions:
            engine._scheduler.preempt_last()
    assert all(len(e.logprobs or ()) == len(e.token_ids) for e in emissions)
    tokens = tokens_of(emissions)
    ids = [*asked.prompt, *tokens]
    rows = np.stack([logits_of(ids[:i]) for i in range(1, len(ids))])
    got = [one for e in emissions for one in e.logprobs or ()]
    assert got == token_logprobs(rows[len(asked.prompt) - 1 :], tokens, top=3)
    first = emissions[0].prompt_logprobs
    assert first is not None
    assert first[0] is None
    assert first[1:] == token_logprobs(rows, asked.prompt[1:], top=2)
    assert all(e.prompt_logprobs is None for e in emissions[1:])
    assert number == emissions[0].request_id


@pytest.mark.parametrize("acceptance", ["invariant", "rejection", "block"])
@pytest.mark.parametrize("knob", KNOBS)
def test_processed_log_probabilities_are_of_the_law_at_every_position(
    knob: str, acceptance: Any
) -> None:
    for num_drafts in (0, 4):
        asked = Asked(prompt_of(11, 9), KNOBS[knob])
        proposer = Picking(0.4)
        engine = toy_engine(
            model=SpreadToy(),
            proposer=proposer,
            num_drafts=num_drafts,
            acceptance=acceptance,
            logprobs_mode="processed",
        )
        number = asked.add(engine, logprobs=3, prompt_logprobs=1)
        sampler = engine._requests[number].sequence.sampler
        assert sampler is not None
        emissions = run(engine)[number]
        tokens = tokens_of(emissions)
        # The same request from its beginning on.
        again = toy_engine(model=SpreadToy())
        fresh = again._requests[asked.add(again)].sequence.sampler
        assert fresh is not None
        listed = [one for e in emissions for one in e.logprobs or ()]
        assert len(listed) == len(tokens) > 2
        for place, (token, one) in enumerate(zip(tokens, listed, strict=True)):
            law = fresh.law(logits_of([*asked.prompt, *tokens[:place]]))
            assert not isinstance(law, int)
            chances = law.probabilities()
            assert one.id == token
            assert math.exp(one.logprob) == pytest.approx(chances[token], abs=1e-9)
            assert one.logprob > -math.inf
            assert len(one.top) == min(3, int((chances > 0).sum()))
            fresh.commit([token])
        told = emissions[0].prompt_logprobs
        assert told is not None
        rows = np.stack([logits_of(asked.prompt[:i]) for i in range(1, len(asked.prompt))])
        assert told[1:] == token_logprobs(rows, asked.prompt[1:], top=1)


def test_a_kind_of_log_probabilities_that_is_none_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="logprobs_mode is 'both'; allowed are 'raw', 'processed'"
    ):
        toy_engine(logprobs_mode="both")


def test_prompt_log_probabilities_survive_pre_emption_within_the_prompt() -> None:
    prompt = prompt_of(200, 3)
    for at in range(1, 8):
        engine = toy_engine(
            model=SpreadToy(), max_num_batched_tokens=32, prefix_cache_bytes=1 << 20
        )
        # Another request has the same beginning kept; it must not be gone on from.
        engine.add([*prompt[:150], 5], SamplingParams(max_tokens=1))
        run_(engine)
        number = engine.add(prompt, SamplingParams(max_tokens=2, prompt_logprobs=0))
        out: list[Emission] = []
        for step in range(40):
            if step == at:
                engine._scheduler.preempt_last()
            out += engine.step() if engine.has_work else []
        (listed,) = [e.prompt_logprobs for e in out if e.prompt_logprobs is not None]
        rows = np.stack([logits_of(prompt[:i]) for i in range(1, len(prompt))])
        assert listed == [None, *token_logprobs(rows, prompt[1:], top=0)]
        assert number == out[0].request_id
        engine.check_idle()


def run_(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


# The real head, on the host and on a device path


def rig_engine(weights: Weights, **options: Any) -> Engine:
    rig = make_rig(weights, weights.config, backend="torch", max_seq_len=256)
    head = DeepseekV4MtpHead.new(
        rig.built.mtp,  # type: ignore[arg-type]
        rig.built.embed_tokens,
        rig.built.lm_head,
        weights.config,
        options.pop("mtp_vocab_size", 0),
        256,
        num_slots=4,
    )
    return Engine(
        rig.built.model,
        weights.config,
        proposer=head,
        num_drafts=3,
        max_seq_len=256,
        max_num_seqs=4,
        **options,
    )


# What an untrained head says has nothing to do with its target; a bias makes them agree at times.
LEAN = dict.fromkeys(range(8), 60.0)


@pytest.mark.parametrize(
    "options",
    [{}, {"drafts_on_device": True}, {"mtp_vocab_size": 64}],
    ids=["host", "device", "reduced"],
)
def test_the_head_drafts_with_every_knob_and_changes_nothing(
    tiny_weights: Weights, options: dict[str, Any]
) -> None:
    vocab = tiny_weights.config.vocab_size
    rng = random.Random(4)
    prompts = [[rng.randrange(vocab) for _ in range(6)] for _ in range(len(KNOBS) + 1)]
    asked = [
        Asked(p, {"logit_bias": LEAN, **k, "ignore_eos": True})
        for p, k in zip(prompts, [*KNOBS.values(), {"logit_bias": None}], strict=True)
    ]
    engine = rig_engine(tiny_weights)
    want = []
    for one in asked:
        number = one.add(engine, num_drafts=0)
        want.append(outcome(run(engine)[number]))
    engine = rig_engine(tiny_weights, **options)
    numbers = [one.add(engine, num_drafts=1 + i % 5) for i, one in enumerate(asked)]
    out = run(engine)
    assert [outcome(out[number]) for number in numbers] == want
    assert engine.num_proposer_failures == 0
    for number in numbers[:-1]:
        stats = out[number][-1].stats
        assert stats.num_drafted > 0
    assert sum(out[number][-1].stats.num_accepted for number in numbers) > 0


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_the_head_gives_laws_to_the_rejection_rules(tiny_weights: Weights, acceptance: Any) -> None:
    engine = rig_engine(tiny_weights, acceptance=acceptance)
    asked = Asked([5, 6, 7], {"temperature": 100.0, "logit_bias": LEAN, "max_tokens": 30})
    number = asked.add(engine, ignore_eos=True)
    out = run(engine)[number]
    assert len(tokens_of(out)) == 30
    assert engine.num_proposer_failures == 0
    # Laws so flat overlap, and most drafts are accepted.
    assert engine.speculation.acceptance_rate > 0.5


class Script:
    """Stands for a sampler: gives ids from a list and notes what it was asked."""

    is_argmax = is_tempered = False

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.asked: list[list[int]] = []
        self.rows: list[npt.NDArray[np.float32]] = []

    def pick(self, row: npt.NDArray[np.float32], *, drafted: list[int], mask: Any) -> int:
        self.asked.append(list(drafted))
        self.rows.append(row)
        return self.ids[len(self.asked) - 1]

    def draw(self, row: npt.NDArray[np.float32], *, drafted: list[int], mask: Any) -> Any:
        token = self.pick(row, drafted=drafted, mask=mask)
        return token, np.full(len(row), float(token))


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize(
    ("ids", "drafted"), [([3, 9, 4], [3, 9, 4]), ([3, -2, 4], [3]), ([-2], []), ([-1], [])]
)
def test_the_head_hands_each_row_to_the_sampler_with_the_drafts_before_it(
    tiny_weights: Weights, ids: list[int], drafted: list[int], draws: bool
) -> None:
    config = tiny_weights.config
    head: Any = rig_engine(tiny_weights, mtp_vocab_size=64).drafting.proposer  # type: ignore[union-attr]
    state = head.alloc_state_for(32)
    script: Any = Script(ids)
    draft = head.propose(
        DraftRequest(
            last_token=5,
            position=1,
            target_hidden=torch.zeros(config.hc_mult, config.hidden_size),
            num_drafts=3,
            history=[4, 5],
            sampler=script,
            draws=draws,
        ),
        state,
    )
    assert draft.tokens == drafted
    assert script.asked == [ids[:j] for j in range(min(3, len(drafted) + 1))]
    for row in script.rows:
        assert len(row) == config.vocab_size
        assert np.isfinite(row[:64]).all()
        assert (row[64:] == -np.inf).all()
    if draws:
        assert [law[0] for law in draft.laws] == drafted
    else:
        assert draft.laws is None
    # Rows that may not be finite are dropped; a row in which nothing was allowed is a good one.
    assert head.num_nonfinite == (ids == [-1])
    assert head.drafter_rows(state) == (0 if ids == [-1] else len(script.rows))


def test_greedy_requests_cost_no_more_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without knobs never meet a sampler's laws, nor a copy of the logits."""
    from paceline.draft import verify

    def never(*args: Any, **named: Any) -> Any:
        raise AssertionError("a greedy step went the long way")

    monkeypatch.setattr(verify, "invariant", never)
    monkeypatch.setattr(torch.Tensor, "clone", never)
    engine = toy_engine(model=SpreadToy(), proposer=Picking(0.5), num_drafts=3)
    number = Asked(prompt_of(6, 1), {"temperature": 0.0}).add(engine)
    assert len(tokens_of(run(engine)[number])) > 1
