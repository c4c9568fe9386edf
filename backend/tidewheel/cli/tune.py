import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tidewheel.cli.usage import JSON_VERSION, UsageError

if TYPE_CHECKING:
    from tidewheel.config import EngineConfig
    from tidewheel.simulate.cost_model import CostModel
    from tidewheel.simulate.tuning import Prediction, Tuning
    from tidewheel.workload.traces import Trace

DEFAULT_COST = "h200-8b"
OBJECTIVES = ("goodput", "ttft-p99", "latency")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "a recording of `tidewheel serve --record`, or a trace, .jsonl or .csv, as `tidewheel simulate` reads it"
    add("record", type=Path, metavar="RECORD", help=text)
    text = "present settings: a model.json, an entry, or a repository of one entry (default: the recording's)"
    add("--settings", type=Path, metavar="PATH", help=text)
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="replace one present setting (repeatable)")
    text = f"how long a step takes, as for simulate (default: fitted to the recording; for a trace {DEFAULT_COST})"
    add("--cost", metavar="FILE|NAME", help=text)
    text = (
        "what to improve: goodput, the share of requests within their objectives (if none has any: first token in "
        "1 s, others in 0.1 s); p99 of the first token; or mean latency (default: %(default)s)"
    )
    add("--objective", choices=OBJECTIVES, default=OBJECTIVES[0], help=text)
    text = "upper limit of simulations, each of half the record (default: %(default)s)"
    add("--simulations", type=int, default=60, metavar="N", help=text)
    add("--seed", type=int, default=0, metavar="N", help="random seed of the 95 %% intervals (default: %(default)s)")
    add("--json", action="store_true", help="print the result as JSON")


class RecordedLoad(NamedTuple):
    trace: "Trace"
    config: "EngineConfig"
    cost: "CostModel"


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from tidewheel.simulate.tuning import OBJECTIVES as MEASURES
    from tidewheel.simulate.tuning import Search

    if args.seed < 0:
        raise UsageError(f"--seed is {args.seed}: it must be at least 0")
    load = _load(args)
    with tqdm(total=args.simulations, unit=" simulations", disable=None) as bar:
        search = Search(
            load.config,
            load.trace,
            load.cost,
            MEASURES[args.objective],
            num_simulations=args.simulations,
            seed=args.seed,
            simulated=bar.update,
        )
        tuning = search.run()
    print(json.dumps(_as_json(tuning), indent=1) if args.json else "\n".join(_lines(load, args.simulations, tuning)))
    return 0


def _load(args: argparse.Namespace) -> RecordedLoad:
    from tidewheel.cli.simulation import cost_of, trace_file
    from tidewheel.config import EngineConfig
    from tidewheel.one_shot.adapters import with_kind
    from tidewheel.server.repository import parse_settings
    from tidewheel.simulate.calibration import calibrated
    from tidewheel.simulate.recorded_load import is_recording, trace_of
    from tidewheel.simulate.replay import Recording
    from tidewheel.simulate.scenario import MODEL

    if not args.record.is_file():
        raise UsageError(f"RECORD {args.record}: no such file")
    settings: dict[str, object] = {}
    if is_recording(args.record):
        recording = Recording(args.record)
        trace, settings = trace_of(recording, args.record), dict(recording.header.settings)
        cost = calibrated(args.record) if args.cost is None else cost_of(args.cost)
    else:
        trace, cost = trace_file(str(args.record), "RECORD"), cost_of(args.cost or DEFAULT_COST)
    if args.settings is not None:
        settings |= _present_settings(args.settings)
    settings |= parse_settings(args.set) | {"model": MODEL, "record": ""}
    return RecordedLoad(trace, EngineConfig.from_settings(with_kind(settings)), cost)


def _present_settings(path: Path) -> Mapping[str, object]:
    from tidewheel.entries.entry import CONFIG_NAME, read_entry
    from tidewheel.regular_files import read_object
    from tidewheel.server.repository import entries
    from tidewheel.settings import ENTRY_ARGUMENTS

    if path.is_file():
        settings: Mapping[str, object] = read_object(path)
    elif path.is_dir():
        if not (path / CONFIG_NAME).is_file():
            names = entries(path)
            if len(names) > 1:
                raise UsageError(f"--settings {path} has {len(names)} entries: name one, say {path / names[0]}")
            path /= names[0]
        entry = read_entry(path)
        settings = {**entry.parameters, **read_object(entry.json_path)}
    else:
        raise UsageError(f"--settings {path}: no such file or folder")
    return {name: value for name, value in settings.items() if name not in ENTRY_ARGUMENTS}


def _lines(load: RecordedLoad, most: int, tuning: "Tuning") -> list[str]:
    from tidewheel.bench.tables import TextTable
    from tidewheel.simulate.tuning import NOT_SIMULATED

    trace = load.trace
    cut = "" if tuning.is_complete else ", which left values untried: raise --simulations"
    lines = [
        f"{len(trace)} requests in {trace.arrivals[-1]:.3g} s: the first half to choose, the second to judge",
        f"{tuning.num_simulations} of at most {most} simulations{cut}; cost model {load.cost.name}",
        *(f"not simulated: {names} ({reason})" for names, reason in NOT_SIMULATED.items()),
        "",
    ]
    if tuning.found:
        rows = [[setting.name, _shown(setting.now), _shown(setting.proposed)] for setting in tuning.found]
        lines += [TextTable(["setting", "now", "proposed" if tuning.is_better else "tried"], rows).as_text(), ""]
        header = ["on the second half", "class", "now", "then", "difference", "95 % interval"]
        lines += [TextTable(header, [_row(one) for one in tuning.predictions]).as_text(), ""]
    if tuning.settings:
        return [*lines, f"for model.json: {json.dumps(_proposal(tuning))}"]
    where = "the second half" if tuning.found else "the first half"
    return [*lines, f"Keep your settings: nothing that was tried is better beyond the uncertainty on {where}."]


def _row(prediction: "Prediction") -> list[str]:
    measure, part, now, proposed, difference = prediction
    mean, low, high = (f"{measure.scale * value:+.1f}" for value in difference)
    values = [f"{measure.scale * value:.1f}" for value in (now, proposed)]
    return [f"{measure.title} ({measure.unit})", part or "all", *values, mean, f"{low} to {high}"]


def _shown(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _proposal(tuning: "Tuning") -> dict[str, object]:
    from tidewheel.settings import JSON_SETTINGS

    return {
        name: json.loads(str(proposed)) if name in JSON_SETTINGS else proposed
        for name, _, proposed in tuning.settings
    }


def _as_json(tuning: "Tuning") -> dict[str, object]:
    return {
        "version": JSON_VERSION,
        "is_better": tuning.is_better,
        "settings": _proposal(tuning),
        "tried": [setting._asdict() for setting in tuning.found],
        "num_simulations": tuning.num_simulations,
        "is_complete": tuning.is_complete,
        "predictions": [
            {
                "figure": measure.title,
                "class": part or None,
                "now": now,
                "proposed": proposed,
                "difference": difference._asdict(),
            }
            for measure, part, now, proposed, difference in tuning.predictions
        ],
    }
