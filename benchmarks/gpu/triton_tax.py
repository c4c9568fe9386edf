"""Cost of tritonserver: tokens streamed over gRPC to 256 clients, beside equal requests in-process.

Settings, temperature and random weights are equal; clients are several processes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from common.random_model import without_weights
from common.serving import served
from common.work_items import TEMPERATURE, WorkItem
from gpu.engine import headline_work, report_in_process, report_streams
from gpu.engine_steps import open_engine, settings_of, warm_up
from gpu.stage import Stage, logged, parser, run
from gpu.stream_client import stream_all
from modelled.roofline import SHAPES
from tidewheel.server import ServeError
from tidewheel.server.tritonserver import locate

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
                stage.check_time(NEEDS_S)
                work = headline_work(stage, model)
                folder = without_weights(Path(scratch) / model, SHAPES[model])
                _through_triton(stage, model, folder, work, 18_700 + 10 * number)
                if stage.options.in_process:
                    _in_process(stage, model, Path(scratch), work)


def _through_triton(stage: Stage, model: str, folder: Path, work: list[WorkItem], ports: int) -> None:
    num_clients = 2 if stage.is_dry else NUM_CLIENTS
    with logged(folder / "clients.log") as log, served(folder, settings_of(stage), ports=ports) as address:
        few = [WorkItem(item.input_ids, 8) for item in work[:num_clients]]
        stream_all(address.grpc, address.model, few, num_clients, log)
        begin_at, streams = stream_all(address.grpc, address.model, work, num_clients, log)
    end = max(stream.arrivals[-1][0] for stream in streams)
    num_tokens = sum(count for stream in streams for _, count in stream.arrivals)
    first = [stream.arrivals[0][0] - begin_at for stream in streams]
    gaps = [gap for stream in streams for gap in stream.gaps]
    report_streams(stage, model, "through Triton", num_tokens, end - begin_at, gaps, first)
    chunks = sum(len(stream.arrivals) for stream in streams)
    stage.facts(model=model, tokens_per_response=num_tokens / chunks)


def _in_process(stage: Stage, model: str, folder: Path, work: list[WorkItem]) -> None:
    with open_engine(stage, model, folder) as engine:
        warm_up(engine, work, TEMPERATURE)
        report_in_process(stage, model, engine.timed(work, TEMPERATURE), work)


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--in-process", action="store_true", help="measure that too, as gpu.engine does")
    run("triton_tax", body, made.parse_args())
