"""``paceline chat``: talk to a model, loaded here or behind a server, from the terminal."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import typer

from paceline.cli import options, sampling
from paceline.cli.generate import Screen, summary
from paceline.cli.interrupts import Interrupts
from paceline.types import (
    MAX_NUM_DRAFTS,
    CheckpointError,
    ConfigError,
    FinishReason,
    GenerationError,
    GenerationResult,
    PacelineError,
    RequestError,
    SamplingParams,
    SpeculationStats,
)

if TYPE_CHECKING:
    from paceline.llm import LLM

__all__ = ["chat"]

_HELP = """\
/reset       forget the conversation; the system text stays
/drafts N    drafts a step from now on: 0 to 8, auto, or nothing for the default
/legend      what the tints mean
/help        this list
/exit        leave; so does the end of the input (Ctrl-D)
Ctrl-C stops an answer and keeps what came of it. A line that ends in \\ goes on with the next one;
one that begins with a space is sent even if a / follows. The arrow keys recall lines.
"""

_CONNECT_SECONDS = 10.0
_MOST_NAMES = 8


def chat(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Checkpoint folder; without, the bundled model. With --url, the model's name "
            "there; without, the first it lists.",
            show_default=False,
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Talk to a server with OpenAI's interface, such as http://127.0.0.1:8000.",
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="The server's key, or @FILE that holds it.", show_default=False
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Text before all, or @FILE.", show_default=False),
    ] = None,
    num_drafts: Annotated[
        str | None,
        typer.Option(
            "--num-drafts",
            "-k",
            help="Drafts per step, 0 to 8, or auto: as many as pay.",
            show_default="the model's or the server's",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Most tokens of an answer.")
    ] = 512,
    temperature: sampling.Temperature = 0.0,
    top_p: sampling.TopP = 1.0,
    top_k: sampling.TopK = 0,
    min_p: sampling.MinP = 0.0,
    repetition_penalty: sampling.RepetitionPenalty = 1.0,
    presence_penalty: sampling.PresencePenalty = 0.0,
    frequency_penalty: sampling.FrequencyPenalty = 0.0,
    seed: sampling.Seed = None,
    stop: sampling.Stops = None,
    acceptance: options.Acceptance = "invariant",
    drafter: options.Drafter = None,
    max_seq_len: options.MaxSeqLen = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    backend: options.Backend = "auto",
    num_threads: options.NumThreads = None,
) -> None:
    """Talk to a model, in turns. On a terminal, accepted drafts are tinted; /legend says how.

    Lines are questions, also from a pipe; answers go to standard output, all else to standard
    error. /help lists the commands.
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=stop or None,
        num_drafts=options.drafts(num_drafts),
    )
    opening = sampling.text_or_file(system)
    if url is None:
        if api_key is not None:
            raise ConfigError("--api-key is for a server; give --url too")
        with options.load_asked(context, model) as llm:
            loaded = _LoadedModel(llm)
            _Conversation(loaded, params, opening).run(model if model else "the bundled model")
        return
    _refuse_given(context, options.LOADING)
    key = sampling.text_or_file(api_key)
    served = _ServedModel(url, model, None if key is None else key.strip())
    _Conversation(served, params, opening).run(f"{served.model} at {url}")


