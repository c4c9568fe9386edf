from __future__ import annotations

import argparse
import os
from pathlib import Path
from types import ModuleType

from tidewheel.cli.usage import UsageError

URL_VARIABLE = "TIDEWHEEL_QUEUE_REDIS"
_FOLDER = Path("tidewheel-queue")


def add_queue_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("queue")
    where = group.add_mutually_exclusive_group()
    text = f"folder of an embedded Redis, which runs while a command uses it (default: {_FOLDER})"
    where.add_argument("--dir", type=Path, metavar="DIR", help=text)
    text = (
        "redis://, rediss:// (TLS) or unix:// URL of a Redis from 6.2 on. Other users of the machine see the command "
        f"line: a URL with a password goes into the variable {URL_VARIABLE}"
    )
    where.add_argument("--redis", metavar="URL", help=text)
    group.add_argument("--queue", default="default", metavar="NAME", help="name of the queue (default: %(default)s)")


def where(args: argparse.Namespace) -> str | Path:
    if args.redis is not None and "://" not in args.redis:
        raise UsageError("--redis takes a URL, such as redis://127.0.0.1:6379/0; --dir takes a folder")
    if args.redis is not None or args.dir is not None:
        return args.redis or Path(args.dir)
    return os.environ.get(URL_VARIABLE) or _FOLDER


def queue_package() -> ModuleType:
    """Import `tidewheel_queue`. Raise `UsageError` without the extra `queue`."""
    try:
        import tidewheel_queue
    except ImportError as error:
        raise UsageError(str(error)) from None
    return tidewheel_queue
