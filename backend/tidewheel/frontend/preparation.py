from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

from tidewheel.batch import Int32Array
from tidewheel.engine.messages import AddRequest, CloseSession, EngineInfo
from tidewheel.engine.requests import check_prompt_length, check_request
from tidewheel.errors import InvalidRequest, PromptTooLarge
from tidewheel.frontend.chat import ChatTemplate, parse_messages
from tidewheel.frontend.coercion import to_text
from tidewheel.frontend.model_files import GenerationDefaults
from tidewheel.frontend.options import RequestOptions
from tidewheel.frontend.output import Outputs, OutputStream
from tidewheel.frontend.parameters import parse_parameters
from tidewheel.frontend.text import StopStrings
from tidewheel.frontend.tokenizer import Tokenizer
from tidewheel.frontend.values import GenerateRequest, Generation
from tidewheel.sampling import SamplingParams, pack_biases


class Prepared(NamedTuple):
    message: AddRequest | CloseSession
    outputs: Outputs | None  # None: nothing is generated
    has_stop_strings: bool


class Preparer:
    """Maker of messages and outputs, thread-safe. Raises `ConfigError` for a broken folder.

    Without a tokenizer, prompts are token ids and outputs have no text.
    """

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer | None) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self.defaults = GenerationDefaults.load(Path(info.model))
        eos = self.defaults.eos_token_ids | (frozenset() if tokenizer is None else tokenizer.eos_token_ids)
        # Model folders may name ids that the model cannot output.
        self._eos_token_ids = tuple(sorted(token_id for token_id in eos if token_id < info.vocab_size))

    def prepare(self, key: int, given: Generation, arrival_ns: int, timeout_us: int = 0) -> Prepared:
        """Return a checked message with outputs. Raise `InvalidRequest`."""
        sampling = given.sampling
        bias_token_ids, bias_amounts = pack_biases(sampling.logit_bias)
        message = AddRequest(
            key=key,
            prompt=given.prompt_ids.astype("<i4").tobytes(),
            sampling=dataclasses.replace(sampling, stop=(), bad_words=(), logit_bias={}),
            stop_token_ids=self._stop_token_ids(sampling),
            bad_words_ids=self._bad_words_ids(sampling),
            bias_token_ids=bias_token_ids,
            bias_amounts=bias_amounts,
            **given.options.to_wire(arrival_ns, timeout_us),
        )
        check_request(message, self._info, prompt_name=given.prompt_name)
        return Prepared(message, Outputs(message, lambda: self._open_streams(given)), bool(sampling.stop))

    def _stop_token_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        eos = () if sampling.ignore_eos else self._eos_token_ids
        return tuple(dict.fromkeys((*eos, *sampling.stop_token_ids)))

    def _bad_words_ids(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if self._tokenizer is None:
            return ()
        return tuple(ids for word in sampling.bad_words for ids in self._tokenizer.phrase_ids(word))

    def _open_streams(self, given: Generation) -> list[OutputStream]:
        stop = StopStrings(given.sampling.stop)
        return [OutputStream(self._tokenizer, given, stop) for _ in range(given.options.n)]


class RequestReader:
    """Reader of client requests, thread-safe. Checks sizes before work that depends on them."""

    def __init__(self, info: EngineInfo, tokenizer_folder: Path, *, max_prompt_bytes: int) -> None:
        """Raise `ConfigError` in one line without a usable tokenizer."""
        self._info = info
        self._tokenizer = Tokenizer.load(tokenizer_folder, vocab_size=info.vocab_size)
        self._preparer = Preparer(info, self._tokenizer)
        self._template = ChatTemplate.load(tokenizer_folder, self._tokenizer.named_tokens)
        self._max_prompt_bytes = max_prompt_bytes

    def read(self, key: int, request: GenerateRequest, arrival_ns: int) -> Prepared:
        """Raise `InvalidRequest` or `Unsupported` with field, value and limit."""
        sampling, options = parse_parameters(request.parameters, self._preparer.defaults.sampling)
        if options.close_session:
            return _close_session(key, request, options)
        name, text, prompt_ids = self._read_prompt(request)
        echo = request.echo and not request.stream
        given = Generation(prompt_ids, sampling, options, name, text, echo)
        return self._preparer.prepare(key, given, arrival_ns, request.timeout_us)

    def _read_prompt(self, request: GenerateRequest) -> tuple[str, str | None, Int32Array]:
        """Return field, text (if any) and token ids of the prompt."""
        forms = {"text_input": request.text, "input_ids": request.input_ids, "messages": request.messages}
        given = [name for name, value in forms.items() if value is not None]
        if len(given) != 1:
            raise InvalidRequest(
                f"give one of text_input, input_ids and messages, not {' and '.join(given) or 'none'}"
            )
        name = given[0]
        self._check_bytes(name, request.prompt_bytes)
        if request.input_ids is not None:
            return name, None, request.input_ids
        text = to_text(name, request.text) if request.messages is None else self._render(request.messages)
        return name, text, self._encode(name, text, add_special_tokens=request.messages is None)

    def _render(self, messages: str | bytes) -> str:
        if self._template is None:
            raise InvalidRequest("messages is set, and the model has no chat template: send text_input")
        text = to_text("messages", self._template.render(parse_messages(messages)))
        self._check_bytes("messages, as the chat template writes them,", len(text.encode("utf-8")))
        return text

    def _encode(self, name: str, text: str, *, add_special_tokens: bool) -> Int32Array:
        if not text:
            raise InvalidRequest(f"{name} is empty: give at least one character")
        if self._tokenizer.max_token_bytes is not None:
            # Tokenisation takes seconds: first refuse prompts that are too long in any case.
            least = -(-len(text.encode("utf-8")) // self._tokenizer.max_token_bytes)
            check_prompt_length(name, least, self._info, qualifier=" or more")
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_bytes(self, name: str, num_bytes: int) -> None:
        if num_bytes > self._max_prompt_bytes:
            raise PromptTooLarge(f"{name} has {num_bytes} bytes: at most {self._max_prompt_bytes} are allowed")


def _close_session(key: int, request: GenerateRequest, options: RequestOptions) -> Prepared:
    if request.text or request.messages is not None or request.input_ids is not None:
        raise InvalidRequest("close_session is true, and there is a prompt: it takes none, or an empty text_input")
    return Prepared(CloseSession(key, options.tenant, options.session_id), None, False)
