"""The engine in-process, for offline batches and tests:

    with LLM("path/to/model", dtype="float32") as llm:
        results = llm.generate(["The sea is", {"input_ids": [5, 6, 7]}], SamplingParams(max_tokens=20))

It is the step loop of the engine process, on the thread of the caller, without processes and sockets.
"""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tidewheel.batch import Int32Array, StepOutputs, TopLogprobs
from tidewheel.config import EngineConfig
from tidewheel.engine.build import build_scheduler, engine_info, load_model_runner
from tidewheel.engine.core import EngineCore
from tidewheel.engine.messages import AddRequest, EngineInfo
from tidewheel.engine.requests import SessionTtl, to_requests
from tidewheel.errors import Cancelled, InvalidRequest, TidewheelError, WaitingSetFull
from tidewheel.frontend.defaults import GenerationDefaults
from tidewheel.frontend.options import RequestOptions
from tidewheel.request import FinishReason, Request
from tidewheel.sampling import SamplingParams
from tidewheel.stats import EngineStats

if TYPE_CHECKING:
    from tqdm import tqdm

    from tidewheel.frontend.tokenizer import Tokenizer

T = TypeVar("T", SamplingParams, RequestOptions)
Prompt = str | Mapping[str, Sequence[int] | Int32Array]  # text, or {"input_ids": token ids}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """What became of one prompt, or of one of its `n` sequences."""

    text: str  # empty without a tokenizer
    token_ids: list[int]  # with the stop token, if one ended it
    finish_reason: str  # stop, length, deadline or error
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    logprobs: list[TopLogprobs] | None  # aligned with token_ids, when asked for
    cumulative_logprob: float | None
    error: TidewheelError | None  # with finish_reason error
    index: int = 0  # of the sequence


