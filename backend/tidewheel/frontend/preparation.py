"""From what a client asked for to what the engine gets: parameters, prompt and limits, all checked."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

from tidewheel.engine.messages import AddRequest, CloseSession, EngineInfo
from tidewheel.engine.requests import check_request
from tidewheel.errors import InvalidRequest
from tidewheel.frontend.chat import ChatTemplate
from tidewheel.frontend.defaults import GenerationDefaults
from tidewheel.frontend.options import RequestOptions
from tidewheel.frontend.output import OutputStream
from tidewheel.frontend.outputs import Outputs
from tidewheel.frontend.parameters import parse_parameters
from tidewheel.frontend.prompt import PromptReader
from tidewheel.frontend.stop import StopStrings
from tidewheel.frontend.tokenizer import Tokenizer
from tidewheel.frontend.values import GenerateRequest
from tidewheel.sampling import SamplingParams, pack_biases


class Prepared(NamedTuple):
    message: AddRequest | CloseSession
    outputs: Outputs | None  # None: nothing is generated
    has_stop_strings: bool


class Preparer:
    """What a model's folder says of texts, loaded once. Thread-safe afterwards."""

    def __init__(self, info: EngineInfo, tokenizer_folder: Path, *, max_prompt_bytes: int) -> None:
        """Raises `ConfigError` in one line when the folders do not describe a usable tokenizer."""
        self._info = info
        self.tokenizer = Tokenizer.load(tokenizer_folder, vocab_size=info.vocab_size)
        self._defaults = GenerationDefaults.load(Path(info.model))
        self._eos_token_ids = tuple(
            sorted(i for i in self.tokenizer.eos_token_ids | self._defaults.eos_token_ids if i < info.vocab_size)
        )
        self._max_num_tokens = min(info.max_model_len, info.num_cache_tokens + 1)  # the last one is never cached
        self._prompts = PromptReader(
            self.tokenizer,
            ChatTemplate.load(tokenizer_folder, self.tokenizer.named_tokens),
            max_prompt_bytes=max_prompt_bytes,
            max_model_len=self._max_num_tokens,
        )

    def prepare(self, key: int, request: GenerateRequest, arrival_ns: int) -> Prepared:
        """Raises `InvalidRequest` or `Unsupported`."""
        sampling, options = parse_parameters(request.parameters, self._defaults.sampling)
        if options.close_session:
            return _close_session(key, request, options)
        prompt = self._prompts.read(request)
        max_tokens = self._max_tokens(sampling, len(prompt.token_ids))
        bias_token_ids, bias_amounts = pack_biases(sampling.logit_bias)
        message = AddRequest(
            key=key,
            prompt=prompt.token_ids.astype("<i4").tobytes(),
            sampling=dataclasses.replace(sampling, max_tokens=max_tokens, stop=(), bad_words=(), logit_bias={}),
            stop_token_ids=self._stop_token_ids(sampling),
            bad_words_ids=tuple(ids for word in sampling.bad_words for ids in self.tokenizer.phrase_ids(word)),
            bias_token_ids=bias_token_ids,
            bias_amounts=bias_amounts,
            **options.to_wire(arrival_ns, request.timeout_us),
        )
        check_request(message, self._info)
        echo = request.echo and not request.stream

        def open_streams() -> list[OutputStream]:
            stop = StopStrings(sampling.stop)
            return [OutputStream(self.tokenizer, prompt, sampling, stop, echo=echo) for _ in range(options.n)]

        outputs = Outputs(open_streams, len(prompt.token_ids), arrival_ns)
        return Prepared(message, outputs, bool(sampling.stop))

    def _max_tokens(self, sampling: SamplingParams, num_prompt_tokens: int) -> int:
        """What was asked for, or what still fits."""
        room = self._max_num_tokens - num_prompt_tokens
        for name, value in (("max_tokens", sampling.max_tokens), ("min_tokens", sampling.min_tokens)):
            if value is not None and value > room:
                raise InvalidRequest(
                    f"{name} is {value}: a prompt of {num_prompt_tokens} tokens leaves room for {room} "
                    f"in the context of {self._max_num_tokens}"
                )
        return room if sampling.max_tokens is None else sampling.max_tokens

    def _stop_token_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        eos = () if sampling.ignore_eos else self._eos_token_ids
        return tuple(dict.fromkeys((*eos, *sampling.stop_token_ids)))


def _close_session(key: int, request: GenerateRequest, options: RequestOptions) -> Prepared:
    if request.text or request.messages is not None or request.input_ids is not None:
        raise InvalidRequest("close_session is true, and there is a prompt: it takes none, or an empty text_input")
    return Prepared(CloseSession(key, options.tenant, options.session_id), None, False)
