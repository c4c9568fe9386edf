from __future__ import annotations

import re
from collections.abc import Iterable

from tidewheel.errors import Busy, DeadlineExceeded
from tidewheel.request import Request
from tidewheel.stats import TenantFigures
from tidewheel.tenants import EVERYBODY

MAX_LABELS = 64
OTHERS = "other"
_LABEL_CHARS = 64


class TenantCounts:
    """Figures by label: the first `MAX_LABELS` configured tenants, and `other`.

    Refusals, evictions and deadlines missed before the start are rejections. Tokens count at the end.
    """

    def __init__(self, names: Iterable[str]) -> None:
        named = [name for name in names if name != EVERYBODY][:MAX_LABELS]
        self._labels = {name: _label(name) for name in named}
        self.figures = {label: TenantFigures() for label in (*self._labels.values(), OTHERS)}

    def observe_arrival(self, tenant: str, count: int) -> None:
        self._of(tenant).num_requests += count

    def observe_refusal(self, tenant: str, count: int) -> None:
        self._of(tenant).num_rejected += count

    def observe_start(self, request: Request, queue_seconds: float) -> None:
        figures = self._of(request.tenant)
        figures.num_started += 1
        figures.queue_seconds += queue_seconds

    def observe_end(self, request: Request) -> None:
        figures = self._of(request.tenant)
        if request.first_scheduled_time is not None:
            figures.num_prompt_tokens += request.num_prompt_tokens
            figures.num_output_tokens += request.num_output_tokens
        elif isinstance(request.error, Busy | DeadlineExceeded):
            figures.num_rejected += 1

    def _of(self, tenant: str) -> TenantFigures:
        return self.figures[self._labels.get(tenant, OTHERS)]


def _label(name: str) -> str:
    """Replace all but letters, digits, dot, hyphen and underscore, and truncate."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:_LABEL_CHARS]
