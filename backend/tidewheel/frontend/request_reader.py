from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from tidewheel.audio_file import SAMPLING_RATE, check_sound, read_audio
from tidewheel.batch import Int32Array
from tidewheel.engine.messages import MAX_REQUEST_ID_CHARS, AddRequest, EngineInfo
from tidewheel.engine.requests import check_prompt_length, check_request, check_token_ids
from tidewheel.errors import InvalidRequest
from tidewheel.frontend.chat import parse_conversation
from tidewheel.frontend.coercion import check_size, to_text
from tidewheel.frontend.output import Generation, Outputs
from tidewheel.frontend.prompt_workers import DecodeJob, EncodeJob, GrammarJob, PromptWorkers, RenderJob, TokenizeJob
from tidewheel.frontend.request_parameters import GenerateRequest, parse_parameters, with_token_biases
from tidewheel.frontend.settings import FrontendSettings, GenerationDefaults
from tidewheel.frontend.speech import Activity, SpeechAnswer, SpeechRules, cut, loudness
from tidewheel.frontend.tokenizer import Tokenizer
from tidewheel.grammar import Grammar
from tidewheel.one_shot.shared_tensors import PackedTensor, PackedTensors
from tidewheel.one_shot.signature import dtype_name
from tidewheel.request_options import PromptOptions, RequestOptions
from tidewheel.runner.grammar_compiler import to_source
from tidewheel.sampling import LogitBias, SamplingParams

MAX_KNOWN_GRAMMARS = 64
MAX_ANSWER_LOGPROBS = 1 << 20  # some 70 bytes each


class PreparedRequest(NamedTuple):
    message: AddRequest | None = None  # None: the engine is not asked
    outputs: Outputs | None = None  # None: nothing is generated
    has_stop_strings: bool = False
    answer: str = ""  # where nothing is generated
    speech: SpeechAnswer | None = None  # whose first request this one is


class MessageMaker:
    """Maker of engine messages and outputs (token ids without a tokenizer). Thread-safe."""

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer | None, defaults: GenerationDefaults) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._source_of: Callable[[Grammar], str] = to_source
        if tokenizer is not None:
            self._encode: Callable[[str], Int32Array] = partial(tokenizer.encode, add_special_tokens=False)
        self.defaults = defaults
        self.speech = SpeechRules.load(Path(info.model)) if info.max_audio_samples else None
        eos = self.defaults.eos_token_ids | (frozenset() if tokenizer is None else tokenizer.eos_token_ids)
        # Folders may name ids that the model cannot output.
        self._eos_token_ids = tuple(sorted(token_id for token_id in eos if token_id < info.vocab_size))

    def prepare(
        self, key: int, given: Generation, arrival_ns: int, timeout_us: int = 0
    ) -> tuple[AddRequest, Outputs]:
        """Check a request. Raise `InvalidRequest`."""
        sampling = given.sampling
        grammar = sampling.grammar
        # A grammar may only be able to end.
        eos = () if sampling.ignore_eos and grammar is None else self._eos_token_ids
        bias = LogitBias.of(sampling.logit_bias).to_bytes() if sampling.logit_bias else (b"", b"")
        words = self._bad_words_ids(sampling.bad_words)
        if self.speech is not None:
            words = (*words, *self.speech.forbidden(given.prompt_ids))
        audio = given.audio
        shape = [] if audio is None else [PackedTensor("audio", dtype_name(audio), audio.shape, 0)]
        message = AddRequest(
            key=key,
            inputs=PackedTensors(shape) if shape else None,
            prompt=given.prompt_ids.astype("<i4").tobytes(),
            sampling=msgspec.structs.replace(sampling, stop=(), bad_words=(), logit_bias={}, grammar=None),
            pooling=given.pooling,
            stop_token_ids=tuple(dict.fromkeys((*eos, *sampling.stop_token_ids))),
            bad_words_ids=words,
            bias_token_ids=bias[0],
            bias_amounts=bias[1],
            grammar="" if grammar is None else self._source_of(grammar),
            grammar_name="" if grammar is None else grammar.name,
            end_token_ids=() if grammar is None else self._end_token_ids(sampling.stop_token_ids),
            request_id=given.request_id[:MAX_REQUEST_ID_CHARS],
            options=given.options,
            arrival_ns=arrival_ns,
            deadline_ns=given.options.deadline_ns(arrival_ns, timeout_us),
            soft_deadline_ns=given.options.soft_deadline_ns(arrival_ns),
        )
        check_request(message, self._info, prompt_name=given.prompt_name)
        if audio is not None:
            message = msgspec.structs.replace(message, inputs=PackedTensors.of({"audio": audio}))
        return message, Outputs(self._tokenizer, given)

    def _end_token_ids(self, stop_token_ids: Iterable[int]) -> tuple[int, ...]:
        special = frozenset() if self._tokenizer is None else self._tokenizer.special_ids
        return tuple(dict.fromkeys((*self._eos_token_ids, *(t for t in stop_token_ids if t in special))))

    def _bad_words_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        if self._tokenizer is None:
            return ()
        return tuple(ids for word in words for ids in phrase_ids(word, self._encode, self._info.vocab_size))


