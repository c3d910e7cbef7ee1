"""What clients may ask: request bodies read, checked and named.

Fields of `/v1/completions` and `/v1/chat/completions`. ``null`` means that a field is not given.

Served as OpenAI's service does: model, prompt, messages, max_tokens, max_completion_tokens,
temperature, top_p, n, stop, stream, stream_options (include_usage), seed, presence_penalty,
frequency_penalty, logit_bias, logprobs, top_logprobs, echo, tools, tool_choice,
parallel_tool_calls, response_format, reasoning_effort.

Served beyond that, under vLLM's names: top_k, min_p, repetition_penalty, min_tokens, ignore_eos,
stop_token_ids, include_stop_str_in_output, bad_words, allowed_token_ids, add_special_tokens,
return_token_ids, chat_template_kwargs (thinking), stream_options.continuous_usage_stats. Under
names of this server: num_drafts, json_schema, json_object, regex, grammar, choice,
max_reasoning_tokens, thinking, allow_special, return_pieces.

Taken and without effect, as at the official service, where they steer accounts, storage or speed
and never the answer: user, metadata, store, service_tier, safety_identifier, prompt_cache_key,
prompt_cache_retention, prompt_cache_options, prediction, stream_options.include_obfuscation.

All others are refused by name. Those that OpenAI's service knows and this one cannot serve may be
given the value that asks for nothing: best_of (that of n), suffix (empty), modalities (text only),
audio, functions, function_call, verbosity, web_search_options, moderation (not at all).

Within response_format, stream_options, tools, tool_choice, thinking and chat_template_kwargs the
same holds: what is not served is refused by name. A tool's function is said to the model with all
its fields, written anew as JSON.

Differences: `model` may be left out; `temperature` has no upper limit; without a limit a chat's
answer may fill the context; `max_tokens` is cut to the context.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from paceline.sampling.grammar import GrammarSpec
from paceline.server.errors import ApiError
from paceline.types import RequestError, SamplingParams, UnsupportedError

__all__ = [
    "CHAT_FIELDS",
    "COMPLETION_FIELDS",
    "DETOKENIZE_FIELDS",
    "EFFORTS",
    "IGNORED",
    "MAX_INTEGER",
    "NOT_SERVED",
    "TOKENIZE_FIELDS",
    "Asked",
    "Limits",
    "check_length",
    "check_text",
    "effort_text",
    "flag",
    "model_of",
    "named",
    "read_chat",
    "read_completion",
    "read_json",
    "refuse_unknown",
]

_PASSED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "allowed_token_ids",
    "bad_words",
    "n",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "json_schema",
    "json_object",
    "regex",
    "grammar",
    "choice",
    "max_reasoning_tokens",
    "num_drafts",
)
"""Fields that `SamplingParams` has under the same name and checks itself."""

_COMMON = frozenset(
    {
        *_PASSED,
        "model",
        "max_tokens",
        "seed",
        "logit_bias",
        "stream",
        "stream_options",
        "response_format",
        "allow_special",
        "return_token_ids",
        "return_pieces",
    }
)
COMPLETION_FIELDS = _COMMON | {"prompt", "echo", "logprobs", "add_special_tokens"}
"""What `/v1/completions` serves."""
CHAT_FIELDS = _COMMON | {
    "messages",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "thinking",
    "chat_template_kwargs",
}
"""What `/v1/chat/completions` serves."""
TOKENIZE_FIELDS = frozenset({"model", "prompt", "add_special_tokens", "allow_special"})
"""What `/tokenize` serves."""
DETOKENIZE_FIELDS = frozenset({"model", "tokens"})
"""What `/detokenize` serves."""
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "prediction",
    }
)
"""Taken without effect."""
NOT_SERVED = frozenset(
    {
        "best_of",
        "suffix",
        "modalities",
        "audio",
        "functions",
        "function_call",
        "verbosity",
        "web_search_options",
        "moderation",
    }
)
"""Of OpenAI's service, and refused here unless they ask for nothing."""
_STREAM_OPTIONS = frozenset({"include_usage", "include_obfuscation", "continuous_usage_stats"})

MAX_INTEGER = 2**63 - 1
"""Largest number without a fraction that is taken, but for seeds."""

DEFAULT_TEMPERATURE = 1.0
"""OpenAI's; the library's own default is greedy."""
DEFAULT_MAX_TOKENS = 16
"""OpenAI's, of completions."""

