"""Engine in the caller's process, for offline batches and tests.

    with LLM("path/to/model", dtype="float32") as llm:
        results = llm.generate(["The sea is", {"input_ids": [5, 6, 7]}], SamplingParams(max_tokens=20))

Everything runs on the caller's thread, without sockets.
"""

import gc
import itertools
import random
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from tidewheel.batch import Int32Array, StepOutputs
from tidewheel.config import EngineConfig
from tidewheel.engine.build import LoadedRunner, RankedRunner, build_scheduler, engine_info, load_model_runner
from tidewheel.engine.core import EngineCore
from tidewheel.engine.grammar_queue import GrammarCache
from tidewheel.engine.lora_registry import LoraRegistry
from tidewheel.engine.messages import AddRequest, Delta, EngineInfo
from tidewheel.engine.requests import to_requests
from tidewheel.errors import Cancelled, InvalidRequest, TidewheelError
from tidewheel.frontend.output import Generation, Outputs
from tidewheel.frontend.request_reader import MessageMaker, truncated
from tidewheel.frontend.settings import GenerationDefaults
from tidewheel.frontend.speech import SpeechRules
from tidewheel.frontend.tokenizer import Tokenizer
from tidewheel.grammar import TokenGrammar
from tidewheel.request import FinishReason, Request, WeightsUsed
from tidewheel.request_options import RequestOptions
from tidewheel.runner.grammar_compiler import GrammarCompiler
from tidewheel.sampling import SamplingParams, TopLogprobs
from tidewheel.stats import EngineStats

T = TypeVar("T", SamplingParams, RequestOptions)
_UNLIMITED = 1 << 62
Prompt = str | Mapping[str, Any]  # text, {"input_ids": token ids}, or {"audio": samples, "language": "en"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    text: str  # empty without a tokenizer
    token_ids: list[int]  # includes a stop token
    finish_reason: str  # stop, length, deadline or error
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt
    logprobs: list[TopLogprobs] | None  # aligned with token_ids
    prompt_logprobs: list[TopLogprobs | None] | None  # aligned with the prompt; None for its first token
    cumulative_logprob: float | None
    error: TidewheelError | None  # if finish_reason is error
    index: int = 0
    weights: WeightsUsed = "full"


class _Prompt(NamedTuple):
    requests: list[Request]
    outputs: Outputs

    def results(self) -> list[GenerationResult]:
        self.outputs.end(FinishReason.ERROR.value)  # sequences that an error ended
        leader, pairs = self.requests[0], zip(self.requests, self.outputs.take(), strict=True)
        prompt_logprobs = None if leader.sampling.prompt_logprobs is None else [None, *leader.prompt_logprobs]
        return [
            GenerationResult(
                text=chunk.text,
                token_ids=chunk.token_ids,
                finish_reason=chunk.finish_reason or FinishReason.ERROR.value,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=request.num_cached_tokens,
                logprobs=chunk.logprobs,
                prompt_logprobs=prompt_logprobs,
                cumulative_logprob=chunk.cumulative_logprob,
                error=request.error,
                index=index,
                weights=request.weights_used,
            )
            for index, (request, chunk) in enumerate(pairs)
        ]


