"""Where a text stands: in files, shared memory and pages, as it is or in the forms that a leak may give it."""

from __future__ import annotations

import base64
import contextlib
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


class SecretText:
    """A text of ASCII, and its token ids as they are in any context."""

    def __init__(self, text: str, token_ids: Iterable[int] = ()) -> None:
        data, ids = text.encode(), list(token_ids)
        # Of base64, whatever was before: the characters that only depend on the text.
        inner = [base64.b64encode(b"\0" * shift + data)[4 if shift else 0 : -4] for shift in range(3)]
        self._forms = [form.lower() for form in (data, data.hex().encode(), data[::-1], *inner)]
        self._packed = [struct.pack(f"<{len(ids)}{kind}", *ids) for kind in "iq" if ids]
        self._listed = re.compile(rb"\D{1,4}".join(str(one).encode() for one in ids)) if ids else None

    def is_in(self, data: bytes) -> bool:
        lower = data.lower()
        return (
            any(form in lower for form in self._forms)
            or any(form in data for form in self._packed)
            or (self._listed is not None and self._listed.search(data) is not None)
        )


def holders(
    secrets: Iterable[SecretText], folders: Iterable[Path], pages: Mapping[str, bytes], besides: tuple[str, ...] = ()
) -> list[str]:
    """Return the files below the folders, and the pages, that hold one of the texts; not names that begin so."""
    secrets, found = list(secrets), []
    for path in (
        path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()
    ):
        if not str(path).startswith(besides):
            with contextlib.suppress(FileNotFoundError):  # of another server
                found += [str(path)] if any(secret.is_in(path.read_bytes()) for secret in secrets) else []
    return found + [name for name, data in pages.items() if any(secret.is_in(data) for secret in secrets)]


def dumpable(pid: int) -> list[str]:
    """Return what of a process a core dump would hold: its limit and its filter, unless they are 0."""
    limits = Path(f"/proc/{pid}/limits").read_text()
    found = {
        "limit": re.findall(r"Max core file size +(\S+) +(\S+)", limits)[0] != ("0", "0"),
        "filter": int(Path(f"/proc/{pid}/coredump_filter").read_text() or "0", 16) != 0,
    }
    return [name for name, is_open in found.items() if is_open]
