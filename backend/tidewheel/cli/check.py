"""Commands `tidewheel check` and `tidewheel migrate`.

Exit codes: 0 no error; 1 errors, or a migrated entry does not load; 2 wrong usage, or nothing was written.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tidewheel.cli.usage import JSON_VERSION, UsageError, add_report_options, counted, printable

if TYPE_CHECKING:
    from tidewheel.entries.findings import CheckReport, Finding

MIGRATED_SUFFIX = "_tidewheel"


def add_check(parser: argparse.ArgumentParser) -> None:
    text = "a model repository, an entry of it, a config.pbtxt, or a model's folder or GGUF file"
    parser.add_argument("path", type=Path, metavar="PATH", help=text)
    add_report_options(parser)
    text = "an engine setting for a model's folder or file, say tensor_parallel_size=2 (repeatable)"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    text = "write the right name for each misspelt one, and print what changed"
    parser.add_argument("--fix", action="store_true", help=text)
    text = "another machine will serve the entries: leave out what depends on GPUs, cores and memory"
    parser.add_argument("--other-machine", action="store_true", help=text)


def run_check(args: argparse.Namespace) -> int:
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


def check_model(model: Path, settings: Sequence[str], *, is_this_machine: bool) -> "CheckReport":
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


def _as_json(report: "CheckReport", mended: "list[Finding]") -> dict[str, object]:
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


def _row(finding: "Finding") -> dict[str, object]:
    row = finding._asdict()
    edit = row.pop("edit")
    return {**row, "right_name": edit.new if edit else None}


def add_migrate(parser: argparse.ArgumentParser) -> None:
    text = "an entry of the vLLM backend, or a model repository, whose other entries are copied"
    parser.add_argument("path", type=Path, metavar="PATH", help=text)
    where = parser.add_mutually_exclusive_group()
    text = f"model repository to write to (default: beside that of PATH, with {MIGRATED_SUFFIX} behind its name)"
    where.add_argument("--out", type=Path, metavar="DIR", help=text)
    where.add_argument("--in-place", action="store_true", help="write over the files of PATH")
    text = "serve this model; needed for TensorRT-LLM, whose engines cannot be read"
    parser.add_argument("--model", default="", metavar="PATH_OR_HF_ID", help=text)


def run_migrate(args: argparse.Namespace) -> int:
    # Protobuf takes a second.
    from tidewheel.entries.checking import find_entries
    from tidewheel.entries.migration import migrate, write

    migration = migrate(args.path, args.model)
    source = find_entries(args.path)[0].resolve()
    out = args.out or source.with_name(source.name + MIGRATED_SUFFIX)
    written = write(migration.entries, None if args.in_place else out)
    for lost in migration.lost:
        print(printable(f"{lost.place}: changed: {lost.message}"))
    for finding in migration.unknown:
        text = f"{finding.place}: error: {finding.message}; it stays, and stops the load until you mend it"
        print(printable(text))
    for folder in written:
        print(f"wrote {folder}")
    print(f"now: tidewheel check {args.path if args.in_place else out}")
    return int(bool(migration.unknown))