def _refuse_given(context: typer.Context, names: tuple[str, ...]) -> None:
    given = [
        f"--{name.replace('_', '-')}"
        for name in names
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise ConfigError(
            f"{', '.join(given)} and --url are given; the first are for a model that is loaded here"
        )


class _Said(NamedTuple):
    """A piece of an answer; `origin` is an `Origin`'s kind, or None where nobody tells."""

    text: str
    origin: str | None = None
    is_reasoning: bool = False


@dataclass(kw_only=True)
class _Answer:
    """What is known of an answer while it comes."""

    content: list[str] = field(default_factory=list)
    num_tokens: int = 0
    num_cached: int = 0
    stats: SpeculationStats | None = None
    finish_reason: str | None = None


class _Pieces:
    """Tokens as the model wrote them, matched with the text that is made of them.

    Text may come later than its tokens, and the end-of-thinking marker is in no text.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, str | None]] = deque()

    def add(self, pieces: Iterable[tuple[str, str | None]]) -> None:
        """Take more tokens, each a text and the kind of its origin."""
        self._waiting.extend(pieces)

    def take(self, text: str, *, is_reasoning: bool) -> Iterator[_Said]:
        """The next text, cut where origins change; whole and of none where no tokens match."""
        from paceline.text.chat import END_THINK

        written = "".join([piece for piece, _ in self._waiting])
        if not written.startswith(text) and written.startswith(END_THINK + text):
            for _ in self._cut(len(END_THINK)):
                pass
        elif not written.startswith(text):
            self._waiting.clear()
            yield _Said(text, None, is_reasoning)
            return
        for piece, origin in self._cut(len(text)):
            yield _Said(piece, origin, is_reasoning)

    def _cut(self, length: int) -> Iterator[tuple[str, str | None]]:
        while length:
            piece, origin = self._waiting.popleft()
            if len(piece) > length:
                self._waiting.appendleft((piece[length:], origin))
                piece = piece[:length]
            if piece:
                yield piece, origin
            length -= len(piece)


class _Model(Protocol):
    def answer(
        self,
        messages: list[dict[str, str]],
        params: SamplingParams,
        answer: _Answer,
        interrupts: Interrupts,
    ) -> Generator[_Said, None, None]:
        """Answer a conversation; fills in `answer`, and ends the request when it is closed.

        Raises:
            GenerationError: the answer fails or breaks off.
            KeyboardInterrupt: of `interrupts`.
            RequestError: the conversation cannot be answered.
        """


class _LoadedModel:
    """A model in this process.

    Raises:
        CheckpointError: it has no tokenizer.
    """

    def __init__(self, llm: LLM) -> None:
        from paceline.text import ChatTemplate

        if llm.tokenizer is None:
            raise CheckpointError(f"{llm.path} has no tokenizer.json; a chat needs one")
        self._llm = llm
        self._tokenizer = llm.tokenizer
        self._template = ChatTemplate.for_tokenizer(llm.tokenizer)

    def answer(
        self,
        messages: list[dict[str, str]],
        params: SamplingParams,
        answer: _Answer,
        interrupts: Interrupts,
    ) -> Generator[_Said, None, None]:
        from paceline.text import ChatParser
        from paceline.text.parser import ContentDelta, ReasoningDelta

        prompt = self._template.render(messages)
        params = replace(params, stop=(*(params.stop or ()), *prompt.stop) or None)
        parser = ChatParser.of_prompt(prompt, tools=False)
        told = _Pieces()
        engine = self._llm.engine
        # A loop of its own and not `stream`, so that Ctrl-C is looked at after every step, also
        # while a long prompt is read.
        running = self._llm.begin(prompt.ids(self._tokenizer), params)
        try:
            while running:
                interrupts.check()
                for emission in engine.step():
                    chunk = running[emission.request_id].take(emission)
                    answer.num_tokens += len(chunk.token_ids)
                    if chunk.result is not None:
                        del running[emission.request_id]
                    told.add((text, origin.kind) for text, origin in chunk.pieces)
                    events = parser.feed(chunk.text)
                    if chunk.result is not None:
                        events += parser.flush()
                    for event in events:
                        if isinstance(event, (ContentDelta, ReasoningDelta)):
                            reasons = isinstance(event, ReasoningDelta)
                            yield from told.take(event.text, is_reasoning=reasons)
                    if chunk.result is not None:
                        _finish(answer, chunk.result)
        finally:
            for request_id in running:
                engine.abort(request_id)


def _finish(answer: _Answer, result: GenerationResult) -> None:
    if result.finish_reason is FinishReason.ERROR:
        raise GenerationError(result.error)
    answer.stats = result.speculation
    answer.num_cached = result.usage.cached_tokens
    answer.finish_reason = str(result.finish_reason)


class _ServedModel:
    """A model behind OpenAI's interface.

    Args:
        url: of the server, with or without "/v1".
        model: its name there, or None for the first that is listed.
        key: sent as a bearer token, or None.

    Raises:
        ConfigError: the URL is none.
        GenerationError: the server cannot be reached, or lists no model and none is named.
        RequestError: it lists models, and not the one that is named.
    """

    def __init__(self, url: str, model: str | None, key: str | None) -> None:
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"--url is {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not self._host or parts.query:
            raise ConfigError(f"--url is {url!r}; allowed is http:// or https:// and a host")
        self._url = url
        self._secure = parts.scheme == "https"
        path = parts.path.rstrip("/")
        self._base = path if path.endswith("/v1") else f"{path}/v1"
        self._headers = {"Accept": "text/event-stream, application/json"}
        if key is not None:
            if not key.isascii() or not key.isprintable() or not key:
                raise ConfigError("--api-key has characters that a header cannot have, or none")
            self._headers["Authorization"] = f"Bearer {key}"
        self._tells_drafts = False
        self.model = self._choose(model)

    def answer(
        self,
        messages: list[dict[str, str]],
        params: SamplingParams,
        answer: _Answer,
        interrupts: Interrupts,
    ) -> Generator[_Said, None, None]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": params.max_tokens,
            # A server's own default is not ours.
            "temperature": params.temperature,
        }
        plain = SamplingParams()
        for name in (
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "seed",
            "num_drafts",
        ):
            if getattr(params, name) != getattr(plain, name):
                body[name] = getattr(params, name)
        if params.stop:
            body["stop"] = list(params.stop)
        if self._tells_drafts:
            body["return_pieces"] = True
        with interrupts.ends():
            response = self._ask("POST", "/chat/completions", body)
        told = _Pieces()
        with response:
            events = self._events(response)
            while True:
                with interrupts.ends():
                    event = next(events, None)
                if event is None:
                    break
                try:
                    said = list(self._take(event, answer, told))
                except (AttributeError, TypeError, ValueError, KeyError):
                    raise self._no_form() from None
                yield from said
            if answer.finish_reason is None:
                raise GenerationError(f"{self._url} broke off in the middle of its answer")

    def _take(self, event: dict[str, Any], answer: _Answer, told: _Pieces) -> Iterator[_Said]:
        if event.get("error"):
            raise GenerationError(f"{self._url}: {_message(event)}")
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            # With the first choice of a chunk, also where its text is in others or comes later.
            told.add([(piece["text"], piece["origin"]) for piece in choice.get("pieces") or ()])
            for name in ("reasoning", "reasoning_content"):
                if delta.get(name):
                    yield from told.take(delta[name], is_reasoning=True)
                    break
            if delta.get("content"):
                yield from told.take(delta["content"], is_reasoning=False)
            if choice.get("finish_reason"):
                answer.finish_reason = choice["finish_reason"]
        usage = event.get("usage")
        if usage:
            answer.num_tokens = usage.get("completion_tokens", 0)
            details = usage.get("prompt_tokens_details") or {}
            answer.num_cached = details.get("cached_tokens") or 0
        drafting = (event.get("metrics") or {}).get("speculative_decoding")
        if drafting:
            answer.stats = SpeculationStats(
                num_draft_steps=drafting.get("num_spec_steps", 0),
                num_drafted=drafting.get("num_draft_tokens", 0),
                num_accepted=drafting.get("num_accepted_draft_tokens", 0),
            )

    def _choose(self, name: str | None) -> str:
        """The model to talk to; notes whether its server can tell what was drafted."""
        with self._ask("GET", "/models") as response:
            listed = self._json(response.read()).get("data") or []
        models = {
            one["id"]: one
            for one in listed
            if isinstance(one, dict) and isinstance(one.get("id"), str)
        }
        if name is None:
            if not models:
                raise GenerationError(f"{self._url} lists no model; name one")
            name = next(iter(models))
        elif models and name not in models:
            shown = ", ".join([*list(models)[:_MOST_NAMES], *["..."][: len(models) > _MOST_NAMES]])
            raise RequestError(f"{self._url} has no model {name!r}; it serves {shown}")
        # Others refuse a field they do not know.
        self._tells_drafts = models.get(name, {}).get("owned_by") == "paceline"
        return name

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> _Reply:
        kind = HTTPSConnection if self._secure else HTTPConnection
        assert self._host is not None
        connection = kind(self._host, self._port, timeout=_CONNECT_SECONDS)
        try:
            connection.connect()
            # An answer takes what it takes; Ctrl-C is there to end the wait.
            connection.sock.settimeout(None)
            headers = dict(self._headers)
            data = None
            if body is not None:
                headers["Content-Type"] = "application/json"
                data = json.dumps(body).encode()
            connection.request(method, self._base + path, data, headers)
            response = connection.getresponse()
            if response.status != 200:
                self._refused(response)
        except (OSError, HTTPException) as error:
            connection.close()
            raise GenerationError(f"{self._url} cannot be reached: {error}") from None
        except BaseException:
            connection.close()
            raise
        return _Reply(self._url, connection, response)

    def _refused(self, response: HTTPResponse) -> None:
        given = response.read(1 << 16)
        try:
            said = _message(json.loads(given))
        except ValueError:
            said = response.reason
        after = response.headers.get("Retry-After")
        if response.status == 429 and after:
            said += f" (try again in {after} s)"
        error = f"{self._url} answers {response.status}: {said}"
        # What a retry may cure, or the server's operator, is not the question's fault.
        wrong = 400 <= response.status < 500 and response.status not in (408, 429)
        raise RequestError(error) if wrong else GenerationError(error)

    def _events(self, response: _Reply) -> Iterator[dict[str, Any]]:
        data: list[str] = []
        for line in response.lines():
            if line:
                name, _, value = line.partition(":")
                if name == "data":
                    data.append(value.removeprefix(" "))
                continue
            text, data = "\n".join(data), []
            if text == "[DONE]":
                return
            if text:
                yield self._json(text)

    def _json(self, text: str | bytes) -> dict[str, Any]:
        try:
            read = json.loads(text)
        except ValueError:
            read = None
        if not isinstance(read, dict):
            raise self._no_form()
        return read

    def _no_form(self) -> GenerationError:
        return GenerationError(f"{self._url} does not answer in OpenAI's form")


class _Reply:
    """A response and its connection, closed together; that ends the request on the other side."""

    def __init__(self, url: str, connection: HTTPConnection, response: HTTPResponse) -> None:
        self._url = url
        self._connection = connection
        self._response = response

    def __enter__(self) -> _Reply:
        return self

    def __exit__(self, *error: object) -> None:
        self._response.close()
        self._connection.close()

    def read(self) -> bytes:
        try:
            return self._response.read()
        except (OSError, HTTPException) as error:
            raise self._lost(error) from None

    def lines(self) -> Iterator[str]:
        """Lines as they come, without their ends."""
        while True:
            try:
                line = self._response.readline()
            except (OSError, HTTPException) as error:
                raise self._lost(error) from None
            if not line:
                return
            yield line.decode("utf-8", "replace").rstrip("\r\n")

    def _lost(self, error: Exception) -> GenerationError:
        return GenerationError(f"{self._url} went away: {error}")


def _message(document: Any) -> str:
    """What an error document says, in OpenAI's form or another."""
    error = document.get("error", document) if isinstance(document, dict) else document
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error)