class LLM(AbstractContextManager["LLM"]):
    """Loaded model that generates. Not thread-safe.

    `settings` are fields of `EngineConfig`, or engine arguments of vLLM. With `skip_tokenizer_init`, prompts are
    token ids and results have no text. Raise `ConfigError`.
    """

    def __init__(self, model: str | Path, *, skip_tokenizer_init: bool = False, **settings: object) -> None:
        self.config = EngineConfig.from_settings({"model": str(model), **settings})
        runner = load_model_runner(self.config)
        # Called by `close`, when the object is freed or the program ends, and if the rest of the start fails.
        self._end_ranks = weakref.finalize(self, runner.close if isinstance(runner, RankedRunner) else lambda: None)
        try:
            self._make_core(runner, skip_tokenizer_init=skip_tokenizer_init)
        except BaseException:
            self._end_ranks()
            raise

    def _make_core(self, runner: LoadedRunner, *, skip_tokenizer_init: bool) -> None:
        self.info: EngineInfo = engine_info(runner.info, self.config)
        folder = Path(self.config.tokenizer or self.info.model)
        self._tokenizer = None if skip_tokenizer_init else Tokenizer.load(folder, vocab_size=self.info.vocab_size)
        source = self.config.generation_config or "auto"
        defaults = GenerationDefaults.load(Path(self.info.model), source, self.config.override_generation_config)
        self._maker = MessageMaker(self.info, self._tokenizer, defaults)
        self._seeds = random.Random(self.config.seed)  # noqa: S311 - samples tokens, guards nothing
        self._compiler = GrammarCompiler(folder, self.info.vocab_size)
        self._grammars = GrammarCache()
        self._open: dict[str, tuple[_Prompt, int]] = {}  # unfinished sequences by request id
        config = replace(self.config, max_waiting_requests=_UNLIMITED, max_waiting_tokens=_UNLIMITED)
        self._scheduler = build_scheduler(config, self.info, time.monotonic)
        self._loras = LoraRegistry(config, runner, self._scheduler.loras)
        self._core: EngineCore | None = EngineCore(self._scheduler, runner, self._deliver, receive=self._loras.poll)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        *,
        lora_name: str = "",
        use_tqdm: bool = True,
    ) -> list[GenerationResult]:
        """Return results in prompt order, a prompt's `n` sequences together.

        Give `params` and `options` for all prompts, or one each. Default `params` are the model's. Deadlines count
        from this call. `lora_name`: adapter of prompts whose options name none. Raise `InvalidRequest`, or `NotFound`
        for an adapter, before anything runs.
        """
        from tqdm import tqdm

        core, now_ns = self._open_core(), time.monotonic_ns()
        prompts = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        if params is None:
            params = SamplingParams(**self._maker.defaults.sampling)
        sampling = _each("params", params, len(prompts))
        served = [
            one if one.lora_name or not lora_name else msgspec.structs.replace(one, lora_name=lora_name)
            for one in _each("options", options or RequestOptions(), len(prompts))
        ]
        given = zip(prompts, sampling, served, strict=True)
        prepared = [self._prepare(number, *one, now_ns) for number, one in enumerate(given)]
        self._open = {
            request.request_id: (prompt, index)
            for prompt in prepared
            for index, request in enumerate(prompt.requests)
        }
        try:
            for one in sorted(prepared, key=lambda prompt: prompt.requests[0].priority):
                self._add(core, one)
            with tqdm(total=len(self._open), desc="generate", unit="prompt", disable=not use_tqdm) as bar:
                while self._open or core.has_unfinished:
                    num_open = len(self._open)
                    if not core.step():
                        self._loras.wait()
                    bar.update(num_open - len(self._open))
        finally:
            core.fail_all(Cancelled("generate was interrupted"))
        return [result for prompt in prepared for result in prompt.results()]

    def close_session(self, session_id: str, *, tenant: str = "") -> None:
        """End a session and free its KV blocks. Raise `NotFound` if unknown."""
        self._open_core()
        self._scheduler.close_session(tenant, session_id)

    def stats(self) -> EngineStats:
        return self._open_core().stats()

    def close(self) -> None:
        self._end_ranks()
        self._core = None
        self._loras.close()
        gc.collect()
        if not self.info.device.startswith("cpu"):
            import torch

            torch.cuda.empty_cache()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_core(self) -> EngineCore:
        if self._core is None:
            raise RuntimeError("this LLM was closed")
        return self._core

    def _prepare(
        self, number: int, prompt: Prompt, sampling: SamplingParams, options: RequestOptions, now_ns: int
    ) -> _Prompt:
        if self._maker.speech is not None:
            given = _speech(self._maker.speech, prompt, sampling, options)
        else:
            prompt_ids = truncated(self._prompt_ids(prompt, sampling), sampling, self.info)
            given = Generation(prompt_ids, sampling, options)
        message, outputs = self._maker.prepare(number, given, now_ns)
        requests = to_requests(
            message,
            self.info,
            self.config,
            request_ids=[f"{number}.{index}" for index in range(options.n)],
            seed=self._seeds.getrandbits(64),
            now=now_ns * 1e-9,
            grammar=self._grammar(message) if message.grammar else None,
            lora=self._loras.find(options.lora_name),
        )
        return _Prompt(requests, outputs)

    def _grammar(self, message: AddRequest) -> TokenGrammar:
        source = message.grammar
        grammar = self._grammars.find(source) or self._compiler.compile(source, message.grammar_name)
        self._grammars.keep(source, grammar)
        return grammar

    def _prompt_ids(self, prompt: Prompt, sampling: SamplingParams) -> Int32Array:
        if self._tokenizer is not None and isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        if isinstance(prompt, str) or (self._tokenizer is None and (sampling.stop or sampling.bad_words)):
            raise InvalidRequest("text prompts, stop and bad_words need a tokenizer: leave skip_tokenizer_init out")
        return _input_ids(prompt)

    def _add(self, core: EngineCore, prompt: _Prompt) -> None:
        try:
            core.add_group(prompt.requests)
        except InvalidRequest:
            raise
        except TidewheelError as error:
            for request in prompt.requests:
                request.error = error
                del self._open[request.request_id]

    def _deliver(self, outputs: StepOutputs) -> None:
        logprobs, token_ids = outputs.logprobs or {}, outputs.token_ids.tolist()
        for request, group in itertools.groupby(range(len(token_ids)), outputs.requests.__getitem__):
            positions = list(group)
            entries = [logprobs[position] for position in positions if position in logprobs]
            self._push(request, [token_ids[position] for position in positions], entries or None)
        for request in outputs.finished:
            self._push(request, [])

    def _push(self, request: Request, token_ids: list[int], logprobs: list[TopLogprobs] | None = None) -> None:
        found = self._open.get(request.request_id)
        if found is None:
            return
        prompt, index = found
        if request.finish_reason is not None:
            del self._open[request.request_id]
        if prompt.outputs.push([Delta.of(0, index, request, token_ids, logprobs)]):
            self._open_core().cancel(request.request_id, FinishReason.STOP)


