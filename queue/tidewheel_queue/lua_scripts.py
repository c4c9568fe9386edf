"""Keys of a queue in Redis, and its atomic steps (`steps.lua`)."""

from __future__ import annotations

import re
from pathlib import Path

from tidewheel_client.errors import InvalidRequest
from tidewheel_queue.jobs import CLASSES, check_id

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class QueueNames:
    """Redis keys of a queue; braces keep them on one node of a Redis cluster."""

    def __init__(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"queue name {name!r}: 1 to 64 characters of A-Z a-z 0-9 . _ - are allowed")
        self.name = name
        self.prefix = f"tidewheel:{{{name}}}:"
        self.ended = f"{self.prefix}ended"
        self.dead = f"{self.prefix}dead"
        self.bell = f"{self.prefix}bell"
        self.keys = [*(self.prefix + name for name in CLASSES), self.ended, self.dead, f"{self.prefix}idle"]

    def job(self, job_id: str) -> str:
        return f"{self.prefix}job:{check_id(job_id)}"

    def tokens(self, job_id: str) -> str:
        return f"{self.prefix}tokens:{check_id(job_id)}"


_LUA = Path(__file__).with_name("steps.lua").read_text(encoding="utf-8")
_common, *_steps = re.split(r"^-- step: (\w+)\n", _LUA, flags=re.MULTILINE)
SCRIPTS = {name: _common + step for name, step in zip(_steps[::2], _steps[1::2], strict=True)}