_EFFORTS_WITHOUT_TEXT = ("minimal", "low", "medium", "high", "xhigh")
EFFORTS = ("none", *_EFFORTS_WITHOUT_TEXT, "max")
"""Words for `reasoning_effort` that some layout or the official service has."""
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,18}")

_FORMS = ("json_schema", "json_object", "regex", "grammar", "choice", "response_format")
_SHAPE_KEYS = frozenset({"type", "json_schema"})
_SCHEMA_KEYS = frozenset({"name", "description", "schema", "strict"})
_TOOL_KEYS = frozenset({"type", "function"})
_CHOICE_KEYS = frozenset({"type", "function"})
_THINKING_KEYS = frozenset({"type"})
_TEMPLATE_KEYS = frozenset({"thinking", "enable_thinking"})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Most of what one request may hold.

    Attributes:
        max_seq_len: tokens, prompt and answer.
        bytes_per_token: of the longest token, so that a text that cannot fit is not even cut up.
        stops: stop strings.
        stop_chars: characters of all stop strings.
        prompts: prompts of one request.
        answers: answers to one prompt.
        tools: tools offered.
        messages: messages of a conversation.
    """

    max_seq_len: int
    bytes_per_token: int
    stops: int = 64
    stop_chars: int = 8192
    prompts: int = 128
    answers: int = 128
    tools: int = 128
    messages: int = 4096


@dataclass(kw_only=True)
class Asked:
    """A request body as it was understood.

    Attributes:
        kind: which endpoint.
        model: the name asked for, or None.
        params: how answers are decoded; the stop strings of a chat's layout come to it later.
        grammar: what answers follow, or None.
        grammar_from: the field that `grammar` comes from.
        prompts: texts or ids, of completions.
        messages: the conversation, of chats.
        stream: whether the answer is streamed.
        include_usage: whether a stream ends with its usage.
        continuous_usage: whether each of its chunks has it.
        echo: whether the prompt comes before the answer.
        only_echo: no token is wanted; one is made all the same and dropped.
        add_bos: whether texts begin with the begin-of-sequence token.
        allow_special: whether markers spelled in texts count as such.
        return_token_ids: whether ids are told.
        return_pieces: whether text is told with what was drafted.
        thinking: whether a chat's answer begins with reasoning.
        effort: how much of it, where the layout has a text for that.
        tools: offered to the model.
        reads_tools: whether calls are looked for in the answer.
        one_call: whether only the first of an answer's calls is told.
        schema: of the answer, for the prompt.
    """

    kind: Literal["completions", "chat"]
    model: str | None
    params: SamplingParams
    grammar: GrammarSpec | None = None
    grammar_from: str | None = None
    prompts: list[str | list[int]] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    only_echo: bool = False
    add_bos: bool = True
    allow_special: bool = False
    return_token_ids: bool = False
    return_pieces: bool = False
    thinking: bool = False
    effort: str | None = None
    tools: list[Any] = field(default_factory=list)
    reads_tools: bool = False
    one_call: bool = False
    schema: Mapping[str, Any] | None = None

    @property
    def num_answers(self) -> int:
        """Answers to all prompts."""
        return self.params.n * max(1, len(self.prompts))


def read_json(body: bytes) -> dict[str, Any]:
    """Read a body.

    Raises:
        ApiError: 400, it is no JSON object.
    """

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    try:
        given = json.loads(body, parse_constant=refuse, parse_float=_number)
    except RecursionError:
        raise ApiError(400, "the body nests too deep", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(given, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return given


def _number(text: str) -> float | int:
    """A number with a point or an exponent; JSON does not tell 2.0 from 2."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= MAX_INTEGER else value


