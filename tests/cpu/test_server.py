"""The server through the official client: what comes is what the library gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from server_kit import NAME, Live, running, until

from paceline import LLM, SamplingParams
from paceline.server.openapi import document
from paceline.server.protocol import Asked
from paceline.server.replies import ChatAnswer
from paceline.text import ChatParser, ChatTemplate
from paceline.text.chat import DSML
from paceline.types import (
    FinishReason,
    GenerationResult,
    Origin,
    SpeculationStats,
    StreamChunk,
    Usage,
)

PROMPTS = [
    "def add(a, b):",
    "The sum of",
    "import os\n",
    "class Node:",
    "for i in range(",
    "A list is",
    "return self.",
    "Größe 漢字 🙂",
    "# Usage\n",
    "if __name__",
    "try:\n",
    "assert x ==",
    "def main() -> None:",
    "The module",
    "print(",
    "with open(",
]
TOKENS = 24
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.7, "seed": 3},
    {"temperature": 0.7, "seed": 3, "top_p": 0.5},
    {"temperature": 0.7, "seed": 3, "top_k": 2},
    {"temperature": 0.7, "seed": 3, "min_p": 0.3},
    {"temperature": 0.7, "seed": 2**64 - 1},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 1.5},
    {"logit_bias": {260: 90}},
    {"allowed_token_ids": [300, 301, 302]},
    {"bad_words": ["self", "return"]},
    {"stop_token_ids": [13, 199]},
    {"stop": "\n", "include_stop_str_in_output": True},
    {"min_tokens": 20, "stop": ["\n"]},
    {"ignore_eos": True},
    {"choice": ["yes", "no"]},
    {"regex": "[a-c]{5}"},
]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "parameters": {
            "type": "object",
            "properties": {
                "kind": {"enum": ["a", "b"]},
                "count": {"type": "integer", "maximum": 9},
            },
            "required": ["kind", "count"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_seq_len=512, num_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[str]:
    """Each prompt's answer with nothing beside it."""
    params = SamplingParams(max_tokens=TOKENS)
    return [llm.generate(prompt, params)[0].text for prompt in PROMPTS]


@pytest.fixture(scope="module")
def sampled(llm: LLM) -> list[str]:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7, n=3)
    return [result.text for result in llm.generate(PROMPTS[0], params)]


@pytest.fixture(scope="module")
def by_fields(llm: LLM) -> list[GenerationResult]:
    return [
        llm.generate(PROMPTS[3], SamplingParams(max_tokens=TOKENS, **fields))[0]
        for fields in FIELDS
    ]


@pytest.fixture(scope="module")
def listed(llm: LLM) -> Any:
    params = SamplingParams(max_tokens=6, logprobs=2, prompt_logprobs=2)
    return llm.generate(PROMPTS[0], params)[0]


@pytest.fixture(scope="module")
def chatted(llm: LLM) -> GenerationResult:
    assert llm.tokenizer is not None
    prompt = ChatTemplate.for_tokenizer(llm.tokenizer).render([{"role": "user", "content": "Hi"}])
    return llm.generate(prompt.ids(llm.tokenizer), SamplingParams(max_tokens=TOKENS))[0]


@pytest.fixture(scope="module")
def live(
    llm: LLM, alone: Any, sampled: Any, listed: Any, chatted: Any, by_fields: Any
) -> Iterator[Live]:
    with running(llm) as live:
        yield live


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with live.client() as client:
        yield client
    live.wait_idle()


def complete(client: openai.OpenAI, prompt: Any = PROMPTS[0], **more: Any) -> Any:
    given = {"temperature": 0, "max_tokens": TOKENS, **more}
    return client.completions.create(model=NAME, prompt=prompt, **given)


def ask(client: openai.OpenAI, **more: Any) -> Any:
    given = {"temperature": 0, "max_tokens": TOKENS, **more}
    messages = [{"role": "user", "content": "Hi"}]
    return client.chat.completions.create(model=NAME, messages=messages, **given)  # type: ignore


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).object == "model"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("another")


def test_a_completion_is_the_librarys(client: openai.OpenAI, alone: list[str]) -> None:
    answer = complete(client)
    assert answer.choices[0].text == alone[0]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == TOKENS
    assert answer.usage.total_tokens == TOKENS + answer.usage.prompt_tokens


