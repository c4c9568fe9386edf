"""Process that loads a one-shot model and prints its signature: libraries of models stay out of its parent."""

from __future__ import annotations

import sys

import msgspec

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.one_shot.adapters import load_adapter
from tidewheel.one_shot.signature import Signature

Description = Signature | str  # a text is an error


def main() -> None:
    try:
        config = EngineConfig.from_settings(msgspec.json.decode(sys.argv[1], type=dict[str, object]))
        found: Description = load_adapter(config)[1]
    except ConfigError as error:
        found = str(error)
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(found))


if __name__ == "__main__":
    main()
