"""Command `tidewheel doctor`. Exit codes: 0 no error; 1 errors; 2 wrong usage."""

import argparse
import json
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidewheel.cli.usage import JSON_VERSION, add_report_options, counted
from tidewheel.version import __version__

if TYPE_CHECKING:
    from tidewheel.cli.machine_checks import Judgement

_WIDTH = 110
_COLUMN = 26


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_report_options(parser)
    parser.add_argument("--tritonserver", metavar="PATH", help="the one to try (default: the first one found)")


def run(args: argparse.Namespace) -> int:
    from tidewheel.cli.machine_checks import judge, usable_gpus

    gpus = usable_gpus()
    findings = judge(args.tritonserver, gpus)
    device = gpus[0].name if gpus else "the CPU"
    can_serve = all(one.verdict != "error" for one in findings)
    if args.json:
        rows = [one._asdict() for one in findings]
        report = {"version": JSON_VERSION, "can_serve": can_serve, "device": device, "findings": rows}
        print(json.dumps(report, indent=1))
    else:
        print(as_table(findings, device))
    return int(not can_serve or (args.strict and any(one.verdict == "warning" for one in findings)))


def as_table(findings: "Sequence[Judgement]", device: str) -> str:
    counts = {verdict: sum(one.verdict == verdict for one in findings) for verdict in ("error", "warning")}
    outcome = "cannot serve" if counts["error"] else f"can serve, on {device}"
    notes = [counted(count, verdict) for verdict, count in counts.items() if count]
    summary = f"This machine {outcome}{': ' if notes else '.'}{', '.join(notes)}"
    lines = [f"Tidewheel {__version__} on this machine", ""]
    for one in findings:
        lines += _wrapped(f"  {one.verdict:<8} {one.subject:<15}{one.seen}")
        lines += _wrapped(f"{' ' * _COLUMN}→ {one.advice}") if one.advice else []
    hint = "Whether a model fits, also on several devices: tidewheel check FOLDER --set tensor_parallel_size=2"
    return "\n".join([*lines, "", hint, summary])


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(
        line, _WIDTH, subsequent_indent=" " * _COLUMN, break_long_words=False, break_on_hyphens=False
    )