class _Conversation:
    """Turns, their history, and what the terminal shows of them."""

    def __init__(self, model: _Model, params: SamplingParams, system: str | None) -> None:
        self._model = model
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._interactive = sys.stdin.isatty()
        self._edits = self._interactive and sys.stdout.isatty()
        self._screen = Screen()
        self._interrupts = Interrupts()

    def run(self, name: str) -> None:
        """Read questions and answer them until the input ends.

        Raises:
            PacelineError: a question could not be answered and nobody is there to read of it;
                on a terminal it is shown, and the conversation goes on.
        """
        if self._edits:
            _edit_lines()
        if self._interactive:
            _note(f"{name}; /help lists commands, Ctrl-D leaves")
        with self._interrupts.held():
            while self._step():
                pass
            self._hear()

    def _step(self) -> bool:
        """Read a line and obey or answer it; whether the conversation goes on."""
        line = None
        try:
            line = self._read()
            return line is not None and self._handle(line)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            self._screen.end()
            _note("(Ctrl-D leaves)")
            self._interrupts.forget()
        except PacelineError as error:
            if not self._interactive:
                raise
            self._screen.end()
            _note(f"error: {error}")
            refused = isinstance(error, RequestError) and line and not line.startswith("/")
            if refused and len(self._messages) > len(self._opening):
                _note("(/reset forgets the conversation)")
        return True

    def _read(self) -> str | None:
        """The next question, or None at the end of the input."""
        lines: list[str] = []
        while True:
            try:
                line = self._read_line("... " if lines else "> ")
                if line is None:
                    return "\n".join(lines) if lines else None
            except EOFError:
                print()
                return None
            except UnicodeDecodeError as error:
                raise RequestError(f"the question is not UTF-8 text: {error}") from None
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _read_line(self, prompt: str) -> str | None:
        if self._edits:
            with self._interrupts.ends(restarts="readline" in sys.modules):
                return input(prompt)
        with self._interrupts.ends():
            if self._interactive:
                print(prompt, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
        return line.rstrip("\n") if line else None

    def _handle(self, line: str) -> bool:
        """Obey a command or answer a question; whether the conversation goes on."""
        if not line.strip():
            return True
        if not line.startswith("/"):
            self._turn(line.strip())
            return True
        command, _, argument = line.strip().partition(" ")
        if command in ("/exit", "/quit"):
            return False
        if command == "/reset":
            self._messages = list(self._opening)
            _note("the conversation is forgotten")
        elif command == "/drafts":
            given = argument.strip()
            try:
                asked = options.drafts(given or None)
                self._params = replace(self._params, num_drafts=asked)
            except (ConfigError, RequestError):
                raise RequestError(
                    f"/drafts takes 0 to {MAX_NUM_DRAFTS}, auto or nothing; {given!r} is given"
                ) from None
            _note(f"drafts a step: {'the default' if asked is None else asked}")
        elif command == "/legend":
            _note(self._screen.legend())
        elif command == "/help":
            _note(_HELP.rstrip("\n"))
        else:
            raise RequestError(f"{command} is no command; /help lists them")
        return True

    def _turn(self, question: str) -> None:
        """Ask, show the answer as it comes, and remember both.

        A question without any answer is forgotten, so that it may be asked again.
        """
        answer = _Answer()
        asked = [*self._messages, {"role": "user", "content": question}]
        started = first = time.perf_counter()
        heard = stopped = False
        try:
            with closing(
                self._model.answer(asked, self._params, answer, self._interrupts)
            ) as pieces:
                for piece in pieces:
                    if not heard:
                        heard, first = True, time.perf_counter()
                    if not piece.is_reasoning:
                        answer.content.append(piece.text)
                    with self._interrupts.ends():
                        self._screen.show(piece.text, piece.origin, dim=piece.is_reasoning)
                        sys.stdout.flush()
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            stopped = True
        finally:
            self._screen.end()
            content = "".join(answer.content)
            if content or answer.finish_reason is not None:
                self._messages = [*asked, {"role": "assistant", "content": content}]
        _note(_report(answer, time.perf_counter() - started, first - started, stopped=stopped))
        self._hear()
        self._interrupts.forget()

    def _hear(self) -> None:
        """Raise a Ctrl-C that came too late for an answer, where it is the program's end."""
        if not self._interactive:
            self._interrupts.check()


def _report(answer: _Answer, seconds: float, first: float, *, stopped: bool) -> str:
    if stopped:
        return f"(stopped after {seconds:.2f} s)"
    line = summary(answer.num_tokens, seconds, first, answer.stats or SpeculationStats())
    if answer.num_cached:
        line += f"; {answer.num_cached} tokens of the prompt were cached"
    if answer.finish_reason == "length":
        line += "; cut off, since it was as long as allowed"
    return f"({line})"


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _edit_lines() -> None:
    """Let lines be edited and recalled, where the platform can."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return
