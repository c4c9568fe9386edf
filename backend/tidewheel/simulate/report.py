"""Figures of a run for tables, JSON and plots; times in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tidewheel.request import Priority
from tidewheel.simulate.outcomes import DEADLINE, FAILED, FINISHED, REFUSED, Outcomes
from tidewheel.simulate.replica import Replica
from tidewheel.workload.arrival_times import FloatArray

Report = dict[str, Any]  # JSON values
QUANTILES = (50, 90, 99)


def summarise(outcomes: Outcomes, replicas: Sequence[Replica]) -> Report:
    trace, span = outcomes.trace, max(outcomes.span, 1e-12)
    finished = outcomes.finished
    return {
        "num_requests": len(trace),
        "offered_per_s": trace.rate,
        "finished": int(finished.sum()),
        "refused": int((outcomes.ends == REFUSED).sum()),
        "past_deadline": int((outcomes.ends == DEADLINE).sum()),
        "failed": int((outcomes.ends == FAILED).sum()),
        "span_s": outcomes.span,
        "requests_per_s": float(finished.sum()) / span,
        "output_tokens_per_s": float(outcomes.output_tokens.sum()) / span,
        **latencies(outcomes, finished),
        "mean_in_system": float(np.nansum(outcomes.latency)) / span,  # Little's law
        "mean_waiting": float(np.nansum(outcomes.queue_time)) / span,
        "preemptions": int(outcomes.preemptions.sum()),
        "cached_share": float(outcomes.cached_tokens.sum()) / max(float(trace.prompt_tokens.sum()), 1.0),
        "classes": _classes(outcomes),
        "tenants": _tenants(outcomes),
        "fairness": jain_index(list(served_tokens(outcomes).values())),
        "replicas": _replicas(replicas, span),
    }


def latencies(outcomes: Outcomes, chosen: npt.NDArray[np.bool_]) -> Report:
    return {
        "ttft_s": distribution(outcomes.ttft[chosen]),
        "tpot_s": distribution(outcomes.tpot[chosen]),
        "latency_s": distribution(outcomes.latency[chosen]),
        "queue_s": distribution(outcomes.queue_time[chosen]),
    }


def distribution(values: FloatArray) -> dict[str, float | None]:
    """Return mean and quantiles without NaN; None for each if nothing is left."""
    values = values[~np.isnan(values)]
    if not len(values):
        return dict.fromkeys(("mean", *(f"p{quantile}" for quantile in QUANTILES)))
    quantiles = np.quantile(values, [quantile / 100 for quantile in QUANTILES])
    names = [f"p{quantile}" for quantile in QUANTILES]
    return {"mean": float(values.mean()), **dict(zip(names, quantiles.tolist(), strict=True))}


def jain_index(shares: Sequence[float]) -> float:
    """Return 1 for equal shares, 1/n if one has everything.

    "A Quantitative Measure of Fairness and Discrimination for Resource Allocation in Shared Computer Systems", Jain,
    Chiu, Hawe, DEC-TR-301 (1984).
    """
    total = sum(shares)
    if not total:
        return 1.0
    return total * total / (len(shares) * sum(share * share for share in shares))


def served_tokens(outcomes: Outcomes) -> dict[str, float]:
    """Return tokens by tenant, prompt and output, of requests finished by the last arrival.

    After it the queue empties and tenants no longer compete.
    """
    trace = outcomes.trace
    done = outcomes.finished & (outcomes.last_token <= trace.arrivals[-1])
    tokens = np.where(done, trace.prompt_tokens + outcomes.output_tokens, 0)
    sums = np.bincount(trace.tenants, weights=tokens, minlength=len(trace.tenant_names))
    present = np.bincount(trace.tenants, minlength=len(trace.tenant_names)) > 0
    return {name: float(sums[i]) for i, name in enumerate(trace.tenant_names) if present[i]}


def _classes(outcomes: Outcomes) -> dict[str, Report]:
    priorities = outcomes.trace.priorities
    return {
        priority.name: {
            "num_requests": int((priorities == priority).sum()),
            "refused": int(((priorities == priority) & (outcomes.ends == REFUSED)).sum()),
            **latencies(outcomes, outcomes.finished & (priorities == priority)),
        }
        for priority in Priority
        if (priorities == priority).any()
    }


def _tenants(outcomes: Outcomes) -> dict[str, Report]:
    trace = outcomes.trace
    served = served_tokens(outcomes)
    total = max(sum(served.values()), 1.0)
    return {
        name: {
            "num_requests": int((trace.tenants == index).sum()),
            "refused": int(((trace.tenants == index) & (outcomes.ends == REFUSED)).sum()),
            "served_share": served[name] / total,
            **latencies(outcomes, (outcomes.ends == FINISHED) & (trace.tenants == index)),
        }
        for index, name in enumerate(trace.tenant_names)
        if name in served
    }


def _replicas(replicas: Sequence[Replica], span: float) -> Report:
    steps = sum(replica.num_steps for replica in replicas)
    busy = [replica.busy_seconds / span for replica in replicas]
    return {
        "count": len(replicas),
        "steps": steps,
        "tokens_per_step": sum(replica.num_tokens for replica in replicas) / max(steps, 1),
        "busy_mean": float(np.mean(busy)),
        "busy_max": float(np.max(busy)),
    }


_COLUMNS = (
    ("finished", "finished", 1, "d"), ("refused", "refused", 1, "d"), ("req/s", "requests_per_s", 1, ".1f"),
    ("tok/s", "output_tokens_per_s", 1, ".0f"), ("TTFT p50", "ttft_s.p50", 1e3, ".0f"),
    ("p99 ms", "ttft_s.p99", 1e3, ".0f"), ("TPOT p50", "tpot_s.p50", 1e3, ".1f"),
    ("p99 ms", "tpot_s.p99", 1e3, ".1f"),
    ("mean s", "latency_s.mean", 1, ".2f"), ("waiting", "mean_waiting", 1, ".1f"),
    ("preempted", "preemptions", 1, "d"), ("Jain", "fairness", 1, ".3f"),
)  # fmt: skip


def table(reports: dict[str, Report], *, title: str) -> str:
    width = max(len(title), *(len(name) for name in reports))
    lines = [title.ljust(width) + "".join(heading.rjust(11) for heading, *_ in _COLUMNS)]
    for name, report in reports.items():
        cells = [_cell(_at(report, path), scale, form) for _, path, scale, form in _COLUMNS]
        lines.append(name.ljust(width) + "".join(cell.rjust(11) for cell in cells))
    return "\n".join(lines)


def parts_table(report: Report) -> str:
    lines = [f"{'':18}{'requests':>9}{'refused':>9}{'TTFT p50':>10}{'p99 ms':>9}{'latency p50':>13}{'p99 s':>9}"]
    parts = [("class", report["classes"])]
    if len(report["tenants"]) > 1:
        parts.append(("tenant", report["tenants"]))
    for kind, entries in parts:
        for name, part in entries.items():
            cells = (
                f"{part['num_requests']:>9}{part['refused']:>9}"
                f"{_cell(part['ttft_s']['p50'], 1e3, '.0f'):>10}{_cell(part['ttft_s']['p99'], 1e3, '.0f'):>9}"
                f"{_cell(part['latency_s']['p50'], 1, '.2f'):>13}{_cell(part['latency_s']['p99'], 1, '.2f'):>9}"
            )
            lines.append(f"{kind + ' ' + (name or 'none'):18}{cells}")
    return "\n".join(lines)


def _at(report: Report, path: str) -> float | None:
    value: Any = report
    for key in path.split("."):
        value = value[key]
    return None if value is None else float(value)


def _cell(value: float | None, scale: float, form: str) -> str:
    if value is None:
        return "-"
    return format(int(value), form) if form == "d" else format(value * scale, form)