def refuse_unknown(body: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Return the fields that are given.

    Raises:
        ApiError: 400, one is not known or not served; names it.
    """
    for name, value in body.items():
        if name in known or name in IGNORED:
            continue
        if name in NOT_SERVED:
            neutral = {"best_of": body.get("n") or 1, "suffix": "", "modalities": ["text"]}
            if value is None or (value == neutral.get(name) and not isinstance(value, bool)):
                continue
            raise ApiError(
                400,
                f"{name} is not served by this server",
                param=name,
                code="unsupported_parameter",
            )
        raise _unknown(name[:80])
    return {name: value for name, value in body.items() if value is not None and name in known}


def read_completion(body: Mapping[str, Any], limits: Limits) -> Asked:
    """Read the body of a completion.

    Raises:
        ApiError: 400, with the field that is wrong.
    """
    given = refuse_unknown(body, COMPLETION_FIELDS)
    echo = flag(given, "echo")
    logprobs = given.get("logprobs")
    max_tokens = given.get("max_tokens", DEFAULT_MAX_TOKENS)
    only_echo = echo and max_tokens == 0 and not isinstance(max_tokens, bool)
    schema, _ = _shape(given)
    params = _params(
        given,
        limits,
        max_tokens=1 if only_echo else max_tokens,
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
        **schema,
    )
    asked = Asked(
        kind="completions",
        params=params,
        grammar=_spec(params, given),
        grammar_from=_form_field(given),
        prompts=_prompts(given, limits),
        echo=echo,
        only_echo=only_echo,
        add_bos=flag(given, "add_special_tokens", default=True),
        **_common(given),
    )
    if asked.stream and echo and logprobs is not None:
        raise ApiError(
            400, "echo with logprobs is not streamed; allowed is stream=false", param="stream"
        )
    return asked


def read_chat(body: Mapping[str, Any], limits: Limits) -> Asked:
    """Read the body of a chat completion.

    Raises:
        ApiError: 400, with the field that is wrong.
    """
    given = refuse_unknown(body, CHAT_FIELDS)
    messages = given.get("messages")
    if not isinstance(messages, list) or not 1 <= len(messages) <= limits.messages:
        raise ApiError(
            400, f"messages must be a list of 1 to {limits.messages} messages", param="messages"
        )
    max_tokens = given.get("max_tokens")
    newer = given.get("max_completion_tokens", max_tokens)
    if max_tokens is not None and newer != max_tokens:
        raise ApiError(
            400,
            f"max_tokens is {max_tokens!r} and max_completion_tokens {newer!r}; give one of them",
            param="max_tokens",
        )
    wants = flag(given, "logprobs")
    if "top_logprobs" in given and not wants:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    shape, schema = _shape(given)
    params = _params(
        given,
        limits,
        max_tokens=limits.max_seq_len if newer is None else newer,
        logprobs=given.get("top_logprobs", 0) if wants else None,
        called={
            "logprobs": "top_logprobs",
            **({"max_tokens": "max_completion_tokens"} if max_tokens is None else {}),
        },
        **shape,
    )
    form = _spec(params, given)
    tools, calls = _tools(given, limits, form)
    only_calls = calls is not None and (form is None or given.get("tool_choice", "auto") != "auto")
    thinking, effort = _thinking(given)
    return Asked(
        kind="chat",
        params=params,
        grammar=calls or form,
        grammar_from="tools" if only_calls else _form_field(given),
        messages=_messages(messages),
        thinking=thinking,
        effort=effort,
        tools=tools,
        reads_tools=bool(tools),
        one_call=not flag(given, "parallel_tool_calls", default=True),
        schema=schema,
        **_common(given),
    )


def _messages(given: list[Any]) -> list[Any]:
    """The messages with `developer`, OpenAI's newer word for `system`, as that."""
    return [
        {**message, "role": "system"}
        if isinstance(message, dict) and message.get("role") == "developer"
        else message
        for message in given
    ]


def _common(given: dict[str, Any]) -> dict[str, Any]:
    stream = flag(given, "stream")
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise ApiError(400, "stream_options must be an object", param="stream_options")
    if options and not stream:
        raise ApiError(400, "stream_options needs stream=true", param="stream_options")
    _check_keys(options, _STREAM_OPTIONS, "stream_options")
    return {
        "model": model_of(given),
        "stream": stream,
        "include_usage": flag(options, "include_usage", within="stream_options"),
        "continuous_usage": flag(options, "continuous_usage_stats", within="stream_options"),
        "allow_special": flag(given, "allow_special"),
        "return_token_ids": flag(given, "return_token_ids"),
        "return_pieces": flag(given, "return_pieces"),
    }


def model_of(given: Mapping[str, Any]) -> str | None:
    """The model asked for.

    Raises:
        ApiError: 400, it is no string.
    """
    model = given.get("model")
    if model is not None and not isinstance(model, str):
        raise ApiError(400, "model must be a string", param="model")
    return model


def flag(
    given: Mapping[str, Any], name: str, *, default: bool = False, within: str | None = None
) -> bool:
    """A field that is true or false.

    Args:
        given: what has the field.
        name: of the field.
        default: where it is not given.
        within: what `given` is, where it is not the body.

    Raises:
        ApiError: 400, it is neither.
    """
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        where = name if within is None else f"{within}.{name}"
        raise ApiError(400, f"{where} is {value!r:.80}; allowed is true or false", param=where)
    return value


def _check_keys(given: Mapping[str, Any], known: frozenset[str], within: str) -> None:
    """Refuse by name what a field has beyond what is served of it; null is not given."""
    for name, value in given.items():
        if name not in known and value is not None:
            raise _unknown(f"{within}.{name[:80]}")


def _unknown(name: str) -> ApiError:
    message = f"unrecognized request argument supplied: {name}"
    return ApiError(400, message, param=name, code="unknown_parameter")


def _params(
    given: dict[str, Any],
    limits: Limits,
    *,
    called: Mapping[str, str] | None = None,
    **more: Any,
) -> SamplingParams:
    """Parameters of a body; `called` is what the body calls those that it has by other names."""
    _check_stops(given.get("stop"), limits)
    for name in ("bad_words", "choice"):
        words = given.get(name)
        if isinstance(words, list) and len(words) > limits.stops:
            raise ApiError(
                400, f"{name} has {len(words)} texts; allowed are {limits.stops}", param=name
            )
    count = given.get("n", 1)
    if isinstance(count, int) and count > limits.answers:
        raise ApiError(400, f"n is {count}; allowed is at most {limits.answers}", param="n")
    seed = given.get("seed")
    if isinstance(seed, int) and not isinstance(seed, bool) and -(2**63) <= seed < 0:
        # OpenAI's seeds have a sign.
        seed += 2**64
    for name, value in given.items():
        if name != "seed" and isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise ApiError(400, f"{name} has more than 63 bits", param=name)
    values = {
        "temperature": DEFAULT_TEMPERATURE,
        **{name: given[name] for name in _PASSED if name in given},
        "seed": seed,
        "logit_bias": _biases(given.get("logit_bias")),
        **more,
    }
    try:
        return SamplingParams(**values)
    except (RequestError, UnsupportedError) as error:
        message = str(error)
        param = named(error)
        if param is not None and called is not None and param in called:
            message = called[param] + message.removeprefix(param)
            param = called[param]
        raise ApiError(400, message, param=param) from None
    except OverflowError:
        raise ApiError(400, "a number is too large for a float") from None


_PARAM_NAMES = frozenset(known.name for known in fields(SamplingParams))


def named(error: Exception) -> str | None:
    """The field that a message begins with, or None."""
    if str(error).startswith("the prompt "):
        return "prompt"
    word = str(error).split("[")[0].split(" ")[0]
    return word if word in _PARAM_NAMES else None


def _check_stops(stop: object, limits: Limits) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list):
        return
    if len(stops) > limits.stops:
        raise ApiError(
            400, f"{len(stops)} stop strings are given; allowed are {limits.stops}", param="stop"
        )
    length = sum(len(text) for text in stops if isinstance(text, str))
    if length > limits.stop_chars:
        raise ApiError(
            400,
            f"the stop strings have {length} characters; allowed are {limits.stop_chars} together",
            param="stop",
        )


