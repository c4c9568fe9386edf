from typing import NamedTuple

OURS = ("continuous", "predictive", "hybrid", "dynamic", "static")


class BenchError(Exception):
    """Impossible measurement; the message says what to change."""


class SuiteDefaults(NamedTuple):
    text: str
    targets: tuple[str, ...]
    workload: str
    loads: tuple[str, ...] = ()


SUITES: dict[str, SuiteDefaults] = {
    "run": SuiteDefaults("the targets at the loads that are given", ("continuous",), "mixed", ("closed:8",)),
    "compare": SuiteDefaults(
        "the capacity of every strategy, Triton's own batcher and transformers under an objective; then offline with "
        "vLLM and OpenVINO, if named",
        (*OURS, "baseline_dynamic", "baseline_static", "transformers"),
        "sharegpt:0.25",
    ),
    "batch": SuiteDefaults("1 to 128 requests in flight: throughput, latency, utilisation", ("continuous",), "fixed"),
    "rates": SuiteDefaults(
        "10, 100 and 500 requests/s, scaled to the machine, by batch, asynchronous and hybrid strategies",
        ("static", "continuous", "hybrid"),
        "sharegpt:0.25",
    ),
    "mix": SuiteDefaults(
        "text, images and speech under three policies, and as plain Triton instances; needs --one-shot",
        (
            *(f"{policy}=continuous,scheduling_policy={policy}" for policy in ("priority", "fifo", "density")),
            "plain=baseline_dynamic",
        ),
        "mix",
    ),
    "offline": SuiteDefaults("all requests at once, by engines without a server", ("llm", "transformers"), "mixed"),
    "efficiency": SuiteDefaults(
        "offline: each engine on mixed lengths and on a shared prompt, against itself without",
        ("llm", "transformers"),
        "mixed",
    ),
}
