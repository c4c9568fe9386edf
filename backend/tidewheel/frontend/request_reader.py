"""Requests of clients: what they ask of the engine, or of the tokenizer alone."""

from __future__ import annotations

import dataclasses
from typing import Literal

import msgspec

from tidewheel.batch import Int32Array
from tidewheel.engine.messages import CloseSession, EngineInfo
from tidewheel.engine.requests import check_prompt_length, check_token_ids
from tidewheel.errors import InvalidRequest
from tidewheel.frontend.coercion import check_size, to_text
from tidewheel.frontend.control_tokens import Spans
from tidewheel.frontend.conversation import parse_conversation
from tidewheel.frontend.interface import GenerateRequest, Generation
from tidewheel.frontend.model_files import GenerationDefaults
from tidewheel.frontend.preparation import Prepared, Preparer, check_task_parameters, parse_parameters, truncated
from tidewheel.frontend.prompt_options import PromptOptions
from tidewheel.frontend.prompt_process import PromptEncoder
from tidewheel.frontend.request_options import RequestOptions
from tidewheel.frontend.tokenizer import Tokenizer
from tidewheel.frontend.word_biases import with_token_biases
from tidewheel.request import Pooling
from tidewheel.sampling import SamplingParams

MAX_ANSWER_LOGPROBS = 1 << 20  # some 70 bytes each


