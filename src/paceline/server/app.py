"""The door: routes, keys, limits, and streams to clients; holds no logic of the engine."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from time import monotonic, perf_counter, time
from typing import Any, TypeVar
from uuid import uuid4

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from paceline.sampling.grammar import Grammar, GrammarSpec
from paceline.server import protocol, replies
from paceline.server.engine_thread import Done, EngineThread, Job, Mailbox
from paceline.server.errors import ApiError
from paceline.server.logs import Outcome, RequestLog, RequestRecord
from paceline.server.metrics import ServerMetrics
from paceline.server.openapi import document
from paceline.server.protocol import Asked, Limits
from paceline.server.replies import ChatAnswer, CompletionAnswer
from paceline.text import ChatParser, ChatPrompt, ChatTemplate
from paceline.types import (
    FinishReason,
    GenerationError,
    GenerationResult,
    PacelineError,
    StreamChunk,
    StreamPiece,
)

__all__ = ["Settings", "create_app"]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_Answers = dict[tuple[int, int], CompletionAnswer | ChatAnswer]

_TEXT_THREADS = 2
_ABORT_SECONDS = 1.0
"""How long the record of a request that is cut off waits for the counts of its last step."""
_CLIENT_CLOSED = 499
"""What logs say of a client that went away before it was answered."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the door behaves.

    Attributes:
        name: what the model is called by clients.
        api_keys: keys one of which a client must have; empty: none is asked for.
        cors_origins: origins whose pages may ask; empty: none.
        max_body_bytes: largest body.
        body_seconds: longest time for a body to arrive.
        write_seconds: how long a reader may take nothing of a stream before it is given up.
        grammar_seconds: longest compilation of a grammar that is waited for.
    """

    name: str
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    body_seconds: float = 30.0
    write_seconds: float = 60.0
    grammar_seconds: float = 10.0


def create_app(
    engine: EngineThread,
    settings: Settings,
    *,
    metrics: ServerMetrics | None = None,
    log: RequestLog | None = None,
    pages: Sequence[BaseRoute] = (),
) -> Starlette:
    """Return the application; it starts the engine's thread and stops it.

    Args:
        engine: not started yet.
        settings: how the door behaves.
        metrics: what `/metrics` shows and requests are counted in.
        log: where each request has its line.
        pages: further routes, open to all.
    """
    door = _Door(engine, settings, metrics, log)
    routes: list[BaseRoute] = [
        # These two ask for the key themselves, since their record is to say so.
        door.route("/v1/completions", "POST", door.completions, is_open=True),
        door.route("/v1/chat/completions", "POST", door.chat, is_open=True),
        door.route("/v1/models", "GET", door.models),
        door.route("/v1/models/{model:path}", "GET", door.model),
        door.route("/tokenize", "POST", door.tokenize),
        door.route("/detokenize", "POST", door.detokenize),
        door.route("/metrics", "GET", door.metrics),
        door.route("/health", "GET", door.health, is_open=True),
        door.route("/openapi.json", "GET", door.openapi, is_open=True),
        *pages,
    ]
    middleware = []
    if settings.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type"],
            )
        )
    app = Starlette(
        routes=routes,
        middleware=middleware,
        lifespan=door.lifespan,
        exception_handlers={HTTPException: _not_routed},
    )
    app.router.redirect_slashes = False
    return app


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    message = f"unknown path: {path[:200]}"
    if error.status_code == 405:
        message = f"{path[:200]} does not take {method}"
    shown = ApiError(error.status_code, message, headers=dict(error.headers or {}))
    return JSONResponse(shown.to_dict(), status_code=shown.status, headers=shown.headers)


class _GoneError(Exception):
    """The client went away."""


class _Call:
    """One HTTP request and what was answered so far."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = Headers(scope=scope)
        self.path_params: Mapping[str, Any] = scope.get("path_params", {})
        self.started = False
        self._sending_since: float | None = None
        self._receive = receive
        self._send = send

    async def body(self, settings: Settings) -> bytes:
        """The body.

        Raises:
            ApiError: 413 where it is too large, 408 where it comes too slowly, 415 where it is
                said to be something else than JSON.
            _GoneError: the client went away.
        """
        kind = self.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"the content-type is {kind[:80]!r}; allowed is application/json")
        most = settings.max_body_bytes
        too_large = ApiError(
            413, f"the body is larger than {most} bytes", headers={"connection": "close"}
        )
        length = self.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > most:
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(settings.body_seconds):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    part = message.get("body", b"")
                    size += len(part)
                    if size > most:
                        raise too_large
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not come within {settings.body_seconds:g} s",
                headers={"connection": "close"},
            ) from None

    async def gone(self) -> None:
        """Return when the client has gone away; the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(
        self,
        body: bytes,
        *,
        status: int = 200,
        kind: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Answer as a whole."""
        self.started = True
        fields = {"content-type": kind, "content-length": str(len(body)), **(headers or {})}
        await self._send(_start(status, fields))
        await self._send({"type": "http.response.body", "body": body})

    async def reply_json(self, document: Mapping[str, Any]) -> None:
        """Answer with a JSON document."""
        await self.reply(_dumped(document))

    async def fail(self, error: ApiError) -> None:
        """Answer with an error, where nothing was answered yet."""
        if not self.started:
            await self.reply(_dumped(error.to_dict()), status=error.status, headers=error.headers)

    async def begin_stream(self) -> None:
        """Begin to answer in parts."""
        self.started = True
        fields = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        await self._send(_start(200, fields))

    async def send_part(self, data: bytes, *, last: bool = False) -> None:
        """Send a part of a stream; waits as long as the client does not take what was sent."""
        self._sending_since = monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self._sending_since = None

    def is_stuck(self, seconds: float) -> bool:
        """Whether the client has taken nothing for so long."""
        return self._sending_since is not None and monotonic() - self._sending_since > seconds


