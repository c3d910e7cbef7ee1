"""The public door, over the toy and over a tiny checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import EOS, MASK, Checked, ToyModel, continuation, oracle, toy_config, toy_engine

from paceline import LLM, FinishReason, GenerationError, SamplingParams
from paceline.draft import DraftProposer, NullProposer, RandomProposer
from paceline.llm import ProposerContext
from paceline.models.deepseek_v4.synth import byte_tokenizer_json
from paceline.text import Tokenizer
from paceline.types import CheckpointError, ConfigError, RequestError

assert MASK


def toy_llm(tokenizer: Tokenizer | None = None, **options: Any) -> LLM:
    return LLM.from_engine(toy_engine(**options), tokenizer)


@pytest.fixture
def text_llm(tmp_path: Path) -> LLM:
    """A toy over a byte tokenizer that drafts rightly."""
    file = tmp_path / "tokenizer.json"
    file.write_text(byte_tokenizer_json(264), encoding="utf-8")
    tokenizer = Tokenizer(file, vocab_size=264, bos_token_id=0)

    class Wide(ToyModel):
        """The toy's ids spread over those of bytes, so that most text is not valid UTF-8."""

        def forward(self, inputs: Any, pools: Any) -> Any:
            out = super().forward(inputs, pools)
            wide = torch.zeros(len(out.logits), 264)
            wide[torch.arange(len(out.logits)), 8 + out.logits.argmax(-1) * 4] = 1.0
            return type(out)(logits=wide, hiddens=out.hiddens)

    engine = toy_engine(
        model=Wide(),
        config=toy_config(vocab_size=264, eos_token_ids=()),
        proposer=RandomProposer(seed=0, vocab_size=264),
        num_drafts=2,
    )
    return LLM.from_engine(engine, tokenizer)


def test_forms_of_prompts() -> None:
    llm = toy_llm()
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    for prompts in ([1, 2, 3], [[1, 2, 3]], (1, 2, 3), [(1, 2, 3)]):
        (result,) = llm.generate(prompts, params)
        assert result.token_ids == continuation([1, 2, 3], 5)
        assert result.prompt_token_ids == [1, 2, 3]
        assert result.text == ""
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (3, 5)
        assert result.finish_reason is FinishReason.LENGTH
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 4, 2)]
    results = llm.generate([[5], [6, 7], [8]], each)
    assert [r.token_ids for r in results] == [
        continuation(p, n) for p, n in (([5], 1), ([6, 7], 4), ([8], 2))
    ]
    assert len(llm.generate([1, 2])[0].token_ids) <= 16


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([], None, "empty"),
        ([[]], None, "empty"),
        ("", None, "empty"),
        (5, None, "prompts is a int"),
        ([1, "a"], None, "list of prompts holds 1"),
        ([[1], None], None, "list of prompts holds None"),
        ([[1], [2]], [SamplingParams()], "1 params are given for 2 prompts"),
        ([1], {"max_tokens": 3}, "params is a dict"),
        ([[1], [1] * 600], None, "the prompt has 600 tokens"),
    ],
)
def test_bad_calls_run_nothing(prompts: Any, params: Any, message: str) -> None:
    llm = toy_llm()
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params)
    assert llm.engine.num_forwards == 0
    llm.engine.check_idle()


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json; prompts must be lists"):
        toy_llm().generate("hello")


def test_streamed_text_is_the_generated_text(text_llm: LLM) -> None:
    params = SamplingParams(max_tokens=40)
    prompts = ["hello", "wörld", "x"]
    whole = text_llm.generate(prompts, params)
    assert text_llm.tokenizer is not None
    texts, ids, ends = [""] * 3, [[] for _ in prompts], [0] * 3
    drafted: list[list[bool]] = [[] for _ in prompts]
    for chunk in text_llm.stream(prompts, params):
        assert not ends[chunk.index]
        assert "".join(text for text, _ in chunk.pieces) == chunk.text
        assert len(chunk.token_ids) == len(chunk.drafted)
        texts[chunk.index] += chunk.text
        ids[chunk.index] += chunk.token_ids
        drafted[chunk.index] += chunk.drafted
        if chunk.result is not None:
            ends[chunk.index] += 1
            assert chunk.result == whole[chunk.index]
    assert ends == [1, 1, 1]
    for text, tokens, marks, result in zip(texts, ids, drafted, whole, strict=True):
        assert text == result.text == text_llm.tokenizer.decode(tokens)
        assert tokens == result.token_ids
        assert marks == result.drafted
        assert sum(marks) <= result.speculation.num_accepted
        assert result.usage.completion_tokens == len(tokens) == 40


