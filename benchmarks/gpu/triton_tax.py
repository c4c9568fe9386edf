"""Cost of tritonserver: tokens streamed over gRPC to 256 clients, beside equal requests in-process.

    python -m gpu.triton_tax --in-process

Settings, temperature and random weights are equal; clients are several processes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from gpu.engine import headline_work, report_in_process
from gpu.engine_steps import DRY, OFFLINE, open_engine, warm_up
from gpu.models import without_weights
from gpu.stage import Stage, parser, run
from gpu.stream_client import stream_all
from gpu.streams import THROUGH_TRITON, report_streams
from gpu.work import TEMPERATURE
from serving import served
from tidewheel.server import ServeError
from tidewheel.server.locate import locate
from workload import WorkItem

NUM_CLIENTS = 8  # processes
NEEDS_S = 30.0
HOW = "benchmarks/gpu/README.md says how to bring one"


def body(stage: Stage) -> None:
    try:
        install = locate(None)
    except ServeError as error:
        stage.skip("Triton tax", f"{error}. {HOW}")
        return
    stage.facts(tritonserver=install.origin)
    with tempfile.TemporaryDirectory() as scratch:
        for number, model in enumerate(stage.models):
            with stage.part(f"Triton tax, {model}"):
                stage.check_time(0.0 if stage.is_dry else NEEDS_S)
                folder = without_weights(Path(scratch), model)
                work = headline_work(stage, model)
                _through_triton(stage, model, folder, work, 18_700 + 10 * number)
                if stage.options.in_process:
                    _in_process(stage, model, Path(scratch), work)


def _through_triton(stage: Stage, model: str, folder: Path, work: list[WorkItem], ports: int) -> None:
    settings: dict[str, object] = {
        "device": stage.device.type, "dtype": "bfloat16", "load_format": "dummy", "enable_prefix_caching": "false",
        **OFFLINE, **(DRY if stage.is_dry and not stage.is_cuda else {}),
    }  # fmt: skip
    num_clients = 2 if stage.is_dry else NUM_CLIENTS
    with served(folder, settings, ports=ports) as address:
        few = [WorkItem(item.input_ids, 8) for item in work[:num_clients]]
        stream_all(address.grpc, address.model, few, num_clients)
        begin_at, streams = stream_all(address.grpc, address.model, work, num_clients)
    end = max(stream.arrivals[-1][0] for stream in streams)
    num_tokens = sum(count for stream in streams for _, count in stream.arrivals)
    first = [stream.arrivals[0][0] - begin_at for stream in streams]
    gaps = [gap for stream in streams for gap in stream.gaps()]
    report_streams(stage, model, THROUGH_TRITON, num_tokens, end - begin_at, gaps, first)
    chunks = sum(len(stream.arrivals) for stream in streams)
    stage.facts(model=model, tokens_per_response=num_tokens / chunks)


def _in_process(stage: Stage, model: str, folder: Path, work: list[WorkItem]) -> None:
    engine = open_engine(stage, model, folder)
    try:
        warm_up(engine, work, TEMPERATURE)
        report_in_process(stage, model, engine.timed(work, TEMPERATURE), work)
    finally:
        engine.close()


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--in-process", action="store_true", help="measure that too, as gpu.engine does")
    run("triton_tax", body, made.parse_args())


if __name__ == "__main__":
    main()