def _each(name: str, given: T | Sequence[T], num_prompts: int) -> Sequence[T]:
    if not isinstance(given, Sequence):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise InvalidRequest(f"{len(given)} {name} for {num_prompts} prompts: give one, or one for each")
    return given


def _speech(rules: SpeechRules, prompt: Prompt, sampling: SamplingParams, options: RequestOptions) -> Generation:
    if isinstance(prompt, str) or "audio" not in prompt or not prompt.keys() <= {"audio", "language", "translate"}:
        raise InvalidRequest("a speech model takes {'audio': samples, 'language': 'en', 'translate': False}")
    prompt_ids = rules.prompt(str(prompt.get("language", "")), translate=bool(prompt.get("translate", False)))
    return Generation(prompt_ids, sampling, options, audio=np.asarray(prompt["audio"], np.float32))


def _input_ids(prompt: Mapping[str, Any]) -> Int32Array:
    names = [name for name in ("input_ids", "prompt_token_ids") if name in prompt]
    if len(names) != 1 or len(prompt) != 1:
        raise InvalidRequest(f"a prompt is text or {{'input_ids': [...]}}, not a dict with {sorted(prompt)}")
    ids = np.asarray(prompt[names[0]])
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidRequest(
            f"{names[0]} must be a list of integers, not an array of {ids.dtype} with {ids.ndim} axes"
        )
    if ids.size and (ids.min() < 0 or ids.max() >= 2**31):
        raise InvalidRequest(f"{names[0]} has token ids from {ids.min()} to {ids.max()}: they are 0 to 2147483647")
    return ids.astype(np.int32)
