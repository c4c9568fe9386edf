"""Command `tidewheel check`. Exit codes: 0 no error; 1 errors; 2 wrong usage."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tidewheel.cli.usage import JSON_VERSION, UsageError, add_report_options, counted, printable

if TYPE_CHECKING:
    from tidewheel.entries.checking import CheckReport
    from tidewheel.entries.findings import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a model repository, an entry of it, a config.pbtxt, or a model's folder or GGUF file"
    parser.add_argument("path", type=Path, metavar="PATH", help=text)
    add_report_options(parser)
    text = "an engine setting for a model's folder or file, say tensor_parallel_size=2 (repeatable)"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    text = "write the right name for each misspelt one, and print what changed"
    parser.add_argument("--fix", action="store_true", help=text)
    text = "another machine will serve the entries: leave out what depends on GPUs, cores and memory"
    parser.add_argument("--other-machine", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    # Protobuf, and torch for the models, take seconds.
    from tidewheel.entries.checking import check
    from tidewheel.entries.findings import mend
    from tidewheel.models.model_folder import gguf_file_of

    is_this_machine = not args.other_machine
    if (args.path / "config.json").is_file() or gguf_file_of(args.path) is not None:
        if args.fix:
            raise UsageError("--fix goes with entries: a model has no config.pbtxt")
        report = check_model(args.path, args.set, is_this_machine=is_this_machine)
    elif args.set:
        raise UsageError("--set goes with a model's folder or file; settings of an entry stand in its config.pbtxt")
    else:
        report = check(args.path, is_this_machine=is_this_machine)
    mended = mend(report.findings) if args.fix else []
    if mended:
        report = check(args.path, is_this_machine=is_this_machine)
    if args.json:
        print(json.dumps(_as_json(report, mended), indent=1))
    else:
        for finding in mended:
            if finding.edit is not None:
                print(printable(f"{finding.place}: fixed: {finding.edit.old} is now {finding.edit.new}"))
        for finding in report.findings:
            print(printable(f"{finding.place}: {finding.severity}: {finding.message} [{finding.rule}]"))
        cache = {name: f"KV cache {text}" for name, text in report.kv_cache.items()}
        for name, text in (*report.models.items(), *cache.items(), *report.memory.items()):
            print(printable(f"{name}: {text}"))
        errors, warnings = counted(report.count("error"), "error"), counted(report.count("warning"), "warning")
        print(f"{len(report.checked)} checked, {len(report.passed_over)} passed over: {errors}, {warnings}")
    return int(report.count("error") > 0 or (args.strict and report.count("warning") > 0))


def check_model(model: Path, settings: Sequence[str], *, is_this_machine: bool) -> CheckReport:
    """Check a model as `tidewheel serve --model` would serve it. Raise `ConfigError` for wrong settings."""
    from tidewheel.entries.checking import check
    from tidewheel.server import repository

    with tempfile.TemporaryDirectory() as folder:
        entry = Path(folder) / repository.served_name(str(model))
        repository.write_entry(entry.parent, str(model), entry.name, repository.parse_settings(settings))
        report = check(entry, is_this_machine=is_this_machine)
    for index, one in enumerate(report.findings):
        if folder in one.file:
            report.findings[index] = one._replace(file=str(model), line=None, column=None)
    return report


def _as_json(report: CheckReport, mended: list[Finding]) -> dict[str, object]:
    return {
        "version": JSON_VERSION,
        "checked": report.checked,
        "passed_over": report.passed_over,
        "models": report.models,
        "fixed": [_row(finding) for finding in mended],
        "kv_cache": report.kv_cache,
        "memory": report.memory,
        "findings": [_row(finding) for finding in report.findings],
    }


def _row(finding: Finding) -> dict[str, object]:
    row = finding._asdict()
    edit = row.pop("edit")
    return {**row, "right_name": edit.new if edit else None}
