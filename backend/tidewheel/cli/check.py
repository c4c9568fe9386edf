"""Command `tidewheel check`. Exit codes: 0 no error; 1 errors; 2 wrong usage."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from tidewheel.cli.usage import JSON_VERSION, add_report_options, counted, printable

if TYPE_CHECKING:
    from tidewheel.entries.checking import CheckReport
    from tidewheel.entries.findings import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a model repository, an entry of it, or a config.pbtxt"
    parser.add_argument("path", type=Path, metavar="PATH", help=text)
    add_report_options(parser)
    text = "write the right name for each misspelt one, and print what changed"
    parser.add_argument("--fix", action="store_true", help=text)
    text = "another machine will serve the entries: leave out what depends on GPUs, cores and memory"
    parser.add_argument("--other-machine", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    # Protobuf, and torch for the models, take seconds.
    from tidewheel.entries.checking import check
    from tidewheel.entries.findings import mend

    is_here = not args.other_machine
    report = check(args.path, is_this_machine=is_here, tell=None if args.fix or args.json else _print_finding)
    mended = mend(report.findings) if args.fix else []
    if mended:
        report = check(args.path, is_this_machine=is_here)
    if args.json:
        print(json.dumps(_as_json(report, mended), indent=1))
    else:
        for finding in mended:
            if finding.edit is not None:
                print(printable(f"{finding.place}: fixed: {finding.edit.old} is now {finding.edit.new}"))
        for finding in report.findings if args.fix else ():
            _print_finding(finding)
        for name, implementation in report.models.items():
            print(printable(f"{name}: {implementation}"))
        for name, text in report.kv_cache.items():
            print(printable(f"{name}: KV cache {text}"))
        errors, warnings = counted(report.count("error"), "error"), counted(report.count("warning"), "warning")
        print(f"{len(report.checked)} checked, {len(report.passed_over)} passed over: {errors}, {warnings}")
    return int(report.count("error") > 0 or (args.strict and report.count("warning") > 0))


def _as_json(report: CheckReport, mended: list[Finding]) -> dict[str, object]:
    return {
        "version": JSON_VERSION,
        "checked": report.checked,
        "passed_over": report.passed_over,
        "models": report.models,
        "fixed": [_row(finding) for finding in mended],
        "kv_cache": report.kv_cache,
        "findings": [_row(finding) for finding in report.findings],
    }


def _row(finding: Finding) -> dict[str, object]:
    row = finding._asdict()
    edit = row.pop("edit")
    return {**row, "right_name": edit.new if edit else None}


def _print_finding(finding: Finding) -> None:
    print(printable(f"{finding.place}: {finding.severity}: {finding.message} [{finding.rule}]"), flush=True)
