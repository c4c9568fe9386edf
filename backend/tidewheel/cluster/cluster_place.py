"""Where a cluster of this user lives on this machine: a private folder, locked by the process that runs it.

All of Ray's files are in it, and every process below has its path in the environment, so that nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tidewheel.cluster import ClusterError
from tidewheel.private_dir import MAX_SOCKET_PATH, RUN_DIR, private_dir, run_dir_path
from tidewheel.server import workdir
from tidewheel.server.workdir import CLUSTER, WorkDir
from tidewheel_process.locked_folder import LockedFolder, is_left_over

_LONGEST_BELOW = max(  # names of sockets
    len("/r/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store."),
    len("/run/serve-abcdefgh/run/16_letters_model-01234567/0123456789/engine.sock"),
)


@dataclass(frozen=True, slots=True)
class ClusterPlace:
    root: Path

    @classmethod
    def here(cls) -> ClusterPlace:
        return cls(run_dir_path() / CLUSTER)

    @property
    def ray(self) -> Path:
        return self.root / "r"  # short: sockets below it have long names

    @property
    def token(self) -> Path:
        return self.root / "token"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def control(self) -> Path:
        return self.root / "control"

    @property
    def last_words(self) -> Path:
        """Return the file that says why the last cluster ended by itself. It outlives the folder."""
        return self.root.with_name(f"{CLUSTER}-ended")

    def why_it_ended(self) -> str:
        """Return the line of `last_words`; empty without one."""
        try:
            return self.last_words.read_text(encoding="utf-8")
        except OSError:
            return ""

    def is_up(self) -> bool:
        """Return whether a process runs it, ready or not."""
        return self.root.exists() and not is_left_over(self.root)

    def remove(self) -> None:
        """End what is left of a cluster whose process is gone, and remove its files."""
        workdir.remove(self.root)
        self.last_words.unlink(missing_ok=True)

    def check_path(self) -> None:
        """Raise `ClusterError` if the folder's path is too long for the sockets of Ray and engines (107 bytes)."""
        if (excess := len(os.fsencode(self.root)) + _LONGEST_BELOW - MAX_SOCKET_PATH) > 0:
            raise ClusterError(
                f"the path of {self.root} is too long for sockets, by {excess} bytes: set {RUN_DIR} to a shorter one"
            )

    @contextlib.contextmanager
    def held(self) -> Iterator[WorkDir]:
        """Make the folder, and hold its lock inside the block. Raise `ClusterError` if another process has it."""
        private_dir(self.root.parent)
        if not self.is_up():
            self.remove()
        try:
            self.root.mkdir(mode=0o700)
        except FileExistsError:
            raise ClusterError(in_use(self)) from None
        folder = LockedFolder(self.root)
        folder.try_lock()
        work = WorkDir(self.root)
        work.run.mkdir(mode=0o700)
        os.environ[RUN_DIR] = str(work.run)
        try:
            yield work
        finally:
            folder.release()


def in_use(place: ClusterPlace) -> str:
    return f"a cluster of yours is up in {place.root}: end it with tidewheel cluster down, or set {RUN_DIR}"


def free_port(host: str, port: int) -> int:
    """Return the port, or a free one for 0. Raise `ClusterError` if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ClusterError(f"cannot listen on {host} port {port} (--openai-port): {error.strerror}") from None