def test_a_stream_joins_to_the_completion(client: openai.OpenAI, alone: list[str]) -> None:
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].text for chunk in chunks[:-1]]
    assert "".join(texts) == alone[0]
    assert len(texts) > 1
    assert [chunk.choices[0].finish_reason for chunk in chunks[-3:-1]] == [None, "length"]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * len(texts)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == TOKENS


def test_usage_can_come_with_every_chunk(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(client, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == TOKENS


@pytest.mark.parametrize("stream", [False, True])
def test_speculation_is_told(client: openai.OpenAI, stream: bool) -> None:
    if stream:
        last = list(complete(client, stream=True, stream_options={"include_usage": True}))[-1]
    else:
        last = complete(client)
    told = last.usage.speculation
    metrics = last.metrics["speculative_decoding"]
    assert told["drafted"] == metrics["num_draft_tokens"] > told["accepted"] > 0
    assert told["accepted"] == metrics["num_accepted_draft_tokens"]
    histogram = metrics["acceptance_histogram"]
    assert len(histogram) == 1 + metrics["num_spec_tokens"] == 4
    assert sum(histogram) == metrics["num_spec_steps"]
    assert sum(j * count for j, count in enumerate(histogram)) == told["accepted"]
    mean = 1 + told["accepted"] / metrics["num_spec_steps"]
    assert told["mean_acceptance_length"] == pytest.approx(mean)
    assert metrics["mean_acceptance_length"] == pytest.approx(mean)
    assert metrics["draft_acceptance_rate"] == told["accepted"] / told["drafted"]


def test_metrics_come_in_the_last_chunk_without_usage(client: openai.OpenAI) -> None:
    chunks = list(complete(client, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].metrics["speculative_decoding"]["num_draft_tokens"] > 0


@pytest.mark.parametrize("num_drafts", [0, 1, 8, "auto"])
def test_drafts_are_steered_and_change_no_token(
    client: openai.OpenAI, alone: list[str], num_drafts: Any
) -> None:
    answer = complete(client, extra_body={"num_drafts": num_drafts})
    assert answer.choices[0].text == alone[0]
    assert (answer.usage.speculation["drafted"] == 0) == (num_drafts == 0)
    if num_drafts == 0:
        assert not hasattr(answer, "metrics")


def test_several_answers(client: openai.OpenAI, sampled: list[str]) -> None:
    more: dict[str, Any] = {"n": 3, "seed": 7, "temperature": 1, "max_tokens": 12}
    answer = complete(client, **more)
    assert [choice.text for choice in answer.choices] == sampled
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens <= 36
    assert answer.usage.speculation["drafted"] > 0
    texts = ["", "", ""]
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}, **more))
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == sampled
    assert chunks[-1].usage.speculation == answer.usage.speculation