def _start(status: int, headers: Mapping[str, str]) -> dict[str, Any]:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}


_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _dumped(document: Mapping[str, Any]) -> bytes:
    return _JSON.encode(document).encode("utf-8", "backslashreplace")


def _event(document: Mapping[str, Any]) -> bytes:
    return b"data: " + _dumped(document) + b"\n\n"


_DONE = b"data: [DONE]\n\n"


@dataclass(kw_only=True)
class _Served:
    """A request to a model while it is served, and what its record will say.

    Attributes:
        results: of the answers that are over, by prompt and sample.
        cut: what was done for those that were cut off, or that their reader had not taken.
    """

    endpoint: str
    id: str
    arrived: float = field(default_factory=perf_counter)
    created: int = field(default_factory=lambda: int(time()))
    asked: Asked | None = None
    prompts: list[list[int]] = field(default_factory=list)
    first_token: float | None = None
    results: dict[tuple[int, int], GenerationResult] = field(default_factory=dict)
    cut: list[Done] = field(default_factory=list)
    num_partial: int = 0
    error: ApiError | None = None
    gone: bool = False

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def note(self, chunk: StreamChunk) -> None:
        if chunk.token_ids and self.first_token is None:
            self.first_token = perf_counter()
        self.num_partial += len(chunk.token_ids)
        if chunk.result is not None:
            self.results[chunk.index, chunk.sample_index] = chunk.result

    def record(self, *, started: bool) -> RequestRecord:
        now = perf_counter()
        results = [self.results[key] for key in sorted(self.results)]
        total = replies.summed(results)
        num_tokens = sum(len(result.token_ids) for result in results)
        if self.asked is not None and self.asked.only_echo:
            num_tokens = 0
        for done in self.cut:
            total.add(done.stats)
            num_tokens += done.num_tokens
        status = 200
        if not started and self.error is not None:
            status = self.error.status
        elif self.gone and not started:
            status = _CLIENT_CLOSED
        if self.gone:
            outcome = Outcome.CANCELLED
        elif self.error is not None:
            outcome = Outcome.of_status(self.error.status)
        else:
            outcome = Outcome.of([result.finish_reason for result in results])
        return RequestRecord(
            id=self.id,
            endpoint=self.endpoint,
            status=status,
            outcome=outcome,
            seconds=now - self.arrived,
            ttft_seconds=None if self.first_token is None else self.first_token - self.arrived,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=sum(one.usage.cached_tokens for one in results if one.sample_index == 0),
            completion_tokens=num_tokens,
            num_answers=1 if self.asked is None else self.asked.num_answers,
            finish_reasons=[str(one.finish_reason) for one in results],
            stream=self.asked is not None and self.asked.stream,
            speculation=total,
            error_type=None if self.error is None else self.error.code or self.error.kind,
        )