def _biases(given: object) -> dict[int, Any] | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ApiError(400, "logit_bias must be an object of ids and numbers", param="logit_bias")
    if not all(map(_TOKEN_ID.fullmatch, given)):
        raise ApiError(400, "logit_bias has a key that is no token id", param="logit_bias")
    return {int(token): bias for token, bias in given.items()}


def _spec(params: SamplingParams, given: Mapping[str, Any]) -> GrammarSpec | None:
    try:
        return GrammarSpec.of(params)
    except RequestError as error:
        raise ApiError(400, str(error), param=_form_field(given)) from None


def _form_field(given: Mapping[str, Any]) -> str | None:
    """The field that says what form the answer has."""
    return next((name for name in _FORMS if given.get(name)), None)


def _prompts(given: dict[str, Any], limits: Limits) -> list[str | list[int]]:
    prompt = given.get("prompt")
    if isinstance(prompt, str):
        return [_checked(prompt, limits)]
    if not isinstance(prompt, list) or not prompt:
        raise ApiError(
            400,
            "prompt must be a text, a list of token ids, or a list of either, and not empty",
            param="prompt",
        )
    if isinstance(prompt[0], int):
        return [_checked(prompt, limits)]
    if len(prompt) > limits.prompts:
        raise ApiError(
            400, f"{len(prompt)} prompts are given; allowed are {limits.prompts}", param="prompt"
        )
    return [_checked(one, limits) for one in prompt]


