"""Process that loads a one-shot model and prints its signature: libraries of models stay out of its parent."""

from __future__ import annotations

import sys

import msgspec

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.one_shot.adapters import load_adapter
from tidewheel.one_shot.signature import Signature


class Description(msgspec.Struct, frozen=True):
    signature: Signature | None = None
    error: str = ""


def main() -> None:
    try:
        config = EngineConfig.from_settings(msgspec.json.decode(sys.argv[1], type=dict[str, object]))
        description = Description(load_adapter(config)[1])
    except ConfigError as error:
        description = Description(error=str(error))
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(description))


if __name__ == "__main__":
    main()
