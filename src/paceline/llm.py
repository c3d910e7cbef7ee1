"""The public door: text in, text out."""

from __future__ import annotations

import inspect
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Self, get_args

import torch

from paceline import bundled_model_path
from paceline.config import ModelConfig
from paceline.draft import CombinedProposer, DeepseekV4MtpHead, DraftProposer, NgramProposer
from paceline.engine import Emission, Engine
from paceline.engine.engine import AUTO, Acceptance, LogprobsMode
from paceline.engine.graphs import CudaCapture
from paceline.engine.reasoning import BudgetedCursor
from paceline.models.deepseek_v4.build import Built, build
from paceline.models.deepseek_v4.checkpoint import Checkpoint, load_weights
from paceline.sampling.grammar import AfterMarker, Grammar, GrammarCursor, GrammarSpec
from paceline.sampling.grammar_compiler import GrammarCompiler
from paceline.sampling.noise import fresh_seed
from paceline.text import Detokenizer, ReasoningBudget, StopMatcher, StopStrings, Tokenizer
from paceline.text.chat import END_THINK, THINK
from paceline.types import (
    MAX_NUM_DRAFTS,
    CheckpointError,
    ConfigError,
    FinishReason,
    GenerationError,
    GenerationResult,
    Origin,
    RequestError,
    SamplingParams,
    StreamChunk,
    StreamPiece,
    TokenLogprob,
    Usage,
)

__all__ = ["LLM", "Answer", "Prompt", "ProposerContext"]

Prompt = str | list[int]
"""One prompt: text, or the ids it stands for."""

Drafter = Literal["mtp", "ngram", "mtp+ngram"]
"""The package's own drafters, by name."""

LOOKUP_BESIDE_HEAD = 6
"""Tokens that must come again before a lookup drafts in the head's place.

With fewer, steps of the bundled model gave fewer tokens than with the head alone; with more,
matches were rare.
"""

DEFAULT_NUM_DRAFTS = 3
DEFAULT_MAX_SEQ_LEN = 4096
DEFAULT_PREFIX_CACHE_BYTES = 256 << 20

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True, kw_only=True)
class ProposerContext:
    """What a factory of proposers is told.

    Attributes:
        config: the target's shapes.
        built: the target's parts: embedding, head, and the MTP block where the checkpoint has one.
        max_seq_len: most tokens of a sequence.
        max_num_seqs: sequences at once.
        special_ids: ids of special tokens, which a drafter over a part of the vocabulary keeps.
    """

    config: ModelConfig
    built: Built
    max_seq_len: int
    max_num_seqs: int
    special_ids: tuple[int, ...] = ()


ProposerFactory = Callable[[ProposerContext], DraftProposer[Any]]