def test_several_answers_of_a_chat_tell_of_their_drafts(client: openai.OpenAI) -> None:
    more: dict[str, Any] = {"n": 2, "seed": 7, "temperature": 1, "max_tokens": 12}
    answer = ask(client, **more)
    told = answer.usage.speculation
    assert told["drafted"] >= told["accepted"] > 0
    assert 1 < told["mean_acceptance_length"] <= 4
    assert told["mean_acceptance_length"] == pytest.approx(
        1 + told["accepted"] / told["drafted_at"][0]
    )
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}, **more))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == answer.usage
    contents = ["", ""]
    for chunk in chunks[:-1]:
        contents[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert contents == [choice.message.content for choice in answer.choices]
    # As vLLM, which has them for one answer only.
    assert not hasattr(answer, "metrics")
    assert not hasattr(chunks[-1], "metrics")


@pytest.mark.parametrize("case", range(len(FIELDS)))
def test_a_field_means_what_it_means_in_the_library(
    live: Live, by_fields: list[GenerationResult], case: int
) -> None:
    sent = {"temperature": 0, "max_tokens": TOKENS, "prompt": PROMPTS[3], **FIELDS[case]}
    choice = httpx.post(f"{live.url}/v1/completions", json=sent).json()["choices"][0]
    assert choice["text"] == by_fields[case].text
    assert choice["finish_reason"] == by_fields[case].finish_reason


def test_numbers_without_a_fraction_and_empty_lists(
    live: Live, client: openai.OpenAI, alone: list[str]
) -> None:
    body = {"max_tokens": 24.0, "n": 1.0, "temperature": 0.0, "num_drafts": 2.0, "logprobs": 0.0}
    body |= {"stop": [], "bad_words": [], "stop_token_ids": [], "logit_bias": {}}
    answer = httpx.post(f"{live.url}/v1/completions", json={"prompt": PROMPTS[0], **body})
    assert answer.json()["choices"][0]["text"] == alone[0]
    refused = httpx.post(f"{live.url}/v1/completions", json={"prompt": "a", "max_tokens": 2.5})
    assert refused.json()["error"]["param"] == "max_tokens"


def test_errors_are_the_official_clients(live: Live, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        complete(client, top_p=7)
    assert (bad.value.status_code, bad.value.param) == (400, "top_p")
    assert bad.value.type == "invalid_request_error"
    assert isinstance(bad.value.body, dict)
    with pytest.raises(openai.NotFoundError) as absent:
        client.completions.create(model="another", prompt="a")
    assert absent.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        complete(client, "word " * 3000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as unknown:
        complete(client, extra_body={"colour": "red"})
    assert (unknown.value.code, unknown.value.param) == ("unknown_parameter", "colour")


def test_cached_tokens_are_told_once_a_prompt(client: openai.OpenAI) -> None:
    ids = [5 + n % 50 for n in range(300)]
    complete(client, ids, max_tokens=1)
    usage = complete(client, ids, max_tokens=2, n=3, temperature=1).usage
    assert usage.prompt_tokens == 300
    assert usage.prompt_tokens_details.cached_tokens == 256


def test_only_the_first_of_an_answers_calls_is_told_where_asked_for() -> None:
    def invoke(name: str) -> str:
        return (
            f'<{DSML}invoke name="{name}">\n<{DSML}parameter name="x" string="true">y'
            f"</{DSML}parameter>\n</{DSML}invoke>\n"
        )

    text = f"\n\n<{DSML}tool_calls>\n{invoke('one')}{invoke('two')}</{DSML}tool_calls>"
    result = GenerationResult(
        text=text,
        token_ids=[1],
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=1, completion_tokens=1),
        speculation=SpeculationStats(),
        origins=[Origin("target")],
        prompt_token_ids=[1],
    )
    chunk = StreamChunk(
        index=0, text=text, token_ids=[1], origins=result.origins, pieces=[], result=result
    )
    for one_call, names in ((False, ["one", "two"]), (True, ["one"])):
        asked = Asked(kind="chat", model=None, params=SamplingParams(), one_call=one_call)

        def answer(asked: Asked = asked) -> ChatAnswer:
            parser = ChatParser(thinking=False)
            return ChatAnswer(index=0, asked=asked, prompt_ids=[1], tokenizer=None, parser=parser)

        calls = answer().whole(chunk)["message"]["tool_calls"]
        assert [call["function"]["name"] for call in calls] == names
        assert {call["function"]["arguments"] for call in calls} == {'{"x": "y"}'}
        streamed = answer().add(chunk)
        begun = [c["delta"]["tool_calls"][0] for c in streamed if "tool_calls" in c["delta"]]
        assert [call["function"]["name"] for call in begun if "id" in call] == names
        assert streamed[-1]["finish_reason"] == "tool_calls"


def test_negative_seeds_are_seeds(client: openai.OpenAI) -> None:
    one, same, other = (
        complete(client, temperature=1, seed=seed).choices[0].text for seed in (-5, -5, -6)
    )
    assert one == same != other


def test_prompts_as_ids_and_several(client: openai.OpenAI, llm: LLM, alone: list[str]) -> None:
    ids = llm.encode(PROMPTS[1])
    assert complete(client, ids).choices[0].text == alone[1]
    assert [c.text for c in complete(client, PROMPTS[:3]).choices] == alone[:3]
    both = complete(client, [ids, llm.encode(PROMPTS[2])])
    assert [choice.text for choice in both.choices] == alone[1:3]
    assert both.usage.prompt_tokens == len(ids) + len(llm.encode(PROMPTS[2]))


def test_echo(client: openai.OpenAI, alone: list[str]) -> None:
    assert complete(client, echo=True).choices[0].text == PROMPTS[0] + alone[0]
    chunks = list(complete(client, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPTS[0] + alone[0]
    nothing_new = complete(client, echo=True, max_tokens=0)
    assert nothing_new.choices[0].text == PROMPTS[0]
    assert nothing_new.usage.completion_tokens == 0


def test_logprobs_of_completions(client: openai.OpenAI, llm: LLM, listed: Any) -> None:
    choice = complete(client, logprobs=2, max_tokens=6).choices[0]
    assert choice.logprobs.token_logprobs == [one.logprob for one in listed.logprobs]
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset[:2] == [0, len(choice.logprobs.tokens[0])]
    assert [len(top) for top in choice.logprobs.top_logprobs] == [2] * 6
    chunks = list(complete(client, logprobs=2, max_tokens=6, stream=True))
    told = [p for chunk in chunks for p in chunk.choices[0].logprobs.token_logprobs]
    assert told == choice.logprobs.token_logprobs
    offsets = [p for chunk in chunks for p in chunk.choices[0].logprobs.text_offset]
    assert offsets == choice.logprobs.text_offset
    echoed = complete(client, logprobs=2, max_tokens=6, echo=True).choices[0]
    prompt = [None if one is None else one.logprob for one in listed.prompt_logprobs]
    assert echoed.logprobs.token_logprobs == prompt + told


def test_logprobs_of_chats(client: openai.OpenAI) -> None:
    choice = ask(client, logprobs=True, top_logprobs=3, max_tokens=5).choices[0]
    assert len(choice.logprobs.content) == 5
    for one in choice.logprobs.content:
        assert len(one.top_logprobs) == 3
        assert one.top_logprobs[0].logprob >= one.logprob
    stream = ask(client, logprobs=True, max_tokens=5, stream=True)
    told = [c.choices[0].logprobs for c in stream if c.choices[0].logprobs is not None]
    assert [one.logprob for part in told for one in part.content] == [
        one.logprob for one in choice.logprobs.content
    ]


def test_a_chat_is_the_librarys(client: openai.OpenAI, chatted: GenerationResult) -> None:
    choice = ask(client).choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == chatted.text
    assert choice.finish_reason == str(chatted.finish_reason)
    chunks = list(ask(client, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chatted.text
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason


def test_max_completion_tokens(client: openai.OpenAI) -> None:
    answer = ask(client, max_tokens=openai.omit, max_completion_tokens=3)
    assert answer.usage.completion_tokens == 3


def test_stop_strings(client: openai.OpenAI, alone: list[str]) -> None:
    stop = alone[0][10:13]
    choice = complete(client, stop=[stop, "never"]).choices[0]
    assert choice.text == alone[0].split(stop)[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    chunks = list(complete(client, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text


class Point(BaseModel):
    x: int
    label: bool


def test_structured_output(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model=NAME,
        messages=[{"role": "user", "content": "A point."}],
        response_format=Point,
        max_tokens=100,
        seed=0,
    )
    assert isinstance(parsed.choices[0].message.parsed, Point)
    shape: Any = {"type": "json_object"}
    answer = ask(client, response_format=shape, max_tokens=200, seed=3, temperature=1)
    choice = answer.choices[0]
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "lookup"}}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    more: dict[str, Any] = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 400}
    more |= {"parallel_tool_calls": False}
    if stream:
        name, arguments, ids, reasons = "", "", [], []
        for chunk in ask(client, stream=True, **more):
            reasons.append(chunk.choices[0].finish_reason)
            for call in chunk.choices[0].delta.tool_calls or []:
                assert call.index == 0
                ids += [call.id] if call.id else []
                name += call.function.name or ""
                arguments += call.function.arguments or ""
        assert len(ids) == 1
        reason = reasons[-1]
    else:
        message = ask(client, **more).choices[0]
        (call,) = message.message.tool_calls
        name, arguments, reason = call.function.name, call.function.arguments, message.finish_reason
    assert reason == "tool_calls"
    assert name == "lookup"
    given = json.loads(arguments)
    assert given["kind"] in ("a", "b")
    assert given["count"] <= 9


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begins", ["{", "\n\n<"])
def test_an_answer_with_tools_and_a_form_is_calls_or_has_the_form(
    client: openai.OpenAI, llm: LLM, begins: str, stream: bool
) -> None:
    assert llm.tokenizer is not None
    schema = Point.model_json_schema()
    first = llm.tokenizer.encode(begins, add_bos=False)[0]
    more: dict[str, Any] = {
        "tools": [TOOL],
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}},
        "logit_bias": {str(first): 100},
        "max_tokens": 300,
    }
    content, calls, reason = "", "", None
    if stream:
        for chunk in ask(client, stream=True, **more):
            choice = chunk.choices[0]
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                calls += call.function.arguments or ""
            reason = choice.finish_reason or reason
    else:
        choice = ask(client, **more).choices[0]
        reason, content = choice.finish_reason, choice.message.content or ""
        calls = "".join(call.function.arguments for call in choice.message.tool_calls or [])
    if begins == "{":
        assert (reason, calls) == ("stop", "")
        Point.model_validate_json(content)
    else:
        # Whether a second call follows the first is left to the model.
        assert reason in ("tool_calls", "length")
        assert not content.strip()
        assert calls.startswith('{"kind": ')


def test_tool_results_go_back(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "user", "content": "How many?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "lookup", "arguments": '{"kind": "a", "count": 2}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    answer = client.chat.completions.create(
        model=NAME,
        messages=messages,
        tools=[TOOL],
        max_tokens=4,  # type: ignore
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_reasoning_comes_apart(client: openai.OpenAI) -> None:
    answer = ask(client, reasoning_effort="low", extra_body={"max_reasoning_tokens": 3})
    message = answer.choices[0].message
    assert message.reasoning_content
    deltas = [
        chunk.choices[0].delta
        for chunk in ask(
            client,
            stream=True,
            extra_body={"max_reasoning_tokens": 3, "thinking": {"type": "enabled"}},
        )
    ]
    assert "".join(getattr(d, "reasoning_content", "") for d in deltas) == message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == message.content


def test_pieces_and_ids_are_told_where_asked_for(
    client: openai.OpenAI, llm: LLM, alone: list[str]
) -> None:
    body = {"return_pieces": True, "return_token_ids": True}
    answer = complete(client, extra_body=body)
    choice = answer.choices[0]
    assert "".join(piece["text"] for piece in choice.pieces) == alone[0]
    assert len(choice.pieces) == TOKENS
    told = sum(piece["position"] is not None for piece in choice.pieces)
    # The last block may be cut, behind the count.
    assert 0 <= answer.usage.speculation["accepted"] - told <= 3
    assert {"accepted", "corrected", "target"} <= {piece["origin"] for piece in choice.pieces}
    assert len(choice.token_ids) == TOKENS
    assert choice.prompt_token_ids == llm.encode(PROMPTS[0])
    chunks = list(complete(client, stream=True, extra_body=body))
    assert [i for chunk in chunks for i in chunk.choices[0].token_ids] == choice.token_ids
    assert [one for chunk in chunks for one in chunk.choices[0].pieces] == choice.pieces


def test_sixteen_streams_at_once_are_each_what_they_are_alone(
    live: Live, client: openai.OpenAI, alone: list[str]
) -> None:
    def streamed(prompt: str) -> str:
        return "".join(chunk.choices[0].text for chunk in complete(client, prompt, stream=True))

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(streamed, PROMPTS)) == alone


def test_ids_and_text(live: Live, llm: LLM) -> None:
    told = httpx.post(f"{live.url}/tokenize", json={"prompt": PROMPTS[7]}).json()
    assert told == {"tokens": llm.encode(PROMPTS[7]), "count": told["count"], "max_model_len": 512}
    assert told["count"] == len(told["tokens"])
    back = httpx.post(f"{live.url}/detokenize", json={"tokens": told["tokens"]}).json()
    assert back == {"prompt": PROMPTS[7]}
    bare = {"prompt": "x", "add_special_tokens": False}
    assert httpx.post(f"{live.url}/tokenize", json=bare).json()["count"] == 1


def test_the_log_and_the_metrics_count_a_request(live: Live, client: openai.OpenAI) -> None:
    before = live.metrics.counts.num_generated
    answer = complete(client, max_tokens=5)
    live.wait_idle()
    until(lambda: answer.id in live.log.getvalue())
    line = json.loads(live.log.getvalue().splitlines()[-1])
    assert (line["id"], line["outcome"], line["status"]) == (answer.id, "length", 200)
    assert (line["completion_tokens"], line["endpoint"]) == (5, "/v1/completions")
    assert 0 < line["ttft_seconds"] <= line["seconds"]
    until(lambda: live.metrics.counts.num_generated == before + 5)
    assert "paceline_generation_tokens_total" in httpx.get(f"{live.url}/metrics").text


def counters(live: Live) -> dict[str, float]:
    """The plain counters of /metrics."""
    lines = httpx.get(f"{live.url}/metrics").text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_that_is_cut_off_has_its_counts(
    live: Live, client: openai.OpenAI, n: int
) -> None:
    live.wait_idle()
    until(lambda: live.metrics.counts.num_running == 0)
    num_lines = len(live.log.getvalue().splitlines())
    before = counters(live)
    stream = complete(
        client, stream=True, max_tokens=400, n=n, temperature=1, extra_body={"ignore_eos": True}
    )
    for _ in range(8):
        next(stream)
    stream.close()
    live.wait_idle()
    until(lambda: len(live.log.getvalue().splitlines()) > num_lines)
    line = json.loads(live.log.getvalue().splitlines()[-1])
    assert (line["outcome"], line["finish_reason"]) == ("cancelled", None)
    assert line["drafted"] > line["accepted"] > 0

    def grown(name: str) -> float:
        return counters(live)[name] - before[name]

    until(lambda: live.metrics.counts.num_running == 0)
    until(lambda: grown("paceline_draft_tokens_total") == line["drafted"])
    assert grown("paceline_accepted_tokens_total") == line["accepted"]
    assert grown("paceline_draft_steps_total") * (line["mean_acceptance_length"] - 1) == (
        pytest.approx(line["accepted"], rel=1e-3)
    )


def test_health_and_document(live: Live) -> None:
    assert httpx.get(f"{live.url}/health").json() == {"status": "ok"}
    served = httpx.get(f"{live.url}/openapi.json").json()
    assert served == document()
    kept = Path(__file__).parents[2] / "docs" / "openapi.json"
    # It is written anew by: python -c "import json; from paceline.server.openapi import document;
    # print(json.dumps(document(), indent=2))" > docs/openapi.json
    assert kept.read_text() == json.dumps(served, indent=2) + "\n"


def test_an_echo_alone_has_no_token_of_the_answer(live: Live) -> None:
    body = {"prompt": "import os\n", "echo": True, "max_tokens": 0, "temperature": 0,
            "return_token_ids": True, "return_pieces": True}  # fmt: skip
    whole = httpx.post(f"{live.url}/v1/completions", json=body, timeout=20).json()
    (choice,) = whole["choices"]
    ids = live.llm.encode("import os\n")
    assert (choice["token_ids"], choice["pieces"]) == ([], [])
    assert choice["prompt_token_ids"] == ids
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body |= {"stream": True, "stream_options": options}
    said = httpx.post(f"{live.url}/v1/completions", json=body, timeout=20).text
    frames = [json.loads(part[6:]) for part in said.split("\n\n") if part.startswith("data: {")]
    assert {frame["usage"]["completion_tokens"] for frame in frames} == {0}
    choices = [one for frame in frames for one in frame["choices"]]
    assert "".join(one["text"] for one in choices) == choice["text"] == "import os\n"
    for name in ("token_ids", "pieces", "prompt_token_ids", "finish_reason", "stop_reason"):
        assert choices[-1][name] == choice[name]
    until(lambda: live.log.getvalue().splitlines()[-1].count(frames[0]["id"]) == 1)
    assert json.loads(live.log.getvalue().splitlines()[-1])["completion_tokens"] == 0


def test_a_developers_message_is_the_systems(client: openai.OpenAI) -> None:
    def answer(*first: Any) -> Any:
        return client.chat.completions.create(
            model=NAME,
            messages=[*first, {"role": "user", "content": "Define zebra"}],
            temperature=0,
            max_completion_tokens=20,
            extra_body={"return_token_ids": True},
        ).choices[0]

    said = "Say it in one word."
    system = answer({"role": "system", "content": said})
    developer = answer({"role": "developer", "content": said})
    assert developer.prompt_token_ids == system.prompt_token_ids != answer().prompt_token_ids
    assert developer.message.content == system.message.content


def test_an_answer_ends_at_the_context(live: Live, client: openai.OpenAI) -> None:
    answer = complete(client, max_tokens=10**6, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    # The last token is told and not run, so it needs no place.
    assert answer.usage.total_tokens == live.llm.max_seq_len