class LLM:
    """One model, ready to generate. Not thread safe.

    `settings` are those of `EngineConfig`: `dtype`, `num_blocks`, `block_size`, `max_num_batched_tokens`, …
    With `skip_tokenizer_init` prompts are token ids, and results have no text. Raises `ConfigError`.
    """

    def __init__(self, model: str | Path, *, skip_tokenizer_init: bool = False, **settings: object) -> None:
        self.config = EngineConfig.from_settings({"model": str(model), **settings})
        runner = load_model_runner(self.config)
        self.info: EngineInfo = engine_info(runner.info, self.config)
        self._defaults = GenerationDefaults.load(Path(self.info.model))
        self._tokenizer = None if skip_tokenizer_init else self._load_tokenizer()
        self._eos_ids = self._defaults.eos_token_ids
        if self._tokenizer is not None:
            self._eos_ids |= self._tokenizer.eos_token_ids
        self._seeds = random.Random(self.config.seed)  # noqa: S311 - samples tokens, guards nothing
        self._waiting: deque[list[Request]] = deque()  # groups not yet accepted by the scheduler
        self._outputs: dict[str, _Output] = {}  # unfinished, by request id
        self._core: EngineCore | None = EngineCore(
            build_scheduler(self.config, self.info), runner, self._deliver, receive=self._feed
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[GenerationResult]:
        """Results in the order of the prompts, with `n` over 1 those of its sequences one after the other.

        `params` and `options`: one for all, or one each; without them the model's own defaults. Deadlines count from
        this call. Raises `InvalidRequest` before anything runs if a prompt or its parameters cannot work.
        """
        core, now_ns = self._open_core(), time.monotonic_ns()
        prompts = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        sampling = self._params(params, len(prompts))
        served = _each("options", options or RequestOptions(), len(prompts))
        given = zip(prompts, sampling, served, strict=True)
        groups = [self._prepare(number, *one, now_ns) for number, one in enumerate(given)]
        outputs = [output for group in groups for output in group]
        self._waiting.extend(
            sorted(([output.request for output in group] for group in groups), key=lambda group: group[0].priority)
        )
        self._outputs = {output.request.request_id: output for output in outputs}
        try:
            with _progress(len(outputs), use_tqdm) as bar:
                self._run(core, bar)
        finally:
            self._waiting.clear()
            core.fail_all(Cancelled("generate was interrupted"))
        return [output.result() for output in outputs]

    def close_session(self, session_id: str, *, tenant: str = "") -> None:
        """Gives the blocks of a session back. Raises `NotFound`."""
        self._open_core().close_session(tenant, session_id)

    def stats(self) -> EngineStats:
        return self._open_core().stats()

    def close(self) -> None:
        """Gives the memory of the model and the cache back."""
        self._core = None
        gc.collect()
        if not self.info.device.startswith("cpu"):
            import torch

            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- before -----------------------------------------------------------------------------------------------

    def _open_core(self) -> EngineCore:
        if self._core is None:
            raise RuntimeError("this LLM was closed")
        return self._core

    def _load_tokenizer(self) -> Tokenizer:
        from tidewheel.frontend.tokenizer import Tokenizer

        return Tokenizer.load(Path(self.config.tokenizer or self.info.model), vocab_size=self.info.vocab_size)

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> Sequence[SamplingParams]:
        if params is None:
            params = SamplingParams(**self._defaults.sampling)  # type: ignore[arg-type]
        return _each("params", params, num_prompts)

    def _prepare(
        self, number: int, prompt: Prompt, sampling: SamplingParams, options: RequestOptions, now_ns: int
    ) -> list[_Output]:
        tokenizer = self._tokenizer
        if tokenizer is None and (isinstance(prompt, str) or sampling.stop or sampling.bad_words):
            raise InvalidRequest("text prompts, stop and bad_words need a tokenizer: leave skip_tokenizer_init out")
        if isinstance(prompt, str):
            assert tokenizer is not None
            prompt_ids = tokenizer.encode(prompt)
        else:
            prompt_ids = _input_ids(prompt)
        bad_words = (
            () if tokenizer is None else tuple(ids for w in sampling.bad_words for ids in tokenizer.phrase_ids(w))
        )
        eos_ids = frozenset() if sampling.ignore_eos else self._eos_ids
        message = AddRequest(
            key=number,
            prompt=prompt_ids.astype("<i4").tobytes(),
            sampling=sampling,
            stop_token_ids=tuple(sorted({*eos_ids, *sampling.stop_token_ids})),
            bad_words_ids=bad_words,
            **options.to_wire(now_ns),
        )
        requests = to_requests(
            message,
            self.info,
            SessionTtl(self.config.session_ttl_s, self.config.max_session_ttl_s),
            request_ids=[f"{number}.{index}" for index in range(options.n)],
            seed=self._seeds.getrandbits(64),
            now=now_ns * 1e-9,
        )
        return [_Output(request, tokenizer, index) for index, request in enumerate(requests)]

    # --- steps ------------------------------------------------------------------------------------------------

    def _run(self, core: EngineCore, bar: tqdm) -> None:
        num_left = len(self._outputs)
        while self._outputs or core.has_unfinished:
            core.step()
            bar.update(num_left - len(self._outputs))
            num_left = len(self._outputs)

    def _feed(self) -> None:
        """As many as the scheduler lets wait; the others follow."""
        core = self._open_core()
        while self._waiting:
            group = self._waiting[0]
            try:
                core.add_group(group)
            except WaitingSetFull:
                return  # somebody waits, so there is a step to come
            except InvalidRequest:
                raise
            except TidewheelError as error:
                for request in group:
                    self._outputs.pop(request.request_id).error = error
            self._waiting.popleft()

    def _deliver(self, outputs: StepOutputs) -> None:
        core, logprobs = self._open_core(), outputs.logprobs or {}
        for index, (request, token_id) in enumerate(zip(outputs.requests, outputs.token_ids, strict=True)):
            output = self._outputs[request.request_id]
            output.push(token_id, logprobs.get(index))
            if output.is_stopped and not request.is_finished:
                core.cancel(request.request_id, FinishReason.STOP)
        for request in outputs.finished:
            self._outputs.pop(request.request_id, None)


class _Output:
    """What one sequence has generated so far."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, index: int) -> None:
        from tidewheel.frontend.detokenizer import Detokenizer
        from tidewheel.frontend.stop import StopChecker, StopStrings

        self.request = request
        self.error: TidewheelError | None = None  # why it was never accepted
        self._index = index
        sampling = request.sampling
        self._text = ""
        self._num_tokens = 0
        self._logprobs: list[TopLogprobs] = []
        stop = StopStrings(sampling.stop)
        self._stop = StopChecker(stop, include_in_output=sampling.include_stop_str_in_output)
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(
                tokenizer, request.prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens
            )

    @property
    def is_stopped(self) -> bool:
        """A stop string is complete."""
        return self._stop.is_hit

    def push(self, token_id: int, logprobs: TopLogprobs | None) -> None:
        if logprobs is not None:
            self._logprobs.append(logprobs)
        request = self.request
        self._num_tokens += 1
        is_hidden = request.stop_reason is not None and not request.sampling.include_stop_str_in_output
        if self._detokenizer is not None and not is_hidden:
            may_stop = self._num_tokens >= request.sampling.min_tokens
            self._text += self._stop.push(self._detokenizer.push([token_id]), may_stop=may_stop)

    def result(self) -> GenerationResult:
        request = self.request
        if self._detokenizer is not None:
            self._text += self._stop.push(self._detokenizer.flush()) + self._stop.flush()
        with_logprobs = request.sampling.logprobs is not None
        return GenerationResult(
            text=self._text,
            token_ids=request.output_token_ids,
            finish_reason=FinishReason.STOP if self.is_stopped else str(request.finish_reason or FinishReason.ERROR),
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            logprobs=self._logprobs if with_logprobs else None,
            cumulative_logprob=sum(entry.logprob for entry in self._logprobs) if with_logprobs else None,
            error=self.error or request.error,
            index=self._index,
        )


def _each(name: str, given: T | Sequence[T], num_prompts: int) -> Sequence[T]:
    """One for each prompt."""
    if not isinstance(given, Sequence):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise InvalidRequest(f"{len(given)} {name} for {num_prompts} prompts: give one, or one for each")
    return given


def _input_ids(prompt: Mapping[str, Sequence[int] | Int32Array]) -> Int32Array:
    """Token ids of a prompt, [num_prompt_tokens]; `prompt_token_ids` is vLLM's name for them."""
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


def _progress(total: int, is_shown: bool) -> tqdm:
    from tqdm import tqdm

    return tqdm(total=total, desc="generate", unit="prompt", disable=not is_shown)
