"""The step over a toy target that remembers through the caches' own addressing."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy import (
    EOS,
    RULES,
    VOCAB,
    Checked,
    ToyModel,
    anti,
    continuation,
    decode,
    oracle,
    run,
    toy_config,
    toy_engine,
)

from paceline.draft import (
    AntiProposer,
    DeepseekV4MtpHead,
    DraftProposer,
    OracleProposer,
    RandomProposer,
)
from paceline.engine import Engine
from paceline.models.deepseek_v4.build import build
from paceline.models.step import TargetModel
from paceline.types import (
    ConfigError,
    Draft,
    DraftRequest,
    FinishReason,
    RequestError,
    SamplingParams,
)

NO_EOS = toy_config(eos_token_ids=())


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


MIXED = prompts(1, 2, 5, 127, 128, 129, 200, 300)


@pytest.mark.parametrize("budget", [8, 9, 33, 256])
def test_without_drafts_the_tokens_are_the_targets_own(budget: int) -> None:
    got = decode(toy_engine(max_num_batched_tokens=budget), MIXED, SamplingParams(max_tokens=40))
    for prompt, (tokens, _) in zip(MIXED, got, strict=True):
        assert tokens == continuation(prompt, 40, stop=(EOS,))


@pytest.mark.parametrize("num_drafts", range(1, 9))
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_tokens_do_not_depend_on_drafts(name: str, num_drafts: int, count: int) -> None:
    params = SamplingParams(max_tokens=45)
    some = MIXED[:count] if count > 1 else MIXED[4:5]
    proposer = Checked(RULES[name], batch=1 + num_drafts % 4, deferred=bool(num_drafts % 2))
    engine = toy_engine(
        proposer=proposer, num_drafts=num_drafts, max_num_batched_tokens=(24, 64)[num_drafts % 2]
    )
    for prompt, (tokens, _) in zip(some, decode(engine, some, params), strict=True):
        assert tokens == continuation(prompt, 45, stop=(EOS,))
    assert engine.num_proposer_failures == 0
    assert not proposer.live
    assert proposer.calls["after_verify"] > 0


def test_requests_with_different_drafts_share_steps() -> None:
    each = [SamplingParams(max_tokens=30, num_drafts=k, ignore_eos=True) for k in range(8)]
    proposer = Checked(RULES["scattered"], batch=3)
    engine = toy_engine(proposer=proposer, num_drafts=2)
    for prompt, (tokens, _) in zip(MIXED, decode(engine, MIXED, each), strict=True):
        assert tokens == continuation(prompt, 30)
    assert engine.num_proposer_failures == 0


def test_no_drafts_asked_for_means_nothing_is_fed() -> None:
    proposer = Checked(oracle)
    engine = toy_engine(proposer=proposer, num_drafts=3)
    decode(engine, MIXED[:2], SamplingParams(max_tokens=10, num_drafts=0))
    assert proposer.calls == {}


def test_the_oracle_fills_every_step() -> None:
    for num_drafts in range(9):
        engine = toy_engine(
            config=NO_EOS, proposer=Checked(oracle), num_drafts=num_drafts, max_seq_len=2048
        )
        engine.add(MIXED[2], SamplingParams(max_tokens=1 + 12 * (num_drafts + 1)))
        emissions = run(engine)[0]
        assert [len(e.token_ids) for e in emissions] == [1] + [num_drafts + 1] * 12
        stats = emissions[-1].stats
        assert stats.num_accepted == stats.num_drafted == 12 * num_drafts
        assert stats.num_steps == 13
        assert stats.mean_acceptance_length == 1 + num_drafts
        assert stats.acceptance_by_position == [1.0] * num_drafts
        made = [(origin.kind, origin.position) for origin in emissions[1].origins]
        expected = [("accepted", place) for place in range(1, num_drafts + 1)]
        assert made == [*expected, ("bonus" if num_drafts else "target", None)]


def test_the_anti_drafter_costs_steps_only() -> None:
    engine = toy_engine(config=NO_EOS, proposer=Checked(anti), num_drafts=4)
    engine.add(MIXED[2], SamplingParams(max_tokens=30))
    emissions = run(engine)[0]
    assert [len(e.token_ids) for e in emissions] == [1] * 30
    assert emissions[-1].stats.num_accepted == 0
    assert emissions[-1].stats.drafted_at == [28, 27, 26, 25]


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 8])
@pytest.mark.parametrize("name", ["oracle", "scattered"])
def test_max_tokens_is_exact(name: str, num_drafts: int) -> None:
    proposer = Checked(RULES[name])
    engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=num_drafts)
    for count in range(1, 2 * num_drafts + 4):
        for prompt in (MIXED[0], MIXED[3]):
            (got,) = decode(engine, [prompt], SamplingParams(max_tokens=count))
            assert got == (continuation(prompt, count), FinishReason.LENGTH)


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 8])
@pytest.mark.parametrize("limit", [130, 131, 132, 133, 257])
def test_context_limit_is_exact(num_drafts: int, limit: int) -> None:
    engine = toy_engine(
        config=NO_EOS, proposer=Checked(oracle), num_drafts=num_drafts, max_seq_len=limit
    )
    for length in (120, 125, 127, 128, 129, limit - 1):
        (prompt,) = prompts(length)
        (got,) = decode(engine, [prompt], SamplingParams(max_tokens=1000))
        assert got == (continuation(prompt, limit - length), FinishReason.LENGTH)


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
def test_end_of_sequence_at_each_row_of_a_block(num_drafts: int) -> None:
    text = continuation(MIXED[2], 40)
    for at in range(1, 2 * num_drafts + 4):
        end = text[at]
        expected = text[: text.index(end) + 1]
        engine = toy_engine(
            config=toy_config(eos_token_ids=(end,)), proposer=Checked(oracle), num_drafts=num_drafts
        )
        (got,) = decode(engine, [MIXED[2]], SamplingParams(max_tokens=40))
        assert got == (expected, FinishReason.STOP)
        (got,) = decode(engine, [MIXED[2]], SamplingParams(max_tokens=40, ignore_eos=True))
        assert got == (text, FinishReason.LENGTH)
        both = SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=[end])
        assert decode(engine, [MIXED[2]], both) == [(expected, FinishReason.STOP)]


def test_stop_wins_over_length_on_the_same_token() -> None:
    text = continuation(MIXED[2], 6)
    params = SamplingParams(max_tokens=6, stop_token_ids=[text[5]])
    last = text.index(text[5])
    engine = toy_engine(config=NO_EOS, proposer=Checked(oracle), num_drafts=3)
    assert decode(engine, [MIXED[2]], params) == [(text[: last + 1], FinishReason.STOP)]


def test_a_drafted_end_that_is_refused_ends_nothing() -> None:
    engine = toy_engine(proposer=Checked(lambda h, n, s: [EOS] * n), num_drafts=3)
    (got,) = decode(engine, [MIXED[3]], SamplingParams(max_tokens=30))
    assert got[0] == continuation(MIXED[3], 30, stop=(EOS,))


@pytest.mark.parametrize("num_drafts", [0, 2, 5])
def test_min_tokens_masks_the_ends_row_by_row(num_drafts: int) -> None:
    text = continuation(MIXED[2], 12)
    config = toy_config(eos_token_ids=(text[3],))
    masked = list(MIXED[2])
    for n in range(12):
        # What the toy prefers second is the id after its first choice.
        token = continuation(masked, 1)[0]
        masked.append((token + 1) % VOCAB if n < 8 and token == text[3] else token)
        if n >= 8 and token == text[3]:
            break
    expected = masked[len(MIXED[2]) :]
    proposer = Checked(RULES["scattered"])
    engine = toy_engine(config=config, proposer=proposer, num_drafts=num_drafts)
    ((tokens, _),) = decode(engine, [MIXED[2]], SamplingParams(max_tokens=12, min_tokens=8))
    assert tokens == expected
    assert text[3] not in tokens[:8]


def test_not_finite_logits_end_one_request_only() -> None:
    poison = 60
    good = [[t % 60 for t in p] for p in prompts(5, 140, 30)]
    params = SamplingParams(max_tokens=25)
    clean = decode(toy_engine(), good, params)
    # A request whose own continuation meets the poison may end so too; choose one that does not.
    good = [p for p, (t, _) in zip(good, clean, strict=True) if poison not in t]
    clean = [got for got in clean if poison not in got[0]]
    assert good
    for rule in (oracle, anti):
        engine = toy_engine(
            model=ToyModel(poison=poison), proposer=Checked(rule, batch=4), num_drafts=3
        )
        numbers = [engine.add(p, params) for p in [*good, [5, poison, 7]]]
        emissions = run(engine)
        for number, expected in zip(numbers, clean, strict=False):
            assert [t for e in emissions[number] for t in e.token_ids] == expected[0]
        failed = emissions[numbers[-1]]
        assert failed[-1].finish_reason is FinishReason.ERROR
        assert failed[-1].token_ids == []
        assert failed[-1].error
        assert "finite" in failed[-1].error


def test_what_was_accepted_before_a_failed_row_still_stands() -> None:
    text = continuation([3, 4, 5], 30)
    poison = text[4]
    want = text[: text.index(poison) + 1]
    for num_drafts in (0, 8):
        engine = toy_engine(
            model=ToyModel(poison=poison), proposer=Checked(oracle), num_drafts=num_drafts
        )
        (got,) = decode(engine, [[3, 4, 5]], SamplingParams(max_tokens=30, ignore_eos=True))
        assert got == (want, FinishReason.ERROR)


def test_memory_of_a_failed_request_is_clean_for_the_next() -> None:
    engine = toy_engine(model=ToyModel(poison=3), max_num_seqs=1)
    pools = engine._runner.pools
    engine.add([1, 2, 3], SamplingParams())
    for tensor in (pools.window, pools.rows4, pools.raw128_kv, pools.index4):
        tensor.fill_(float("nan"))
    (emission,) = engine.step()
    assert emission.finish_reason is FinishReason.ERROR
    assert not pools.window[:, 0].isnan().any()
    assert not pools.raw128_kv[:, 0].isnan().any()
    # Blocks 0 (padding) and 1 (its own) are clean; another's are not touched.
    assert not pools.rows4[:, :64].isnan().any()
    assert pools.rows4[:, 64:].isnan().all()


@pytest.mark.parametrize("phase", [0, 1, 2, 3, 7])
def test_abort_in_every_phase_brings_all_home(phase: int) -> None:
    proposer = Checked(RULES["scattered"], batch=4, deferred=bool(phase % 2))
    engine = toy_engine(
        proposer=proposer, num_drafts=3, max_num_batched_tokens=64, max_num_seqs=2, num_blocks=4
    )
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    kept = engine.add(MIXED[2], params)
    doomed = [engine.add(p, params) for p in (MIXED[3], MIXED[6], MIXED[1])]
    tokens: list[int] = []
    for _ in range(phase):
        tokens += [t for e in engine.step() if e.request_id == kept for t in e.token_ids]
    for number in doomed:
        assert engine.abort(number)
        assert not engine.abort(number)
    tokens += [t for e in run(engine)[kept] for t in e.token_ids]
    assert tokens == continuation(MIXED[2], 50)
    assert not proposer.live
    # The same prompt again is as cold as ever.
    assert decode(engine, [MIXED[3]], params) == [(continuation(MIXED[3], 50), FinishReason.LENGTH)]


def test_a_full_pool_makes_requests_wait_not_fail() -> None:
    engine = toy_engine(config=NO_EOS, num_blocks=3, proposer=Checked(oracle), num_drafts=2)
    got = decode(engine, MIXED[:7], SamplingParams(max_tokens=60))
    for prompt, (tokens, _) in zip(MIXED, got, strict=False):
        assert tokens == continuation(prompt, 60)


def test_prompt_streams_arrive_once_each_and_only_the_last_rows() -> None:
    for budget in (9, 100, 256):
        for deferred in (False, True):
            proposer = Checked(oracle, hidden_rows=20, deferred=deferred)
            engine = toy_engine(
                proposer=proposer, num_drafts=2, max_num_batched_tokens=budget, max_num_seqs=2
            )
            engine.add(MIXED[7], SamplingParams(max_tokens=9, ignore_eos=True))
            pairs: dict[int, int] = {}
            while engine.has_work:
                engine.step()
                if proposer.live:
                    pairs = proposer.live[0]["pairs"]
            assert min(pairs) == 300 - 20
            assert engine.num_proposer_failures == 0


def test_an_undrafted_step_leaves_no_gap() -> None:
    # The prompts take so much of the budget that some sequences pass a turn; `Checked` refuses
    # any pair that does not follow the one before.
    proposer = Checked(RULES["scattered"])
    engine = toy_engine(
        config=NO_EOS,
        proposer=proposer,
        num_drafts=4,
        max_num_batched_tokens=12,
        max_num_seqs=8,
        max_seq_len=1024,
    )
    first = [engine.add(p, SamplingParams(max_tokens=60)) for p in MIXED[:5]]
    for _ in range(30):
        engine.step()
    engine.add(MIXED[7], SamplingParams(max_tokens=5))
    run(engine)
    assert first
    assert proposer.calls["catchup_drafter"] > 0
    assert engine.num_proposer_failures == 0


class Faulty(DraftProposer[list[int]]):
    """Breaks the contract in one way, now and then, in prompts that begin with 9."""

    def __init__(self, how: str, batch: int) -> None:
        self.how, self.batch = how, batch

    def alloc_state(self) -> list[int]:
        if self.how == "alloc_state":
            raise ValueError("no state today")
        return []

    def propose_batch_max(self) -> int:
        return self.batch

    def propose_batch(self, requests: Any, states: Any) -> Any:
        if self.batch == 1:
            return None
        if self.how == "short batch":
            return []
        return [self.propose(r, s) for r, s in zip(requests, states, strict=True)]

    def propose(self, request: DraftRequest, state: list[int]) -> Any:
        good = continuation(request.history, request.num_drafts)
        state.append(0)
        if request.history[0] != 9 or len(state) % 3:
            return Draft(tokens=good)
        if self.how == "raises":
            raise RuntimeError("broken")
        return {
            "negative": Draft(tokens=[-1] * request.num_drafts),
            "beyond": Draft(tokens=[good[0], VOCAB]),
            "float": Draft(tokens=[1.5]),  # type: ignore[list-item]
            "too many": Draft(tokens=[*good, 1, 2, 3, 4]),
            "no draft": None,
            "no tokens": Draft(tokens=None),  # type: ignore[arg-type]
            "a list": good,
        }.get(self.how, Draft(tokens=good))

    def after_verify(self, num_accepted: int, state: list[int]) -> None:
        if self.how == "after_verify":
            raise ValueError("no")

    def catchup_batch(self, *args: Any) -> int:
        if self.how == "catchup_batch":
            raise ValueError("no")
        return 0

    def drafter_rows(self, state: list[int]) -> int:
        return 0

    def last_pair_key(self, state: list[int]) -> Any:
        return None

    def prefill_drafter(self, *args: Any, **named: Any) -> int:
        if self.how == "prefill_drafter":
            raise ValueError("no")
        return 0

    def free_state(self, state: list[int]) -> None:
        if self.how == "free_state":
            raise ValueError("no")


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    "how",
    [
        "raises",
        "negative",
        "beyond",
        "float",
        "too many",
        "no draft",
        "no tokens",
        "a list",
        "short batch",
        "alloc_state",
        "after_verify",
        "catchup_batch",
        "prefill_drafter",
        "free_state",
    ],
)
def test_a_broken_proposer_costs_drafts_only(
    how: str, batch: int, caplog: pytest.LogCaptureFixture
) -> None:
    some = [[9, *MIXED[2]], MIXED[1], MIXED[3]]
    engine = toy_engine(config=NO_EOS, proposer=Faulty(how, batch), num_drafts=3)
    with caplog.at_level(logging.WARNING):
        got = decode(engine, some, SamplingParams(max_tokens=40))
    for prompt, (tokens, _) in zip(some, got, strict=True):
        assert tokens == continuation(prompt, 40)
    if how != "short batch" or batch > 1:
        assert engine.num_proposer_failures > 0
        assert len([r for r in caplog.records if "said once" in r.message]) == 1


def test_an_error_of_the_forward_leaves_every_request_whole() -> None:
    class Flaky(ToyModel):
        def forward(self, inputs: Any, pools: Any) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls % 3 == 1:
                raise MemoryError("no room")
            return super().forward(inputs, pools)

    proposer = Checked(RULES["scattered"], batch=2)
    engine = toy_engine(
        config=NO_EOS, model=Flaky(), proposer=proposer, num_drafts=3, max_num_batched_tokens=9
    )
    params = SamplingParams(max_tokens=20)
    numbers = [engine.add(p, params) for p in MIXED[:3]]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    failures = 0
    while engine.has_work:
        try:
            for emission in engine.step():
                tokens[emission.request_id] += emission.token_ids
        except MemoryError:
            failures += 1
    assert failures > 3
    assert engine.num_proposer_failures == 0
    assert not proposer.live
    engine.check_idle()
    for number, prompt in zip(numbers, MIXED, strict=False):
        assert tokens[number] == continuation(prompt, 20)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([1] * 512, "the prompt has 512 tokens; allowed are 1 to 511"),
        ([1, VOCAB], f"holds {VOCAB}; allowed are ids 0 to {VOCAB - 1}"),
        ([1, -1], "holds -1"),
        ([1, 2.0], "holds 2.0"),
        ([1, True], "holds True"),
    ],
)
def test_bad_prompts_are_refused(prompt: list[Any], message: str) -> None:
    engine = toy_engine()
    with pytest.raises(RequestError, match=message):
        engine.add(prompt, SamplingParams())
    engine.check_idle()


def test_bad_requests_and_settings() -> None:
    with pytest.raises(RequestError, match="stop_token_ids holds 900"):
        toy_engine().add([1], SamplingParams(stop_token_ids=[900]))
    with pytest.raises(RequestError, match="num_drafts is 2, but this engine has no proposer"):
        toy_engine().add([1], SamplingParams(num_drafts=2))
    for bad in (-1, 9, True, 1.5):
        with pytest.raises(ConfigError, match="allowed is 0 to 8"):
            toy_engine(proposer=Checked(oracle), num_drafts=bad)
    with pytest.raises(ConfigError, match="no proposer"):
        toy_engine(num_drafts=1)


def test_idle_check_sees_what_is_away() -> None:
    engine = toy_engine(proposer=Checked(oracle), num_drafts=2)
    engine.check_idle()
    number = engine.add(MIXED[3], SamplingParams(max_tokens=5))
    with pytest.raises(RuntimeError, match="1 requests"):
        engine.check_idle()
    engine.step()
    with pytest.raises(RuntimeError, match="1 drafter states, 1 cache blocks"):
        engine.check_idle()
    engine.abort(number)
    engine.check_idle()
    assert engine.step() == []


def test_two_engines_in_a_process() -> None:
    one = toy_engine(proposer=Checked(oracle), num_drafts=2)
    two = toy_engine(config=NO_EOS)
    one.add(MIXED[2], SamplingParams(max_tokens=9, ignore_eos=True))
    two.add(MIXED[3], SamplingParams(max_tokens=9))
    got: dict[str, list[int]] = {"one": [], "two": []}
    while one.has_work or two.has_work:
        for name, engine in (("one", one), ("two", two)):
            got[name] += [t for e in engine.step() for t in e.token_ids]
    assert got == {"one": continuation(MIXED[2], 9), "two": continuation(MIXED[3], 9)}


def test_public_doubles_in_the_engine() -> None:
    params = SamplingParams(max_tokens=40)
    texts = [[*p, *continuation(p, 60)] for p in MIXED]
    plain = decode(toy_engine(), MIXED, params)
    makers: list[Any] = [
        lambda: OracleProposer(texts),
        lambda: AntiProposer(texts, vocab_size=VOCAB),
        lambda: RandomProposer(seed=3, vocab_size=VOCAB),
    ]
    for make in makers:
        for num_drafts in (1, 4, 8):
            engine = toy_engine(proposer=make(), num_drafts=num_drafts)
            assert decode(engine, MIXED, params) == plain
            assert engine.num_proposer_failures == 0


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_history_of_arrivals_and_aborts(data: st.DataObject) -> None:
    num_drafts = data.draw(st.integers(0, 8))
    slots = data.draw(st.integers(1, 4))
    proposer = Checked(
        RULES[data.draw(st.sampled_from(sorted(RULES)))],
        batch=data.draw(st.integers(1, 4)),
        deferred=data.draw(st.booleans()),
        hidden_rows=data.draw(st.sampled_from([0, 1, 2, 30, 128])),
    )
    engine = toy_engine(
        config=NO_EOS,
        proposer=proposer,
        num_drafts=num_drafts,
        max_num_seqs=slots,
        max_num_batched_tokens=data.draw(st.integers(slots, 40)),
        num_blocks=data.draw(st.integers(2, 8)),
        max_seq_len=400,
    )
    said: dict[int, list[int]] = {}
    want: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["add", "add", "step", "step", "step", "abort"]))
        if what == "add":
            prompt = prompts(data.draw(st.integers(1, 180)), seed=len(said))[0]
            count = data.draw(st.integers(1, 70))
            number = engine.add(prompt, SamplingParams(max_tokens=count))
            said[number], want[number] = [], continuation(prompt, count)
        elif what == "abort" and said:
            number = data.draw(st.sampled_from(sorted(said)))
            engine.abort(number)
            want[number] = want[number][: len(said[number])]
        else:
            for emission in engine.step():
                said[emission.request_id] += emission.token_ids
    for number, emissions in run(engine).items():
        said[number] += [t for e in emissions for t in e.token_ids]
    assert said == want
    assert not proposer.live
    assert engine.num_proposer_failures == 0


# The same over the real model


def _parts(weights: Any, config: Any, backend: Any) -> Any:
    return build(weights, config, device=torch.device("cpu"), dtype=torch.float32, backend=backend)


def _real(built: Any, config: Any, proposer: Any, num_drafts: int, **options: Any) -> Engine:
    model: TargetModel = built.model
    return Engine(
        model, config, proposer=proposer, num_drafts=num_drafts, max_seq_len=512, **options
    )


def test_real_model_with_its_own_head(tiny_path: Any, tiny_weights: Any, backend: str) -> None:
    from paceline.config import ModelConfig

    config = ModelConfig.from_path(tiny_path)
    built = _parts(tiny_weights, config, backend)
    rng = random.Random(1)
    some = [[rng.randrange(config.vocab_size) for _ in range(n)] for n in (1, 7, 126, 150)]
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    plain = decode(_real(built, config, None, 0), some, params)
    texts = [[*p, *t] for p, (t, _) in zip(some, plain, strict=True)]
    for num_drafts in (1, 3, 8):
        head = DeepseekV4MtpHead.new(
            built.mtp, built.embed_tokens, built.lm_head, config, 0, 512, num_slots=8
        )
        engine = _real(built, config, head, num_drafts, max_num_batched_tokens=48)
        assert decode(engine, some, params) == plain
        assert engine.num_proposer_failures == 0
        assert head.num_free_slots == head.num_slots
        oracle_engine = _real(built, config, OracleProposer(texts), num_drafts)
        assert decode(oracle_engine, some, params) == plain
        assert oracle_engine.num_forwards < engine.num_forwards