def _checked(prompt: object, limits: Limits) -> str | list[int]:
    if isinstance(prompt, str):
        if not prompt:
            raise ApiError(400, "a prompt is empty", param="prompt")
        check_text(prompt, limits, "prompt")
        return prompt
    if not isinstance(prompt, list) or not all(
        isinstance(token, int) and not isinstance(token, bool) for token in prompt
    ):
        raise ApiError(400, "a prompt is neither a text nor a list of token ids", param="prompt")
    check_length(len(prompt), limits, "prompt")
    return prompt


def check_text(text: str, limits: Limits, param: str) -> None:
    """Refuse a text that has too many tokens however it is cut.

    Raises:
        ApiError: 400.
    """
    most = limits.max_seq_len * limits.bytes_per_token
    if len(text) > most:
        check_length(len(text) // limits.bytes_per_token, limits, param, is_least=True)


def check_length(num_tokens: int, limits: Limits, param: str, *, is_least: bool = False) -> None:
    """Refuse a prompt that leaves no room for an answer.

    Args:
        num_tokens: it has; where `is_least`, it may have more.
        limits: of this server.
        param: the field it comes from, "prompt" or "messages".
        is_least: whether the tokens were not counted.

    Raises:
        ApiError: 400.
    """
    if num_tokens >= limits.max_seq_len:
        raise ApiError(
            400,
            f"the {param} {'have' if param == 'messages' else 'has'} "
            f"{'at least ' if is_least else ''}{num_tokens} tokens; the model's context is "
            f"{limits.max_seq_len} and one is for the answer, so that {limits.max_seq_len - 1} "
            "are allowed",
            param=param,
            code="context_length_exceeded",
        )


def _shape(given: dict[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """What `response_format` says: fields of the parameters, and the schema for the prompt."""
    shape = given.get("response_format")
    if shape is None:
        return {}, None
    kind = shape.get("type") if isinstance(shape, dict) else None
    if isinstance(shape, dict):
        known = _SHAPE_KEYS if kind == "json_schema" else _SHAPE_KEYS - {"json_schema"}
        _check_keys(shape, known, "response_format")
    if kind == "text":
        return {}, None
    for name in ("json_schema", "json_object"):
        if name in given:
            raise ApiError(
                400, f"{name} is given beside response_format; allowed is one of them", param=name
            )
    if kind == "json_object":
        return {"json_object": True}, None
    if kind != "json_schema":
        raise ApiError(
            400,
            "response_format.type must be 'text', 'json_object' or 'json_schema'",
            param="response_format",
        )
    named = shape.get("json_schema")
    schema = None
    if isinstance(named, dict):
        _check_keys(named, _SCHEMA_KEYS, "response_format.json_schema")
        flag(named, "strict", within="response_format.json_schema")
        schema = named.get("schema")
    if not isinstance(schema, dict):
        raise ApiError(
            400,
            "response_format.json_schema.schema must be a JSON schema",
            param="response_format",
        )
    return {"json_schema": schema}, schema


def _tools(
    given: dict[str, Any], limits: Limits, form: GrammarSpec | None
) -> tuple[list[Any], GrammarSpec | None]:
    """The tools the model is told of, and the grammar of its calls, or None.

    With a form the answer is calls or has it; where calls must come the form is of no effect.
    """
    tools = given.get("tools", [])
    if not isinstance(tools, list) or len(tools) > limits.tools:
        raise ApiError(
            400, f"tools must be a list of at most {limits.tools} functions", param="tools"
        )
    for number, tool in enumerate(tools):
        _check_tool(tool, f"tools[{number}]")
    choice = given.get("tool_choice", "auto" if tools else "none")
    named = _tool_named(choice)
    if choice not in ("none", "auto", "required") and named is None:
        raise ApiError(
            400,
            "tool_choice must be 'none', 'auto', 'required', or a function by its name",
            param="tool_choice",
        )
    if not tools and choice == "none":
        return [], None
    if not tools:
        raise ApiError(400, "tool_choice is given without tools", param="tool_choice")
    try:
        whole = GrammarSpec.tool_calls(tools, at_once=choice == "required")
        if named is not None:
            chosen = [tool for tool in tools if tool["function"]["name"] == named]
            if not chosen:
                raise ApiError(
                    400, f"tool_choice names {named!r:.80}, which is no tool", param="tool_choice"
                )
            if form is not None:
                _either(tools, form)
            return tools, GrammarSpec.tool_calls(chosen, at_once=True)
    except RequestError as error:
        raise ApiError(400, str(error), param="tools") from None
    if choice == "none":
        return [], None
    either = None if form is None else _either(tools, form)
    if either is not None and choice == "auto":
        return tools, either
    strict = any(tool["function"].get("strict") is True for tool in tools)
    return tools, whole if choice == "required" or strict else None


def _either(tools: list[Any], form: GrammarSpec) -> GrammarSpec:
    try:
        return GrammarSpec.tool_calls(tools, form=form)
    except RequestError as error:
        raise ApiError(400, str(error), param=form.kind) from None


def _check_tool(tool: object, where: str) -> None:
    """What is not said to the model and would otherwise have no effect; the rest is its grammar's.

    Raises:
        ApiError: 400.
    """
    if not isinstance(tool, dict):
        return
    kind = tool.get("type", "function")
    if kind != "function":
        raise ApiError(
            400, f"{where}.type is {kind!r:.80}; allowed is 'function'", param=f"{where}.type"
        )
    _check_keys(tool, _TOOL_KEYS, where)
    function = tool.get("function")
    if isinstance(function, dict):
        flag(function, "strict", within=f"{where}.function")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise ApiError(
                400,
                f"{where}.function.parameters is {parameters!r:.80}; allowed is a JSON schema",
                param=f"{where}.function.parameters",
            )


def _tool_named(choice: object) -> str | None:
    if not isinstance(choice, dict) or choice.get("type", "function") != "function":
        return None
    _check_keys(choice, _CHOICE_KEYS, "tool_choice")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _thinking(given: dict[str, Any]) -> tuple[bool, str | None]:
    """Whether the answer begins with reasoning, and the effort that is left to the layout."""
    effort = given.get("reasoning_effort")
    if effort is not None and not isinstance(effort, str):
        raise ApiError(400, "reasoning_effort must be a string", param="reasoning_effort")
    thinking: object = given.get("thinking")
    if isinstance(thinking, dict):
        _check_keys(thinking, _THINKING_KEYS, "thinking")
        kind = thinking.get("type")
        thinking = kind == "enabled" if kind in ("enabled", "disabled") else thinking
    options = given.get("chat_template_kwargs", {})
    if not isinstance(options, dict):
        raise ApiError(400, "chat_template_kwargs must be an object", param="chat_template_kwargs")
    _check_keys(options, _TEMPLATE_KEYS, "chat_template_kwargs")
    said = [thinking, *(options.get(name) for name in sorted(_TEMPLATE_KEYS))]
    said = [one for one in said if one is not None]
    if not all(isinstance(one, bool) for one in said):
        raise ApiError(400, "thinking must be true or false", param="thinking")
    if len(set(said)) > 1:
        raise ApiError(400, "thinking is given as true and as false", param="thinking")
    if said and said[0] and effort == "none":
        raise ApiError(
            400,
            "reasoning_effort is 'none' and thinking true; allowed is one of them",
            param="reasoning_effort",
        )
    wants = bool(said[0]) if said else effort not in (None, "none")
    return wants, None if effort == "none" else effort


def effort_text(effort: str | None, served: Sequence[str]) -> str | None:
    """The effort as a layout has it; OpenAI's other words are taken, without a text of their own.

    Raises:
        ApiError: 400, the word is unknown.
    """
    if effort is None or effort in served:
        return effort
    if effort in _EFFORTS_WITHOUT_TEXT:
        return None
    allowed = ", ".join(dict.fromkeys(("none", *_EFFORTS_WITHOUT_TEXT, *served)))
    raise ApiError(
        400,
        f"reasoning_effort is {effort[:80]!r}; allowed are {allowed}",
        param="reasoning_effort",
    )
