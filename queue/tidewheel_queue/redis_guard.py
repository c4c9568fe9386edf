"""Guard of an embedded Redis, which it runs, and starts again, while a process uses the folder.

    python -I redis_guard.py FOLDER REDIS_SERVER

It imports the standard library alone, to start fast. Users share a lock on `users.lock`, which the kernel frees at
their end; once the guard gets it exclusively, it stops Redis. Redis inherits the guard's `server.lock`, so that no
second Redis writes to the files while either lives.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

USERS_LOCK, SERVER_LOCK, SOCKET, LOG, USER_CONFIG = (
    "users.lock",
    "server.lock",
    "redis.sock",
    "redis.log",
    "redis.conf",
)
# A user's redis.conf comes between: it may change the first part only. `everysec` answers before a slow write to the
# disk has ended, and a kill would lose the answer.
_DEFAULTS = b'appendfsync always\nsave ""\nloglevel warning\n'
_FIXED = f"port 0\nunixsocket {SOCKET}\nunixsocketperm 700\ndir .\nappendonly yes\ndaemonize no\n".encode()
_LOOK_EVERY_S = 0.25
_LONGEST_PAUSE_S = 5.0
_LONG_LIFE_S = 10.0
_STOP_S = 30.0
_PR_SET_PDEATHSIG = 1
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def open_lock(name: str) -> int:
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_child() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its memory holds jobs
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _start(binary: str, server_lock: int) -> subprocess.Popen[bytes]:
    own = Path(USER_CONFIG)
    config = _DEFAULTS + (own.read_bytes() + b"\n" if own.exists() else b"") + _FIXED
    process = subprocess.Popen(  # noqa: S603 - found by the package that starts the guard
        [binary, "-"],
        stdin=subprocess.PIPE,
        pass_fds=(server_lock,),
        preexec_fn=_in_child,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(config)
        process.stdin.close()
    except OSError:  # it died; the loop sees it
        pass
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def guard(binary: str, server_lock: int, users_lock: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    pause_s, born = 0.0, time.monotonic()
    process = _start(binary, server_lock)
    while not try_lock(users_lock, fcntl.LOCK_EX):
        number = signal.sigtimedwait(_SIGNALS, _LOOK_EVERY_S)
        if number is not None and number.si_signo != signal.SIGCHLD:
            break
        if process.poll() is None or time.monotonic() < born + pause_s:
            continue
        is_settled = time.monotonic() - born > _LONG_LIFE_S
        pause_s = 0.0 if is_settled else min(2 * pause_s + 0.1, _LONGEST_PAUSE_S)
        sys.stderr.write(f"guard: Redis ended with {process.returncode} and starts again\n")
        sys.stderr.flush()
        born = time.monotonic()
        process = _start(binary, server_lock)
    _stop(process)


def main() -> None:
    folder, binary = sys.argv[1:]
    if os.fork():  # the caller does not wait
        os._exit(0)
    os.setsid()
    os.umask(0o077)
    os.chdir(folder)
    server_lock = open_lock(SERVER_LOCK)
    if try_lock(server_lock, fcntl.LOCK_EX):
        for left in Path().glob("temp-rewriteaof-*.aof"):  # of a killed Redis
            left.unlink(missing_ok=True)
        guard(binary, server_lock, open_lock(USERS_LOCK))


if __name__ == "__main__":
    main()