class LLM:
    """A model that completes prompts, by default drafting with its own MTP head.

    Drafts change how fast tokens come, never which: at any temperature and with every parameter
    tokens are those of `num_drafts=0` (other values of `acceptance` aside).
    Not for use from several threads at once; two of them in one process do not touch each other.

    Args:
        model: checkpoint folder; None takes the one that ships with the package.
        num_drafts: drafts per step, 0 to 8, for requests that do not say, or "auto": as many as pay
            by what is measured while it runs, possibly none. None: 3 where the checkpoint has an
            MTP head or a proposer is given, else 0.
        acceptance: how drafts of requests with a temperature are judged: "invariant", "rejection"
            or "block"; see `Engine` and docs/sampling.md.
        logprobs_mode: what log-probabilities of emitted tokens are of: "raw", the model's logits as
            they are, or "processed", the law the token was drawn from.
        max_seq_len: context limit, prompt included; None: the model's, at most 4096.
        max_num_seqs: sequences that run at once; further ones wait.
        max_num_batched_tokens: most rows of one target forward; long prompts are cut into pieces.
        device: "cpu", "cuda" or "cuda:N".
        dtype: of computation: "float32", "bfloat16", or "auto", float32 on a CPU and bfloat16
            elsewhere. Weights stay as the checkpoint stores them.
        backend: "torch" for plain operations, "fused" for the compiled CPU kernels, "auto" for
            those where they can be had.
        graphs: capture steps as CUDA graphs and replay them; None: wherever the device is one.
        proposer: drafts come from it and not from the MTP head: a `DraftProposer`, or a callable
            that makes one from a `ProposerContext`, its only argument.
        drafter: which of the package's own drafts: "mtp", the checkpoint's head; "ngram", lookup in
            the text so far; "mtp+ngram", lookup where a long run of tokens comes again and the head
            elsewhere. None: the head where there is one. Not together with `proposer`.
        mtp_vocab_size: the MTP head drafts among the first so many ids; 0: among all.
        prefix_cache: keep what requests computed, so that a later one that begins alike goes on
            from there: the next turn of a conversation reads its new tokens only. Tokens do not
            change. See docs/prefix_cache.md.
        prefix_cache_bytes: most bytes of what is kept; the least recently used goes first.
        min_draft_probability: the MTP head ends a chain at a draft it gives less, 0 to 1.
        keep_drafts: share of a step's drafts that is verified, 0 to 1; the tails that the head
            finds least likely, over the whole batch, are left out.
        discard_drafts_below: a draft whose least probability is lower is not verified, 0 to 1.
        grammar_library: what structured output is masked by: "llguidance", or "xgrammar" where that
            is installed.
        num_threads: CPU threads, of the process; None leaves the choice to the libraries.
        progress: called with (bytes read, bytes to read) while loading.

    Attributes:
        config: the model's configuration.
        num_drafts: drafts per step of requests that do not say.
        max_seq_len: context limit in tokens, prompt included.
        path: the checkpoint's folder, or None where there is none.
        engine: the engine underneath.
        tokenizer: the checkpoint's, or None where it has none.

    Raises:
        CheckpointError: the checkpoint cannot be served, or drafts are asked for and it holds no
            MTP head.
        ConfigError: a value is out of range, the device, dtype or backend cannot be had, or two
            drafters are asked for.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        num_drafts: int | Literal["auto"] | None = None,
        acceptance: Acceptance = "invariant",
        logprobs_mode: LogprobsMode = "raw",
        max_seq_len: int | None = None,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = "auto",
        backend: Literal["auto", "torch", "fused"] = "auto",
        graphs: bool | None = None,
        proposer: DraftProposer[Any] | ProposerFactory | None = None,
        drafter: Drafter | None = None,
        mtp_vocab_size: int = 0,
        min_draft_probability: float = 0.0,
        keep_drafts: float = 1.0,
        discard_drafts_below: float = 0.0,
        prefix_cache: bool = True,
        prefix_cache_bytes: int = DEFAULT_PREFIX_CACHE_BYTES,
        grammar_library: Literal["llguidance", "xgrammar"] = "llguidance",
        num_threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        place = _device(device)
        kind = _dtype(dtype, place)
        if graphs and place.type != "cuda":
            raise ConfigError(f"graphs is True on {str(place)!r}; allowed is a CUDA device")
        captures = place.type == "cuda" if graphs is None else graphs
        if isinstance(num_drafts, str) and num_drafts != AUTO:
            raise ConfigError(
                f"num_drafts is {num_drafts!r}; allowed are 0 to {MAX_NUM_DRAFTS} and {AUTO!r}"
            )
        if not isinstance(num_drafts, str):
            _check_int("num_drafts", num_drafts, 0, MAX_NUM_DRAFTS, optional=True)
        _check_int("max_num_seqs", max_num_seqs, 1)
        _check_int("max_num_batched_tokens", max_num_batched_tokens, max_num_seqs)
        _check_int("num_threads", num_threads, 1, optional=True)
        _check_int("prefix_cache_bytes", prefix_cache_bytes, 1)
        if not isinstance(prefix_cache, bool):
            raise ConfigError(f"prefix_cache is {prefix_cache!r}; allowed is True or False")
        _check_drafter(drafter, proposer)
        path = bundled_model_path() if model is None else Path(model)

        checkpoint = Checkpoint.open(path)
        config = ModelConfig.from_path(path)
        _check_int("max_seq_len", max_seq_len, 2, config.max_position_embeddings, optional=True)
        _check_int("mtp_vocab_size", mtp_vocab_size, 0, config.vocab_size)
        if max_seq_len is None:
            max_seq_len = min(config.max_position_embeddings, DEFAULT_MAX_SEQ_LEN)
        has_head = checkpoint.drafter == "mtp"
        left_open = num_drafts is None
        if num_drafts is None:
            chosen = has_head or proposer is not None or drafter is not None
            num_drafts = DEFAULT_NUM_DRAFTS if chosen else 0
        # The file is small and its vocabulary belongs to what is refused before the weights are
        # read; that it is missing matters to text only.
        tokenizer = None
        if (path / "tokenizer.json").is_file():
            tokenizer = Tokenizer(
                path, vocab_size=config.vocab_size, bos_token_id=config.bos_token_id
            )
        if num_threads is not None:
            torch.set_num_threads(num_threads)

        weights = load_weights(
            path,
            config,
            want_drafter=has_head
            if callable(proposer)
            else num_drafts != 0 and proposer is None and drafter != "ngram",
            progress=progress,
        )
        built = build(
            weights, config, device=place, dtype=kind, backend=backend, num_threads=num_threads
        )
        special = set(config.eos_token_ids) | (tokenizer.added_ids if tokenizer else set())
        context = ProposerContext(
            config=config,
            built=built,
            max_seq_len=max_seq_len,
            max_num_seqs=max_num_seqs,
            special_ids=tuple(sorted(special)),
        )
        made = _make_proposer(
            proposer,
            drafter,
            context,
            num_drafts,
            mtp_vocab_size,
            confidence=keep_drafts < 1 or discard_drafts_below > 0,
            min_probability=min_draft_probability,
        )
        in_blocks = made is not None and made.block_gamma is not None
        self._set_up(
            Engine(
                built.model,
                config,
                proposer=made,
                # A block drafter's width says how many, where the caller does not.
                num_drafts=None if left_open and in_blocks else num_drafts,
                acceptance=acceptance,
                logprobs_mode=logprobs_mode,
                max_seq_len=max_seq_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                prefix_cache_bytes=prefix_cache_bytes if prefix_cache else 0,
                device=place,
                dtype=kind,
                capture=CudaCapture(place) if captures else None,
                keep_drafts=keep_drafts,
                discard_drafts_below=discard_drafts_below,
            ),
            tokenizer,
            path,
            f"device={str(place)!r}, dtype={str(kind).removeprefix('torch.')!r}, "
            f"backend={built.backend!r}",
            grammar_library=grammar_library,
        )

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: Tokenizer | None = None) -> LLM:
        """Put the door before an engine of one's own making, for other models and for tests."""
        llm = cls.__new__(cls)
        llm._set_up(engine, tokenizer, None, "")
        return llm

    def _set_up(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        path: Path | None,
        runs_on: str,
        *,
        grammar_library: Literal["llguidance", "xgrammar"] = "llguidance",
    ) -> None:
        self.engine = engine
        self.config = engine.config
        self.num_drafts = engine.num_drafts
        self.max_seq_len = engine.max_seq_len
        self.tokenizer = tokenizer
        self.path = path
        self._runs_on = runs_on
        self._closed = False
        self._inbox: dict[int, deque[Emission]] = {}
        self._grammars: GrammarCompiler | None = None
        self._grammar_library = grammar_library

    def __repr__(self) -> str:
        parts = [] if self.path is None else [repr(str(self.path))]
        parts += [f"num_drafts={self.num_drafts}", f"max_seq_len={self.max_seq_len}"]
        parts += [self._runs_on] if self._runs_on else []
        return f"LLM({', '.join(parts)})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what still runs and let the memory go; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for request_id in list(self._inbox):
            self.engine.abort(request_id)
        self._inbox.clear()
        if self._grammars is not None:
            self._grammars.close()
        self.engine.close()
        del self.engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_bos: bool = True,
        allow_special: bool = False,
    ) -> list[GenerationResult]:
        """Complete every prompt and return when all are done.

        Args:
            prompts: a text, a list of ids, or a list of either.
            params: for all prompts, or a list with one for each; None: `SamplingParams()`.
            add_bos: begin texts with the begin-of-sequence token, as the training documents do,
                where they do not and the model has one.
            allow_special: special tokens that a text spells out, such as role markers, count as
                themselves; otherwise they are the characters they are written in.

        Returns:
            `n` results per prompt, those of the first prompt first and each prompt's by
            `sample_index`; a list also for a single one. An answer that failed while it ran has
            `finish_reason` "error" and says why in `error`; the others are not affected.

        Raises:
            RequestError: a prompt or its parameters cannot be served; nothing was run then.
            CheckpointError: a text is given and the checkpoint has no tokenizer.
        """
        results: dict[tuple[int, int], GenerationResult] = {}
        # Held for the whole call: that is cheaper than for each step, and nobody else's code runs.
        with (
            _HeldInterrupt() as interrupt,
            closing(self._chunks(prompts, params, add_bos, allow_special, interrupt)) as chunks,
        ):
            for chunk in chunks:
                if chunk.result is not None:
                    results[chunk.index, chunk.sample_index] = chunk.result
        return [results[place] for place in sorted(results)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_bos: bool = True,
        allow_special: bool = False,
    ) -> Generator[StreamChunk, None, None]:
        """Complete prompts and yield what each step adds to each, as it comes.

        Takes and raises what `generate` does, at the first iteration. Leaving the loop early, by
        `break` or by an exception such as Ctrl-C, ends the requests and frees what they held.

        Yields:
            Chunks of the answers, interleaved; the last of each carries its result.
        """
        yield from self._chunks(prompts, params, add_bos, allow_special, None)

    def _chunks(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        add_bos: bool,
        allow_special: bool,
        held: _HeldInterrupt | None,
    ) -> Generator[StreamChunk, None, None]:
        if self._closed:
            raise GenerationError("this LLM is closed")
        given = _as_prompts(prompts)
        each = _as_params(params, len(given))
        encoded = [
            self.encode(prompt, add_bos=add_bos, allow_special=allow_special) for prompt in given
        ]
        grammars = [self._compiled(one) for one in each]
        live: dict[int, Answer] = {}
        try:
            for index, (ids, one) in enumerate(zip(encoded, each, strict=True)):
                begun = self.begin(ids, one, grammar=grammars[index], index=index)
                live |= begun
                self._inbox |= {request_id: deque() for request_id in begun}
            while live:
                if self._closed:
                    raise GenerationError("this LLM was closed while it generated")
                arrived = False
                for request_id in list(live):
                    box = self._inbox[request_id]
                    while box:
                        arrived = True
                        chunk = live[request_id].take(box.popleft())
                        if chunk.result is not None:
                            del live[request_id], self._inbox[request_id]
                        yield chunk
                if arrived:
                    continue
                if held is not None:
                    self._step()
                    held.check()
                else:
                    with _HeldInterrupt():
                        self._step()
        finally:
            for request_id in live:
                self._inbox.pop(request_id, None)
                if not self._closed:
                    self.engine.abort(request_id)

    def _step(self) -> None:
        for emission in self.engine.step():
            # Another loop over this object may be waiting for it.
            self._inbox[emission.request_id].append(emission)

    def _compiled(self, params: SamplingParams) -> Grammar | None:
        """The grammar a request asks for; others go on while it is compiled."""
        spec = GrammarSpec.of(params)
        if spec is None:
            return None
        compiler = self.grammar_compiler(spec)
        compiling = compiler.submit(spec)
        while self.engine.has_work and not compiling.done():
            with _HeldInterrupt():
                self._step()
        return compiler.compile(spec)

    def grammar_compiler(self, spec: GrammarSpec) -> GrammarCompiler:
        """What compiles a grammar with this tokenizer; made at the first call, closed by `close`.

        Raises:
            RequestError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise RequestError(
                f"a {spec.kind} is given, but there is no tokenizer to read it with; allowed is "
                "None"
            )
        if self._grammars is None:
            self._grammars = GrammarCompiler(
                self.tokenizer,
                vocab_size=self.config.vocab_size,
                end_ids=self.config.eos_token_ids,
                library=self._grammar_library,
            )
        return self._grammars

    def _cursor(
        self, grammar: Grammar | None, ids: list[int], params: SamplingParams
    ) -> GrammarCursor | None:
        """What the answer must follow: a grammar, a reasoning budget, both or none.

        A grammar starts behind the reasoning where the prompt ends within some.
        """
        if grammar is None and params.max_reasoning_tokens is None:
            return None
        markers: list[int | None] = [None, None]
        if self.tokenizer is not None:
            markers = [self.tokenizer.marker_id(marker) for marker in (THINK, END_THINK)]
        begin, end = markers
        inner = None
        reasons = False
        if begin is not None and end is not None:
            seen = [token for token in ids if token in (begin, end)]
            reasons = bool(seen) and seen[-1] == begin
        if grammar is not None:
            behind = AfterMarker.of(grammar, end_id=end) if reasons and end is not None else None
            inner = behind or grammar.cursor()
        if params.max_reasoning_tokens is None:
            return inner
        if begin is None or end is None:
            raise RequestError(
                f"max_reasoning_tokens is {params.max_reasoning_tokens}, but the tokenizer has no "
                "markers for reasoning; allowed is None"
            )
        budget = ReasoningBudget(
            begin_id=begin, end_id=end, budget=params.max_reasoning_tokens, in_reasoning=reasons
        )
        return BudgetedCursor(budget, vocab_size=self.config.vocab_size, inner=inner)

    def begin(
        self,
        ids: list[int],
        params: SamplingParams,
        *,
        grammar: Grammar | None = None,
        index: int = 0,
    ) -> dict[int, Answer]:
        """Queue all answers to one prompt, for a loop over `engine.step` of the caller's own.

        The first answer reads the prompt for all of them. Such a loop gives every emission to its
        answer, and must not be mixed with `generate` and `stream`.

        Args:
            ids: the prompt.
            params: how it is decoded.
            grammar: what the answers follow, compiled; of `params` nothing is compiled here.
            index: which prompt of the caller's it is, for the chunks.

        Returns:
            The answers by the engine's number of their request.

        Raises:
            RequestError: the prompt or its parameters cannot be served; nothing is queued then.
        """
        if params.n > 1 and params.seed is None:
            params = replace(params, seed=fresh_seed())
        words = self._spelled(params.bad_words or ())
        stops = StopStrings(params.stop or ())
        begun: dict[int, Answer] = {}
        leader: int | None = None
        try:
            for sample in range(params.n):
                one = Answer(
                    index,
                    sample,
                    ids,
                    params,
                    self.tokenizer,
                    stops=stops,
                    eos_ids=self.config.eos_token_ids,
                    leader=None if leader is None else begun[leader],
                )
                request_id = self.engine.add(
                    ids,
                    params if leader is None else replace(params, prompt_logprobs=None),
                    sample=sample,
                    after=leader,
                    text_end=one if one.reads_stops else None,
                    bad_word_ids=words,
                    grammar=self._cursor(grammar, ids, params),
                )
                begun[request_id] = one
                if leader is None:
                    leader = request_id
        except BaseException:
            for request_id in begun:
                self.engine.abort(request_id)
            raise
        return begun

    def _spelled(self, words: Sequence[str]) -> list[list[int]]:
        """Words as ids, at the beginning of a text and behind a space."""
        if self.tokenizer is None:
            return []
        spelled = []
        for word in words:
            bare = word.lstrip() or word
            for text in dict.fromkeys((word, bare, f" {bare}")):
                spelled.append(self.tokenizer.encode(text, add_bos=False))
        return spelled

    def encode(
        self, prompt: Prompt, *, add_bos: bool = True, allow_special: bool = False
    ) -> list[int]:
        """Ids of a prompt as `generate` takes it; any thread may ask.

        Raises:
            RequestError: a text is empty or holds a lone surrogate.
            CheckpointError: a text is given and there is no tokenizer.
        """
        if not isinstance(prompt, str):
            return list(prompt)
        if not prompt:
            raise RequestError("the prompt is empty; at least one character is needed")
        if self.tokenizer is None:
            where = "this LLM" if self.path is None else str(self.path)
            raise CheckpointError(
                f"{where} has no tokenizer.json; prompts must be lists of ids then"
            )
        return self.tokenizer.encode(prompt, add_bos=add_bos, allow_special=allow_special)


class Answer:
    """One running answer as its reader sees it; tells the engine where stop strings end it."""

    def __init__(
        self,
        index: int,
        sample: int,
        prompt: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        stops: StopStrings,
        eos_ids: Sequence[int],
        leader: Answer | None,
    ) -> None:
        self._index = index
        self._sample = sample
        self._prompt = prompt
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stops = StopMatcher(
            stops, include_stop_str_in_output=params.include_stop_str_in_output
        )
        self.reads_stops = bool(params.stop) and self._detokenizer is not None
        self._stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        self._leader = leader
        self._scanned: deque[list[str]] = deque()
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._origins: list[Origin] = []
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._prompt_logprobs: list[TokenLogprob | None] | None = None

    def scan(self, token_ids: Sequence[int], *, num_unstoppable: int) -> int | None:
        """Take a step's tokens before they are emitted; how many are kept where a stop ends it."""
        assert self._detokenizer is not None
        found = self._stops.scan(
            self._detokenizer.push_all(token_ids), num_unstoppable=num_unstoppable
        )
        self._scanned.append(found.texts)
        return None if found.stop is None else found.num_tokens

    def take(self, emission: Emission) -> StreamChunk:
        """What a step's emission adds; the last carries the result."""
        self._token_ids += emission.token_ids
        self._origins += emission.origins
        if self._logprobs is not None:
            self._logprobs += emission.logprobs or ()
        if emission.prompt_logprobs is not None:
            self._prompt_logprobs = emission.prompt_logprobs
        pieces: list[StreamPiece] = []
        if self._detokenizer is not None:
            if not self.reads_stops:
                texts = self._detokenizer.push_all(emission.token_ids)
            else:
                texts = self._scanned.popleft() if emission.token_ids else []
            pieces = [
                StreamPiece(text, origin)
                for text, origin in zip(texts, emission.origins, strict=True)
            ]
            if emission.finish_reason is not None and self._stops.stop is None:
                tail = self._stops.push(self._detokenizer.flush(), can_stop=False)
                tail += self._stops.flush()
                if tail and pieces:
                    pieces[-1] = StreamPiece(pieces[-1].text + tail, pieces[-1].origin)
                elif tail:
                    pieces = [StreamPiece(tail, self._origins[-1])]
        text = "".join([piece.text for piece in pieces])
        self._texts.append(text)
        return StreamChunk(
            index=self._index,
            text=text,
            token_ids=emission.token_ids,
            origins=emission.origins,
            pieces=pieces,
            result=None if emission.finish_reason is None else self._result(emission),
            sample_index=self._sample,
            logprobs=emission.logprobs,
        )

    def _stop_reason(self) -> str | int | None:
        if self._stops.stop is not None:
            return self._stops.stop
        last = self._token_ids[-1] if self._token_ids else None
        return last if last in self._stop_ids else None

    def _result(self, emission: Emission) -> GenerationResult:
        assert emission.finish_reason is not None
        stopped = emission.finish_reason is FinishReason.STOP
        listed = (self._leader or self)._prompt_logprobs
        return GenerationResult(
            text="".join(self._texts),
            token_ids=self._token_ids,
            finish_reason=FinishReason(emission.finish_reason),
            usage=Usage(
                prompt_tokens=len(self._prompt),
                completion_tokens=len(self._token_ids),
                cached_tokens=emission.cached_tokens,
            ),
            speculation=emission.stats,
            origins=self._origins,
            prompt_token_ids=self._prompt,
            error=emission.error,
            sample_index=self._sample,
            stop_reason=self._stop_reason() if stopped else None,
            logprobs=self._logprobs,
            prompt_logprobs=None if listed is None else list(listed),
        )


