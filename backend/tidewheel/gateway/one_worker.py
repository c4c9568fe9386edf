"""Process of one worker of a gateway: `workers.py` starts it with its options and its place as JSON."""

from __future__ import annotations

import sys
from typing import TypeVar

import msgspec

from tidewheel.gateway.gateway_options import StandaloneOptions
from tidewheel.gateway.run_gateway import serve_alone
from tidewheel.gateway.worker_place import WorkerPlace
from tidewheel.server import ServeError

T = TypeVar("T")


def _read(text: str, kind: type[T]) -> T:
    return msgspec.json.decode(text, type=kind, dec_hook=lambda of, value: of(value))


def main() -> int:
    options, place = _read(sys.argv[1], StandaloneOptions), _read(sys.argv[2], WorkerPlace)
    try:
        return serve_alone(options, place)
    except ServeError as error:
        print(f"tidewheel: {error}", file=sys.stderr)  # noqa: T201
        return 1


if __name__ == "__main__":
    sys.exit(main())
