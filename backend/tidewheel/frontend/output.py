"""The output of one sequence, from the engine's deltas to the chunks that its client gets."""

from __future__ import annotations

from tidewheel.engine.messages import Delta, TokenLogprobs
from tidewheel.frontend.detokenizer import Detokenizer
from tidewheel.frontend.prompt import Prompt
from tidewheel.frontend.stop import StopChecker, StopStrings
from tidewheel.frontend.tokenizer import Tokenizer
from tidewheel.frontend.values import Chunk, PerfMetrics, TokenLogprob
from tidewheel.request import FinishReason
from tidewheel.sampling import SamplingParams


class OutputStream:
    """Collects what is new until `take`. Used by one thread at a time.

    The chunks' texts joined do not depend on how the engine split the tokens into deltas, nor on when they are taken.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Prompt, sampling: SamplingParams, stop: StopStrings, *, echo: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._detokenizer = Detokenizer(tokenizer, prompt.token_ids, skip_special_tokens=sampling.skip_special_tokens)
        self._stop = StopChecker(stop, include_in_output=sampling.include_stop_str_in_output)
        self.num_input_tokens = len(prompt.token_ids)
        self.finish_reason: str | None = None
        self._num_tokens = 0
        self._wants_logprobs = sampling.logprobs is not None
        self._cumulative_logprob = 0.0
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._text = [self._prompt_text(prompt)] if echo else []

    @property
    def has_news(self) -> bool:
        return bool(self._token_ids)

    def push(self, delta: Delta) -> None:
        """Behind the end, that of a stop string included, nothing is output any more."""
        if self.finish_reason is not None:
            return
        # The token that ended the request is no text, unless that is asked for.
        ends = delta.finish_reason == FinishReason.STOP and not self._sampling.include_stop_str_in_output
        visible = delta.token_ids[:-1] if ends else delta.token_ids
        num_taken = self._push_text(visible)
        if not self._stop.is_hit:
            num_taken = len(delta.token_ids)
        self._record(delta.token_ids[:num_taken], delta.logprobs)
        if self._stop.is_hit:
            self.finish_reason = FinishReason.STOP.value

    def end(self, finish_reason: str) -> None:
        """What was held back is output; the first end counts."""
        if self.finish_reason is None:
            self.finish_reason = finish_reason
            self._text.append(self._stop.push(self._detokenizer.flush(), may_stop=False) + self._stop.flush())

    def take(self, perf: PerfMetrics | None = None) -> Chunk:
        """What is new since the last one."""
        chunk = Chunk(
            text="".join(self._text),
            token_ids=self._token_ids,
            logprobs=self._logprobs if self._wants_logprobs else None,
            cumulative_logprob=self._cumulative_logprob if self._wants_logprobs else None,
            num_input_tokens=self.num_input_tokens,
            finish_reason=self.finish_reason,
            perf=perf,
        )
        self._text, self._token_ids, self._logprobs = [], [], []
        return chunk

    def _push_text(self, token_ids: list[int]) -> int:
        """Returns how many tokens it took until a stop string was found."""
        if not self._sampling.stop:
            self._text.append(self._detokenizer.push(token_ids))
            return len(token_ids)
        for index, token_id in enumerate(token_ids, start=1):
            may_stop = self._num_tokens + index > self._sampling.min_tokens
            self._text.append(self._stop.push(self._detokenizer.push((token_id,)), may_stop=may_stop))
            if self._stop.is_hit:
                return index
        return len(token_ids)

    def _record(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        self._token_ids += token_ids
        self._num_tokens += len(token_ids)
        if logprobs is None:
            return
        for token_id, entry in zip(token_ids, logprobs, strict=False):  # a stop string leaves the rest out
            self._cumulative_logprob += entry.logprob
            self._logprobs.append(self._named(token_id, entry))

    def _named(self, token_id: int, entry: TokenLogprobs) -> TokenLogprob:
        text_of = self._tokenizer.token_text
        entries = {token_id: (entry.logprob, entry.rank, text_of(token_id))}
        for rank, (top_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
            entries.setdefault(top_id, (logprob, rank, text_of(top_id)))
        return TokenLogprob(token_id=token_id, entries=entries)

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(
            prompt.token_ids.tolist(), skip_special_tokens=self._sampling.skip_special_tokens
        )