class RequestReader:
    """Reader of client requests, thread-safe."""

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Tokenizer,
        encoder: PromptEncoder,
        *,
        max_prompt_bytes: int,
        default_max_tokens: int | Literal["context"],
        defaults: GenerationDefaults | None = None,
        pooling: Pooling = "last",
        escape_special_tokens: bool = True,
    ) -> None:
        """Without `defaults`, requests sample as the model says."""
        self._pooling: Pooling = pooling
        self._escapes = escape_special_tokens
        self._info = info
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._preparer = Preparer(info, tokenizer, defaults, encoder, encoder.compilable)
        self._max_prompt_bytes = max_prompt_bytes
        self._default_max_tokens = info.max_num_tokens if default_max_tokens == "context" else default_max_tokens

    def close(self) -> None:
        self._encoder.close()

    def read(self, key: int, request: GenerateRequest, arrival_ns: int) -> Prepared:
        """Raise `InvalidRequest` or `Unsupported`."""
        if request.task == "embed":
            return self._embed(key, request, arrival_ns)
        if request.task != "generate":
            return Prepared(None, None, False, self._answer(request))
        parameters = with_token_biases(request.parameters, self._encode_word)
        sampling, options, prompt_options, is_scoring = parse_parameters(parameters, self._preparer.defaults.sampling)
        if options.close_session:
            return _close_session(key, request, options)
        name, text, prompt_ids = self._read_prompt(request, prompt_options, sampling)
        sampling = self._fit(sampling, len(prompt_ids))
        echo = prompt_options.echo or (request.echo and not request.stream)
        given = Generation(
            prompt_ids, sampling, options, name, text, echo, is_scoring=is_scoring, request_id=request.request_id
        )
        prepared = self._preparer.prepare(key, given, arrival_ns, request.timeout_us)
        _check_answer(sampling, options.n)  # last: its limit concerns values that are right alone
        return prepared

    def _embed(self, key: int, request: GenerateRequest, arrival_ns: int) -> Prepared:
        """Ask for one token, which is not returned: with it, all of the prompt is computed."""
        check_task_parameters(request.parameters, request.task)
        sampling, options, prompt_options, _ = parse_parameters(request.parameters)
        sampling = dataclasses.replace(sampling, max_tokens=1, temperature=0.0)
        name, text, prompt_ids = self._read_prompt(request, prompt_options, sampling)
        given = Generation(
            prompt_ids, sampling, options, name, text, pooling=self._pooling, request_id=request.request_id
        )
        return self._preparer.prepare(key, given, arrival_ns, request.timeout_us)

    def _answer(self, request: GenerateRequest) -> str:
        """Return the answer of the tasks `tokenize` (JSON of the tokens) and `detokenize` (their text)."""
        check_task_parameters(request.parameters, request.task)
        options = parse_parameters(request.parameters).prompt
        name = self._prompt_name(request)
        if request.task == "detokenize":
            if request.input_ids is None:
                raise InvalidRequest(f"{name} is set, and task is detokenize: it takes input_ids")
            options.check_for(name)
            check_token_ids(name, request.input_ids, self._info)
            return self._encoder.decode(request.input_ids)
        if request.input_ids is not None:
            raise InvalidRequest("input_ids is set, and task is tokenize: it takes text_input or messages")
        text, plain, add_special_tokens = self._text(name, request, options)
        return self._encoder.tokenize(
            text, add_special_tokens=add_special_tokens, max_model_len=self._info.max_model_len,
            with_strings=options.return_token_strs, plain=plain,
        )  # fmt: skip

    def _prompt_name(self, request: GenerateRequest) -> str:
        """Return the prompt's field."""
        forms = {"text_input": request.text, "input_ids": request.input_ids, "messages": request.messages}
        given = [name for name, value in forms.items() if value is not None]
        if len(given) != 1:
            raise InvalidRequest(
                f"give one of text_input, input_ids and messages, not {' and '.join(given) or 'none'}"
            )
        check_size(given[0], request.prompt_bytes, self._max_prompt_bytes, "max_prompt_bytes")
        return given[0]

    def _read_prompt(
        self, request: GenerateRequest, options: PromptOptions, sampling: SamplingParams
    ) -> tuple[str, str | None, Int32Array]:
        """Return field, any text that the tokens are of, and token ids."""
        name = self._prompt_name(request)
        if options.return_token_strs:
            raise InvalidRequest("return_token_strs is true: it goes with the task tokenize")
        if request.input_ids is not None:
            options.check_for(name)
            return name, None, truncated(request.input_ids, sampling, self._info)
        text, plain, add_special_tokens = self._text(name, request, options)
        if sampling.truncate_prompt_tokens is None:
            self._check_length(name, text)
        prompt_ids = self._encoder.encode(text, add_special_tokens=add_special_tokens, plain=plain)
        kept = truncated(prompt_ids, sampling, self._info)
        return name, text if len(kept) == len(prompt_ids) else None, kept

    def _text(self, name: str, request: GenerateRequest, options: PromptOptions) -> tuple[str, Spans, bool]:
        """Return the prompt, its plain spans, and whether the tokenizer adds special tokens.

        By default it adds them to a text, and not to a conversation, whose template writes its own.
        """
        options.check_for(name)
        if request.messages is None:
            return to_text(name, request.text), (), options.add_special_tokens is not False
        conversation = msgspec.structs.replace(
            parse_conversation(request.messages),
            add_generation_prompt=options.add_generation_prompt is not False,
            escapes_special_tokens=self._escapes,
        )
        rendered = self._encoder.render(conversation)
        return rendered.text, rendered.plain, bool(options.add_special_tokens)

    def _fit(self, sampling: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Set `max_tokens` if it is not given, and cut it to the context. Leave refusals to `check_request`."""
        room = self._info.max_num_tokens - num_prompt_tokens
        if room < max(sampling.min_tokens, 1):
            return dataclasses.replace(sampling, max_tokens=None)
        if sampling.max_tokens is None and sampling.min_tokens > self._default_max_tokens:
            raise InvalidRequest(
                f"min_tokens is {sampling.min_tokens}, more than {self._default_max_tokens}, the default of "
                "max_tokens (default_max_tokens): set max_tokens too"
            )
        return dataclasses.replace(sampling, max_tokens=min(sampling.max_tokens or self._default_max_tokens, room))

    def _encode_word(self, word: str) -> Int32Array:
        return self._encoder.encode(word, add_special_tokens=False)

    def _check_length(self, name: str, text: str) -> None:
        if not text:
            raise InvalidRequest(f"{name} is empty: give at least one character")
        if self._tokenizer.max_token_bytes is not None:
            # Tokenisation can take seconds.
            least = -(-len(text.encode("utf-8")) // self._tokenizer.max_token_bytes)
            check_prompt_length(name, least, self._info, qualifier=" or more")


def _check_answer(sampling: SamplingParams, n: int) -> None:
    """Bound the memory of an answer, which its client may not read."""
    num_tokens = n * (sampling.max_tokens or 0)
    if sampling.logprobs is not None and (sampling.logprobs + 1) * num_tokens > MAX_ANSWER_LOGPROBS:
        raise InvalidRequest(
            f"logprobs is {sampling.logprobs}, and n x max_tokens {num_tokens}: an answer has room for "
            f"{MAX_ANSWER_LOGPROBS}, one more than logprobs for each token; lower logprobs, n or max_tokens"
        )


def _close_session(key: int, request: GenerateRequest, options: RequestOptions) -> Prepared:
    if request.text or request.messages is not None or request.input_ids is not None:
        raise InvalidRequest("close_session is true, and there is a prompt: it takes none, or an empty text_input")
    return Prepared(CloseSession(key, options.tenant, options.session_id), None, False)