class _Door:
    def __init__(
        self,
        engine: EngineThread,
        settings: Settings,
        metrics: ServerMetrics | None,
        log: RequestLog | None,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._log = log
        self._keys = [sha256(key.encode()).digest() for key in settings.api_keys]
        self._created = int(time())
        llm = engine.llm
        self._llm = llm
        self._num_drafts = llm.num_drafts
        self._vocab_size = llm.config.vocab_size
        self._template = (
            None if llm.tokenizer is None else ChatTemplate.for_tokenizer(llm.tokenizer)
        )
        longest = 1
        if llm.tokenizer is not None:
            tokens = map(llm.tokenizer.token_bytes, range(self._vocab_size))
            longest = max(1, *map(len, tokens))
        self._limits = Limits(max_seq_len=llm.max_seq_len, bytes_per_token=longest)
        self._pool = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="paceline-text")
        self._openapi = document()

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self._engine.stop)
            self._pool.shutdown(wait=False, cancel_futures=True)

    def route(
        self,
        path: str,
        method: str,
        handler: Callable[[_Call], Awaitable[None]],
        *,
        is_open: bool = False,
    ) -> Route:
        name = path.replace(":path}", "}")
        endpoint = _Endpoint(self, handler, name, is_open=is_open)
        return Route(path, endpoint=endpoint, methods=[method])

    def unauthorized(self, endpoint: str) -> None:
        """Count a request that a route without a log line refused for its key."""
        if self._metrics is not None:
            outcome = Outcome.UNAUTHORIZED
            self._metrics.finished(
                RequestRecord(id="", endpoint=endpoint, status=401, outcome=outcome, seconds=0.0)
            )

    def check_key(self, call: _Call) -> None:
        """Compare what is given with every key, in a time that tells nothing of them.

        Raises:
            ApiError: 401.
        """
        if not self._keys:
            return
        scheme, _, given = call.headers.get("authorization", "").partition(" ")
        digest = sha256(given.strip().encode("latin-1")).digest()
        right = [hmac.compare_digest(digest, key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(right):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    # What is asked in a word

    async def models(self, call: _Call) -> None:
        await call.reply_json({"object": "list", "data": [self._model()]})

    async def model(self, call: _Call) -> None:
        self._check_model(call.path_params["model"])
        await call.reply_json(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._settings.name,
            "object": "model",
            "created": self._created,
            "owned_by": "paceline",
            "max_model_len": self._limits.max_seq_len,
        }

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._settings.name:
            raise ApiError(
                404,
                f"the model {name[:80]!r} does not exist; served is {self._settings.name!r}",
                param="model",
                code="model_not_found",
            )

    async def health(self, call: _Call) -> None:
        trouble = self._engine.trouble
        shown = {"status": "ok"} if trouble is None else {"status": "error", "reason": trouble}
        await call.reply(_dumped(shown), status=200 if trouble is None else 503)

    async def metrics(self, call: _Call) -> None:
        if self._metrics is None:
            raise ApiError(404, "this server keeps no metrics")
        body, kind = self._metrics.render()
        await call.reply(body, kind=kind)

    async def openapi(self, call: _Call) -> None:
        await call.reply_json(self._openapi)

    async def tokenize(self, call: _Call) -> None:
        body = protocol.read_json(await call.body(self._settings))
        given = protocol.refuse_unknown(body, protocol.TOKENIZE_FIELDS)
        text = given.get("prompt")
        if not isinstance(text, str) or not text:
            raise ApiError(400, "prompt must be a text, and not empty", param="prompt")
        self._check_model(protocol.model_of(given))
        protocol.check_text(text, self._limits, "prompt")
        encode = partial(
            self._llm.encode,
            text,
            add_bos=protocol.flag(given, "add_special_tokens", default=True),
            allow_special=protocol.flag(given, "allow_special"),
        )
        ids = await self._in_pool(encode)
        shown = {"tokens": ids, "count": len(ids), "max_model_len": self._limits.max_seq_len}
        await call.reply_json(shown)

    async def detokenize(self, call: _Call) -> None:
        body = protocol.read_json(await call.body(self._settings))
        given = protocol.refuse_unknown(body, protocol.DETOKENIZE_FIELDS)
        ids = given.get("tokens")
        self._check_model(protocol.model_of(given))
        most = self._vocab_size
        if not isinstance(ids, list) or not all(
            isinstance(token, int) and not isinstance(token, bool) and 0 <= token < most
            for token in ids
        ):
            raise ApiError(400, f"tokens must be a list of ids 0 to {most - 1}", param="tokens")
        tokenizer = self._llm.tokenizer
        if tokenizer is None:
            raise ApiError(400, "this model has no tokenizer", param="tokens")
        await call.reply_json({"prompt": await self._in_pool(partial(tokenizer.decode, ids))})

    # What the model answers

    async def completions(self, call: _Call) -> None:
        served = _Served(endpoint="/v1/completions", id=f"cmpl-{uuid4().hex}")
        await self._serve(call, served, protocol.read_completion)

    async def chat(self, call: _Call) -> None:
        served = _Served(endpoint="/v1/chat/completions", id=f"chatcmpl-{uuid4().hex}")
        await self._serve(call, served, protocol.read_chat)

    async def _serve(
        self,
        call: _Call,
        served: _Served,
        read: Callable[[Mapping[str, Any], Limits], Asked],
    ) -> None:
        try:
            await self._answer(call, served, read)
        except _GoneError:
            served.gone = True
            raise
        except asyncio.CancelledError:
            served.gone = True
            raise
        except Exception as error:
            served.error = _as_api_error(error)
            raise served.error from None
        finally:
            self._tell(served, started=call.started)

    def _tell(self, served: _Served, *, started: bool) -> None:
        record = served.record(started=started)
        if self._metrics is not None:
            self._metrics.finished(record)
        if self._log is not None:
            self._log.write(record)

    async def _answer(
        self,
        call: _Call,
        served: _Served,
        read: Callable[[Mapping[str, Any], Limits], Asked],
    ) -> None:
        self.check_key(call)
        asked = read(protocol.read_json(await call.body(self._settings)), self._limits)
        served.asked = asked
        self._check_model(asked.model)
        self._engine.check_room(asked.num_answers)
        prompts, chat = await self._in_pool(partial(self._prepare, asked))
        served.prompts = prompts
        grammar = None
        if asked.grammar is not None:
            grammar = await self._compiled(asked.grammar, param=asked.grammar_from)
        job = Job(
            prompts=prompts,
            params=asked.params,
            grammar=grammar,
            mailbox=Mailbox(asyncio.get_running_loop()),
        )
        answers = self._answers(asked, prompts, chat)
        self._engine.submit(job)
        try:
            give = self._streamed if asked.stream else self._whole
            await _while_connected(
                call, give(call, served, job, answers), self._settings.write_seconds
            )
        finally:
            if len(served.results) < len(answers):
                command = self._engine.abort(job)
                if job.num_open:
                    await _carried_out(command)
                served.cut = [
                    done for key, done in list(job.done.items()) if key not in served.results
                ]

    def _prepare(self, asked: Asked) -> tuple[list[list[int]], ChatPrompt | None]:
        """The prompts as ids; off the loop, since texts may be long."""
        if asked.kind == "completions":
            prompts = []
            for prompt in asked.prompts:
                try:
                    ids = self._llm.encode(
                        prompt, add_bos=asked.add_bos, allow_special=asked.allow_special
                    )
                except PacelineError as error:
                    raise ApiError(400, str(error), param="prompt") from None
                protocol.check_length(len(ids), self._limits, "prompt")
                prompts.append(ids)
            return prompts, None
        template, tokenizer = self._template, self._llm.tokenizer
        if template is None or tokenizer is None:
            raise ApiError(400, "this model has no tokenizer, which a chat needs")
        try:
            chat = template.render(
                asked.messages,
                thinking=asked.thinking,
                tools=asked.tools,
                response_format=asked.schema,
                reasoning_effort=protocol.effort_text(asked.effort, tuple(template.efforts)),
            )
        except ApiError:
            raise
        except PacelineError as error:
            param = "tools" if str(error).startswith("tools are") else "messages"
            if asked.thinking and not template.thinks:
                param = "thinking"
            raise ApiError(400, str(error), param=param) from None
        except (TypeError, AttributeError, KeyError, RecursionError) as error:
            message = f"the messages are not in OpenAI's form: {type(error).__name__}"
            raise ApiError(400, message, param="messages") from None
        protocol.check_text(chat.text, self._limits, "messages")
        try:
            ids = chat.ids(tokenizer, allow_special=asked.allow_special)
        except PacelineError as error:
            raise ApiError(400, str(error), param="messages") from None
        protocol.check_length(len(ids), self._limits, "messages")
        if chat.stop:
            stops = (*(asked.params.stop or ()), *chat.stop)
            asked.params = replace(asked.params, stop=stops)
        return [ids], chat

    async def _compiled(self, spec: GrammarSpec, *, param: str | None) -> Grammar:
        """The grammar, compiled on a thread of its own; nobody waits but who asks for it."""
        try:
            compiling = self._llm.grammar_compiler(spec).submit(spec)
        except PacelineError as error:
            raise ApiError(400, str(error), param=param) from None
        waiting = asyncio.wrap_future(compiling)
        waiting.add_done_callback(_looked_at)
        try:
            # Others may wait for the same, so it goes on where this one gives up.
            return await asyncio.wait_for(asyncio.shield(waiting), self._settings.grammar_seconds)
        except TimeoutError:
            raise ApiError(
                400,
                f"the {spec.kind} takes longer than {self._settings.grammar_seconds:g} s to "
                "compile; allowed are simpler ones",
                param=param,
            ) from None
        except PacelineError as error:
            raise ApiError(400, str(error), param=param) from None

    def _answers(self, asked: Asked, prompts: list[list[int]], chat: ChatPrompt | None) -> _Answers:
        answers: _Answers = {}
        tokenizer = self._llm.tokenizer
        for prompt, ids in enumerate(prompts):
            for sample in range(asked.params.n):
                index = len(answers)
                if chat is None:
                    answers[prompt, sample] = CompletionAnswer(
                        index=index, asked=asked, prompt_ids=ids, tokenizer=tokenizer
                    )
                else:
                    parser = ChatParser.of_prompt(chat, tools=asked.reads_tools)
                    answers[prompt, sample] = ChatAnswer(
                        index=index,
                        asked=asked,
                        prompt_ids=ids,
                        tokenizer=tokenizer,
                        parser=parser,
                    )
        return answers

    async def _whole(self, call: _Call, served: _Served, job: Job, answers: _Answers) -> None:
        if (refusal := await job.mailbox.accepted) is not None:
            raise refusal
        gathered: dict[tuple[int, int], list[StreamPiece]] = {key: [] for key in answers}
        last: dict[tuple[int, int], StreamChunk] = {}
        while len(last) < len(answers):
            for chunk in await job.mailbox.take():
                served.note(chunk)
                key = (chunk.index, chunk.sample_index)
                gathered[key] += chunk.pieces
                if chunk.result is None:
                    continue
                _check_failed(chunk.result)
                last[key] = replace(chunk, token_ids=chunk.result.token_ids, pieces=gathered[key])
        choices = [answer.whole(last[key]) for key, answer in answers.items()]
        body = {**self._head(served), "choices": choices, "usage": self._usage(served)}
        if (metrics := self._speculation(served)) is not None:
            body["metrics"] = metrics
        await call.reply_json(body)

    async def _streamed(self, call: _Call, served: _Served, job: Job, answers: _Answers) -> None:
        if (refusal := await job.mailbox.accepted) is not None:
            raise refusal
        asked = served.asked
        assert asked is not None
        head = self._head(served)

        is_plain = not (asked.continuous_usage or asked.include_usage)
        opening = b"data: " + _dumped(head)[:-1] + b',"choices":['
        closing = b"]}\n\n" if is_plain else b'],"usage":null}\n\n'

        def framed(choice: dict[str, Any]) -> bytes:
            if choice["finish_reason"] is None and not asked.continuous_usage:
                return opening + _dumped(choice) + closing
            frame = {**head, "choices": [choice]}
            if asked.continuous_usage:
                frame["usage"] = replies.usage_so_far(
                    prompt_tokens=served.prompt_tokens,
                    completion_tokens=0 if asked.only_echo else served.num_partial,
                )
            elif asked.include_usage:
                frame["usage"] = None
            if len(served.results) == len(answers) and choice["finish_reason"] is not None:
                metrics = None if asked.include_usage else self._speculation(served)
                if metrics is not None:
                    frame["metrics"] = metrics
            return _event(frame)

        await call.begin_stream()
        begun = [framed(choice) for answer in answers.values() for choice in answer.begin()]
        if begun:
            await call.send_part(b"".join(begun))
        while len(served.results) < len(answers):
            try:
                chunks = await job.mailbox.take()
            except Exception as error:
                served.error = _as_api_error(error)
                await call.send_part(_event(served.error.to_dict()) + _DONE, last=True)
                raise served.error from None
            frames: list[bytes] = []
            for chunk in chunks:
                served.note(chunk)
                answer = answers[chunk.index, chunk.sample_index]
                frames += map(framed, answer.add(chunk))
                result = chunk.result
                if result is not None and result.finish_reason is FinishReason.ERROR:
                    told = _as_api_error(GenerationError(result.error))
                    frames.append(_event(told.to_dict()))
                    served.error = served.error or told
            if frames:
                await call.send_part(b"".join(frames))
        end = _DONE
        if asked.include_usage:
            frame = {**head, "choices": [], "usage": self._usage(served)}
            if (metrics := self._speculation(served)) is not None:
                frame["metrics"] = metrics
            end = _event(frame) + end
        await call.send_part(end, last=True)

    def _head(self, served: _Served) -> dict[str, Any]:
        assert served.asked is not None
        kind = "text_completion"
        if served.asked.kind == "chat":
            kind = "chat.completion.chunk" if served.asked.stream else "chat.completion"
        return {
            "id": served.id,
            "object": kind,
            "created": served.created,
            "model": self._settings.name,
        }

    def _usage(self, served: _Served) -> dict[str, Any]:
        assert served.asked is not None
        results = list(served.results.values())
        return replies.usage_of(
            results,
            prompt_tokens=served.prompt_tokens,
            dropped=len(results) if served.asked.only_echo else 0,
        )

    def _speculation(self, served: _Served) -> dict[str, Any] | None:
        assert served.asked is not None
        asked = served.asked.params.num_drafts
        num_drafts = self._num_drafts if asked is None else asked
        return replies.metrics_of(
            list(served.results.values()),
            num_drafts=num_drafts if isinstance(num_drafts, int) else None,
        )

    async def _in_pool(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


class _Endpoint:
    """An ASGI application of one handler; what goes wrong is answered in OpenAI's shape."""

    def __init__(
        self,
        door: _Door,
        handler: Callable[[_Call], Awaitable[None]],
        name: str,
        *,
        is_open: bool,
    ) -> None:
        self._door = door
        self._handler = handler
        self._name = name
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = _Call(scope, receive, send)
        try:
            if not self._is_open:
                try:
                    self._door.check_key(call)
                except ApiError:
                    self._door.unauthorized(self._name)
                    raise
            await self._handler(call)
        except _GoneError:
            return
        except Exception as error:
            await call.fail(_as_api_error(error))


def _as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error; nothing of the server's insides."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, GenerationError):
        return ApiError(500, str(error), code="generation_failed")
    if isinstance(error, PacelineError):
        return ApiError(400, str(error), param=protocol.named(error))
    if isinstance(error, RecursionError):
        return ApiError(400, "the request nests too deep")
    _log.error("a request failed", exc_info=error)
    return ApiError(500, f"the server failed: {type(error).__name__}", code="internal_error")


def _check_failed(result: GenerationResult) -> None:
    if result.finish_reason is FinishReason.ERROR:
        raise GenerationError(result.error)


def _looked_at(future: asyncio.Future[Grammar]) -> None:
    """Take note of an error nobody waits for any more."""
    if not future.cancelled():
        future.exception()


async def _carried_out(command: Future[None]) -> None:
    """Wait until the engine's thread did something, unless it is stuck or over."""
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.wrap_future(command), _ABORT_SECONDS)


async def _while_connected(
    call: _Call, work: Coroutine[Any, Any, None], write_seconds: float
) -> None:
    """Do something unless the client goes away, or takes nothing of a stream for so long.

    Raises:
        _GoneError: it did; the work is cancelled.
    """
    doing = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(call.gone())
    try:
        # One clock for the whole stream: a timer for each part would cost more than the part.
        while not (doing.done() or gone.done() or call.is_stuck(write_seconds)):
            await asyncio.wait(
                {doing, gone}, timeout=write_seconds / 4, return_when=asyncio.FIRST_COMPLETED
            )
        if not doing.done():
            raise _GoneError
        doing.result()
    finally:
        for one in (doing, gone):
            one.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)