class _HeldInterrupt:
    """Lets Ctrl-C wait for the end of a step, so that it finds every request whole.

    Where something else than Python's own handler is in charge, it stays in charge.
    """

    def __init__(self) -> None:
        self.came = False
        self._holds = False

    def __enter__(self) -> Self:
        if (
            signal.getsignal(signal.SIGINT) is signal.default_int_handler
            and threading.current_thread() is threading.main_thread()
        ):
            signal.signal(signal.SIGINT, self._note)
            self._holds = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._holds = False
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raise what was held back."""
        if self.came:
            self.came = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise RequestError(
            f"prompts is a {type(prompts).__name__}; allowed are a text, a list of ids, or a list "
            "of either"
        )
    if not prompts:
        raise RequestError("the prompt is empty, or the list holds none; at least one is needed")
    if all(isinstance(item, int) for item in prompts):
        return [list(prompts)]
    for item in prompts:
        if not isinstance(item, (str, list, tuple)):
            raise RequestError(
                f"the list of prompts holds {item!r}; allowed are texts and lists of ids"
            )
    return list(prompts)


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    each: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params]
    for one in each:
        if not isinstance(one, SamplingParams):
            raise RequestError(
                f"params is a {type(one).__name__}; allowed are SamplingParams, or a list of them"
            )
    if len(each) != count:
        raise RequestError(f"{len(each)} params are given for {count} prompts; one each is needed")
    return each


def _check_drafter(
    drafter: Drafter | None, proposer: DraftProposer[Any] | ProposerFactory | None
) -> None:
    names = get_args(Drafter)
    if drafter is not None and drafter not in names:
        raise ConfigError(f"drafter is {drafter!r}; allowed are {', '.join(map(repr, names))}")
    if drafter is not None and proposer is not None:
        name = getattr(proposer, "__name__", type(proposer).__name__)
        raise ConfigError(
            f"drafter is {drafter!r} and proposer is {name}; only one can draft, so give one of "
            "them (a CombinedProposer is one proposer of two)"
        )
    if proposer is not None and not isinstance(proposer, DraftProposer):
        _check_factory(proposer)


def _check_factory(given: ProposerFactory) -> None:
    allowed = (
        "allowed are an instance of a DraftProposer, and a callable that makes one from a "
        "ProposerContext, its only argument"
    )
    name = getattr(given, "__name__", None) or type(given).__name__
    if not callable(given):
        raise ConfigError(f"proposer is {given!r:.80}; {allowed}")
    if isinstance(given, type):
        if not issubclass(given, DraftProposer):
            raise ConfigError(f"proposer is the class {name}, no DraftProposer; {allowed}")
        if lacking := ", ".join(sorted(given.__abstractmethods__)):
            raise ConfigError(f"proposer is the class {name}, which lacks {lacking}; {allowed}")
    try:
        inspect.signature(given).bind(None)
    except TypeError as error:
        if isinstance(given, type):
            what = f"the class {name}, which does not take a ProposerContext ({error})"
            hint = f"; {name}() would be an instance"
        else:
            what, hint = f"{name}, which cannot be called with a ProposerContext ({error})", ""
        raise ConfigError(f"proposer is {what}; {allowed}{hint}") from None
    except ValueError:
        pass  # its parameters are not known beforehand, as of some built-in types


def _make_proposer(
    given: DraftProposer[Any] | ProposerFactory | None,
    drafter: Drafter | None,
    context: ProposerContext,
    num_drafts: int | Literal["auto"],
    mtp_vocab_size: int,
    *,
    confidence: bool,
    min_probability: float,
) -> DraftProposer[Any] | None:
    if isinstance(given, DraftProposer):
        return given
    if given is not None:
        made = given(context)
        if not isinstance(made, DraftProposer):
            raise ConfigError(
                f"the proposer factory made a {type(made).__name__}; a DraftProposer is needed"
            )
        return made
    built = context.built
    if num_drafts and drafter == "ngram":
        return NgramProposer()
    if not num_drafts or built.mtp is None:
        return None
    head = DeepseekV4MtpHead.new(
        built.mtp,
        built.embed_tokens,
        built.lm_head,
        context.config,
        mtp_vocab_size,
        context.max_seq_len,
        num_slots=context.max_num_seqs,
        max_width=MAX_NUM_DRAFTS + 1,
        extra_ids=context.special_ids if mtp_vocab_size else (),
        confidence=confidence,
        min_probability=min_probability,
    )
    if drafter != "mtp+ngram":
        return head
    lookup = NgramProposer(min_ngram=LOOKUP_BESIDE_HEAD, max_ngram=LOOKUP_BESIDE_HEAD)
    return CombinedProposer(lookup, head)


def _device(given: str | torch.device) -> torch.device:
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device is {given!r}; allowed are 'cpu', 'cuda', 'cuda:N'") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {str(device)!r}; allowed are 'cpu', 'cuda', 'cuda:N'")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(f"device is {str(device)!r}; this PyTorch sees {count} CUDA devices")
    return device


def _dtype(given: str | torch.dtype, device: torch.device) -> torch.dtype:
    if given == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = _DTYPES.get(given) if isinstance(given, str) else given
    if dtype not in _DTYPES.values():
        raise ConfigError(
            f"dtype is {given!r}; allowed are 'auto', {', '.join(map(repr, _DTYPES))}"
        )
    assert isinstance(dtype, torch.dtype)
    return dtype


def _check_int(
    name: str, value: int | None, low: int, high: int | None = None, *, optional: bool = False
) -> None:
    if optional and value is None:
        return
    allowed = f"an integer of at least {low}" if high is None else f"an integer {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}; allowed is {allowed}")
    if value < low or (high is not None and value > high):
        raise ConfigError(f"{name} is {value}; allowed is {allowed}")
