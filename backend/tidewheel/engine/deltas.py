from __future__ import annotations

from tidewheel.batch import TopLogprobs
from tidewheel.engine.messages import WHOLE_REQUEST, Delta, ErrorInfo, RequestStats
from tidewheel.errors import InternalError, TidewheelError, WaitingSetFull
from tidewheel.request import FinishReason, Request


def final_delta(
    key: int, index: int, request: Request, token_ids: list[int], logprobs: TopLogprobs | None = None
) -> Delta:
    """Return the last delta of a sequence, with the tokens of its last step."""
    error = request.error
    if error is None and request.finish_reason is FinishReason.ERROR:
        error = InternalError("the request ended with an error that left no message")
    return Delta(
        key=key,
        token_ids=token_ids,
        finish_reason=str(request.finish_reason),
        error=None if error is None else error_info(error),
        logprobs=None if logprobs is None else [logprobs],
        stats=request_stats(request),
        index=index,
    )


def refusal(key: int, error: TidewheelError) -> Delta:
    info = error_info(error)
    return Delta(key=key, token_ids=[], finish_reason=FinishReason.ERROR.value, error=info, index=WHOLE_REQUEST)


def error_info(error: TidewheelError) -> ErrorInfo:
    return ErrorInfo(error.tag, error.message, error.retry_after_ms, isinstance(error, WaitingSetFull))


def request_stats(request: Request) -> RequestStats:
    return RequestStats(
        first_scheduled_ns=_ns(request.first_scheduled_time),
        first_token_ns=_ns(request.first_token_time),
        last_token_ns=_ns(request.last_token_time),
        num_cached_tokens=request.num_cached_tokens,
        num_reused_blocks=request.num_reused_blocks,
        num_new_blocks=request.num_new_blocks,
        num_preemptions=request.num_preemptions,
        priority=int(request.priority),
    )


def _ns(seconds: float | None) -> int:
    return 0 if seconds is None else int(seconds * 1e9)
