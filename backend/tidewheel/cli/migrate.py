"""Command `tidewheel migrate`.

Exit codes: 0 done; 1 done, but the result has settings that do not load; 2 nothing was written.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tidewheel.cli.usage import printable

SUFFIX = "_tidewheel"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "an entry of the vLLM backend, or a model repository, whose other entries are copied"
    parser.add_argument("path", type=Path, metavar="PATH", help=text)
    where = parser.add_mutually_exclusive_group()
    text = f"model repository to write to (default: beside that of PATH, with {SUFFIX} behind its name)"
    where.add_argument("--out", type=Path, metavar="DIR", help=text)
    where.add_argument("--in-place", action="store_true", help="write over the files of PATH")
    text = "serve this model; needed for TensorRT-LLM, whose engines cannot be read"
    parser.add_argument("--model", default="", metavar="PATH_OR_HF_ID", help=text)


def run(args: argparse.Namespace) -> int:
    # Protobuf takes a second.
    from tidewheel.entries.checking import find_entries
    from tidewheel.entries.migration import migrate, write

    migration = migrate(args.path, args.model)
    source = find_entries(args.path)[0].resolve()
    out = args.out or source.with_name(source.name + SUFFIX)
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