def test_begin_of_sequence_is_added_unless_told(text_llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    assert text_llm.generate("a", params)[0].prompt_token_ids[0] == 0
    assert text_llm.generate("a", params, add_bos=False)[0].prompt_token_ids[0] != 0


def test_more_prompts_than_slots() -> None:
    llm = toy_llm(max_num_seqs=2, proposer=Checked(oracle), num_drafts=3)
    prompts = [[n, n + 1] for n in range(2, 12)]
    results = llm.generate(prompts, SamplingParams(max_tokens=9))
    assert [r.token_ids for r in results] == [continuation(p, 9, stop=(EOS,)) for p in prompts]


def test_leaving_a_stream_frees_what_it_held() -> None:
    llm = toy_llm(proposer=Checked(oracle), num_drafts=3)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    for chunk in llm.stream([[1, 2], [3]], params):
        if chunk.index == 1:
            break
    del chunk
    llm.engine.check_idle()
    stream = llm.stream([1, 2, 3], params)
    next(stream)
    stream.close()
    llm.engine.check_idle()


def test_streams_of_one_llm_interleave() -> None:
    llm = toy_llm(proposer=Checked(oracle), num_drafts=2)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    one, two = llm.stream([1, 2], params), llm.stream([3], params)
    got: dict[int, list[int]] = {0: [], 1: []}
    going = {0: one, 1: two}
    while going:
        for name, stream in list(going.items()):
            chunk = next(stream, None)
            if chunk is None:
                del going[name]
            else:
                got[name] += chunk.token_ids
    assert got == {0: continuation([1, 2], 30), 1: continuation([3], 30)}
    assert llm.generate([7], params)[0].token_ids == continuation([7], 30)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_ctrl_c_frees_everything_and_can_go_on(at: int) -> None:
    class Interrupted(ToyModel):
        armed = True

        def forward(self, inputs: Any, pools: Any) -> Any:
            if self.armed and len(self.rows) == at:
                self.armed = False
                os.kill(os.getpid(), signal.SIGINT)
            return super().forward(inputs, pools)

    llm = toy_llm(model=Interrupted(), proposer=Checked(oracle), num_drafts=2)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    other = llm.stream([9, 9], params)
    seen = next(other).token_ids
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2], [3]], params)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # Nothing is lost for a request that was not interrupted.
    for chunk in other:
        seen += chunk.token_ids
    assert seen == continuation([9, 9], 30)
    llm.engine.check_idle()
    assert llm.generate([1, 2], params)[0].token_ids == continuation([1, 2], 30)


def test_failed_requests_are_results() -> None:
    llm = toy_llm(model=ToyModel(poison=60))
    good, bad = llm.generate([[1, 2], [60]], SamplingParams(max_tokens=2))
    assert good.finish_reason is FinishReason.LENGTH
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.error
    assert bad.token_ids == []


def test_closing() -> None:
    with toy_llm() as llm:
        stream = llm.stream([1], SamplingParams(max_tokens=9, ignore_eos=True))
        next(stream)
    llm.close()
    with pytest.raises(GenerationError, match="closed while it generated"):
        list(stream)
    with pytest.raises(GenerationError, match="this LLM is closed"):
        llm.generate([1])


# Over a checkpoint


def test_a_checkpoint_end_to_end(tiny_path: Path) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = ["def f(x):", "import", [5, 6, 7]]
    with LLM(tiny_path, num_drafts=0, max_seq_len=256, backend="torch") as llm:
        assert llm.num_drafts == 0
        off = llm.generate(prompts, params)
    reports: list[tuple[int, int]] = []
    with LLM(
        tiny_path,
        max_seq_len=256,
        backend="torch",
        progress=lambda done, total: reports.append((done, total)),
    ) as llm:
        assert llm.num_drafts == 3
        assert "num_drafts=3, max_seq_len=256" in repr(llm)
        assert "device='cpu', dtype='float32', backend='torch'" in repr(llm)
        on = llm.generate(prompts, params)
        llm.engine.check_idle()
        assert llm.engine.num_proposer_failures == 0
    assert [r.token_ids for r in on] == [r.token_ids for r in off]
    assert on[0].speculation.num_drafted > 0
    assert off[0].speculation.num_drafted == 0
    assert reports[-1][0] == reports[-1][1] > 0


def test_proposers_of_ones_own(tiny_path: Path) -> None:
    told: list[ProposerContext] = []

    def make(context: ProposerContext) -> DraftProposer[Any]:
        told.append(context)
        return RandomProposer(seed=1, vocab_size=context.config.vocab_size)

    prompts = [[5, 6, 7]]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    tokens = []
    for proposer in (None, make, NullProposer()):
        with LLM(
            tiny_path,
            num_drafts=0 if proposer is None else None,
            proposer=proposer,
            max_seq_len=64,
            backend="torch",
        ) as llm:
            tokens.append(llm.generate(prompts, params)[0].token_ids)
    assert tokens[0] == tokens[1] == tokens[2]
    assert told[0].built.mtp is not None
    assert (told[0].max_seq_len, told[0].max_num_seqs) == (64, 8)
    with pytest.raises(ConfigError, match="factory made a int; a DraftProposer is needed"):
        LLM(tiny_path, proposer=lambda context: 3, max_seq_len=64, backend="torch")  # type: ignore[arg-type, return-value]