class RequestReader(MessageMaker):
    """Reader of client requests. `encoder` makes their tokens and tries their grammars. Thread-safe."""

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Tokenizer,
        encoder: PromptWorkers,
        settings: FrontendSettings,
        *,
        max_prompt_bytes: int,
        defaults: GenerationDefaults,
        activity: Activity = loudness,
    ) -> None:
        super().__init__(info, tokenizer, defaults)
        self._max_token_bytes = tokenizer.max_token_bytes
        self._encoder = encoder
        self._settings = settings
        self._activity = activity
        self._encode = partial(encoder.encode, add_special_tokens=False)
        self._source_of = lru_cache(MAX_KNOWN_GRAMMARS)(lambda grammar: encoder.run(GrammarJob(grammar)).text)
        self.max_prompt_bytes = max_prompt_bytes
        default = settings.default_max_tokens
        self._default_max_tokens = info.max_num_tokens if default == "context" else default
        of_speech = {"temperature": 0.0, "max_tokens": info.max_num_tokens} if self.speech is not None else {}
        self._defaults: Mapping[str, object] = {**of_speech, **self.defaults.sampling}

    def close(self) -> None:
        self._encoder.close()

    def read(self, key: int, request: GenerateRequest) -> PreparedRequest:
        """Prepare a client's request. Raise `InvalidRequest` or `Unsupported`."""
        rules, given = self.speech, request.given
        if given is not None:
            prepared = self.prepare(key, given, request.arrival_ns, request.timeout_us)
            return PreparedRequest(*prepared, has_stop_strings=bool(given.sampling.stop))
        if rules is not None and request.task != "generate":
            raise InvalidRequest(f"task is {request.task}: a speech model has generate alone")
        if request.task in ("tokenize", "detokenize"):
            return PreparedRequest(answer=self._tokenizer_answer(request))
        is_embedding = request.task == "embed"
        parameters = with_token_biases(request.parameters, self._encode)
        defaults = {} if is_embedding else self._defaults
        sampling, options, prompt_options, is_scoring = parse_parameters(parameters, defaults, request.task)
        if options.order:
            return _order(key, request, options)
        name, text, prompt_ids, grammar = self._read_prompt(request, prompt_options, sampling)
        if grammar is not None:
            if sampling.grammar is not None:
                raise InvalidRequest(f"{sampling.grammar.name} is set, and a grammar of tools too: send one of them")
            sampling = msgspec.structs.replace(sampling, grammar=grammar)
        if is_embedding:
            sampling = msgspec.structs.replace(sampling, max_tokens=1, temperature=0.0)
        else:
            sampling = self._fit(sampling, len(prompt_ids))
        echo = prompt_options.echo or (request.echo and not request.stream)
        given = Generation(
            prompt_ids,
            sampling,
            options,
            name,
            text,
            echo=echo and not is_embedding and rules is None,
            pooling=self._settings.pooling if is_embedding else "",
            is_scoring=is_scoring,
            request_id=request.request_id,
            language=prompt_options.language,
        )
        parts = [given] if rules is None else self._windows(rules, request, given)
        message, outputs = self.prepare(key, parts[0], request.arrival_ns, request.timeout_us)
        _check_answer(sampling, options.n)  # last: its limit concerns valid values
        speech = None if rules is None or len(parts) == 1 else SpeechAnswer(request, parts, rules)
        return PreparedRequest(message, outputs, has_stop_strings=bool(sampling.stop), speech=speech)

    def _windows(self, rules: SpeechRules, request: GenerateRequest, given: Generation) -> list[Generation]:
        limit = self._settings.max_audio_s
        samples = read_audio(request.audio_file or b"", limit) if request.audio is None else request.audio
        check_sound(len(samples), SAMPLING_RATE, 1, limit, "audio")
        windows = cut(samples, self._info.max_audio_samples, self._activity)
        if len(windows) > 1 < given.options.n:
            raise InvalidRequest(f"n is {given.options.n}: audio of several windows has one text; leave it out")
        language = given.language or ("" if rules.lang_to_id else "en")
        parts = [given._replace(audio=one.samples, seconds=one.seconds, language=language) for one in windows]
        return parts if language else [rules.question(parts[0]), *parts]

    def _tokenizer_answer(self, request: GenerateRequest) -> str:
        options = parse_parameters(request.parameters, task=request.task).prompt
        name = self._prompt_name(request)
        if request.task == "detokenize":
            if request.input_ids is None:
                raise InvalidRequest(f"{name} is set, and task is detokenize: it takes input_ids")
            options.check_for(name)
            check_token_ids(name, request.input_ids, self._info)
            return self._encoder.run(DecodeJob(request.input_ids.astype("<i4").tobytes())).text
        if request.input_ids is not None:
            raise InvalidRequest("input_ids is set, and task is tokenize: it takes text_input or messages")
        prompt, _ = self._text(name, request, options)
        return self._encoder.run(TokenizeJob(prompt, self._info.max_model_len, options.return_token_strs)).text

    def _prompt_name(self, request: GenerateRequest) -> str:
        forms = {
            "text_input": request.text, "input_ids": request.input_ids, "messages": request.messages,
            "audio": request.audio, "audio_file": request.audio_file,
        }  # fmt: skip
        given = [name for name, value in forms.items() if value is not None]
        known = ("text_input", "input_ids", "messages") if self.speech is None else ("audio", "audio_file")
        if len(given) != 1 or given[0] not in known:
            raise InvalidRequest(f"give one of {', '.join(known)}: the request has {' and '.join(given) or 'none'}")
        check_size(given[0], request.prompt_bytes, self.max_prompt_bytes, "max_prompt_bytes")
        return given[0]

    def _read_prompt(
        self, request: GenerateRequest, options: PromptOptions, sampling: SamplingParams
    ) -> tuple[str, str | None, Int32Array, Grammar | None]:
        name = self._prompt_name(request)
        if options.return_token_strs:
            raise InvalidRequest("return_token_strs is true: it goes with the task tokenize")
        if self.speech is not None:
            options.check_for(name)
            language = options.language or next(iter(self.speech.lang_to_id), "").strip("<|>")
            return name, None, self.speech.prompt(language, translate=options.translate), None
        if request.input_ids is not None:
            options.check_for(name)
            return name, None, truncated(request.input_ids, sampling, self._info), None
        prompt, grammar = self._text(name, request, options)
        if sampling.truncate_prompt_tokens is None:
            self._check_length(name, prompt.text)
        prompt_ids = self._encoder.encode(
            prompt.text, add_special_tokens=prompt.add_special_tokens, plain=prompt.plain
        )
        kept = truncated(prompt_ids, sampling, self._info)
        return name, prompt.text if len(kept) == len(prompt_ids) else None, kept, grammar

    def _text(self, name: str, request: GenerateRequest, options: PromptOptions) -> tuple[EncodeJob, Grammar | None]:
        options.check_for(name)
        if request.messages is None:
            return EncodeJob(to_text(name, request.text), options.add_special_tokens is not False), None
        conversation = msgspec.structs.replace(
            parse_conversation(request.messages),
            add_generation_prompt=options.add_generation_prompt is not False,
            escapes_special_tokens=self._settings.escape_special_tokens,
        )
        rendered = self._encoder.run(RenderJob(conversation))
        return EncodeJob(rendered.text, bool(options.add_special_tokens), rendered.plain), rendered.grammar

    def _fit(self, sampling: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        room = self._info.max_num_tokens - num_prompt_tokens
        if room < max(sampling.min_tokens, 1):
            return msgspec.structs.replace(sampling, max_tokens=None)
        if sampling.max_tokens is None and sampling.min_tokens > self._default_max_tokens:
            raise InvalidRequest(
                f"min_tokens is {sampling.min_tokens}, more than {self._default_max_tokens}, the default of "
                "max_tokens (default_max_tokens): set max_tokens too"
            )
        max_tokens = min(sampling.max_tokens or self._default_max_tokens, room)
        return msgspec.structs.replace(sampling, max_tokens=max_tokens)

    def _check_length(self, name: str, text: str) -> None:
        if not text:
            raise InvalidRequest(f"{name} is empty: give at least one character")
        if self._max_token_bytes is not None:
            # Tokenisation can take seconds.
            least = -(-len(text.encode("utf-8")) // self._max_token_bytes)
            check_prompt_length(name, least, self._info, qualifier=" or more")


def truncated(prompt_ids: Int32Array, sampling: SamplingParams, info: EngineInfo) -> Int32Array:
    """Keep the last `truncate_prompt_tokens` tokens. Raise `InvalidRequest`."""
    count, most = sampling.truncate_prompt_tokens, info.max_num_tokens - 1
    if count is None:
        return prompt_ids
    if count > most:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {count}: it must be -1 (as many as fit) or 1 to {most}, which leaves a token "
            "of the context for the answer"
        )
    if count == -1:
        max_tokens = sampling.max_tokens or 1
        count = most + 1 - (max_tokens if max_tokens <= most else 1)  # a longer answer is cut to the context
    return prompt_ids[-count:]


def phrase_ids(phrase: str, encode: Callable[[str], Int32Array], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of a phrase at the start of a text and after a space."""
    bare = phrase.lstrip() or phrase
    spellings = [encode(text).tolist() for text in (bare, f" {bare}")]
    return tuple(dict.fromkeys(tuple(ids) for ids in spellings if ids and max(ids) < vocab_size))


def _check_answer(sampling: SamplingParams, n: int) -> None:
    num_tokens = n * (sampling.max_tokens or 0)
    if sampling.logprobs is not None and (sampling.logprobs + 1) * num_tokens > MAX_ANSWER_LOGPROBS:
        raise InvalidRequest(
            f"logprobs is {sampling.logprobs}, and n x max_tokens {num_tokens}: an answer has room for "
            f"{MAX_ANSWER_LOGPROBS}, one more than logprobs for each token; lower logprobs, n or max_tokens"
        )


def _order(key: int, request: GenerateRequest, options: RequestOptions) -> PreparedRequest:
    if request.text or request.messages is not None or request.input_ids is not None:
        raise InvalidRequest(f"{options.order} is set, and there is a prompt: it takes none, or an empty text_input")
    return PreparedRequest(AddRequest(key, b"", SamplingParams(), options=options))
