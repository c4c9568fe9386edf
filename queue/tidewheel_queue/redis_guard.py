"""Guard of an embedded Redis, which it runs, and starts again, while a process uses the folder.

    python redis_guard.py REDIS_SERVER

It runs in the folder. Users share a lock on `users.lock`, which the kernel frees at their end; once the guard has it
alone, it stops Redis. Redis inherits `server.lock`: no second Redis writes to the files while either lives.
"""

import contextlib
import fcntl
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import IO

from tidewheel_process.child import Child, RestartedChild, RestartPolicy
from tidewheel_process.current_process import end_with_parent
from tidewheel_process.locked_folder import flock, try_lock

USERS_LOCK, SOCKET, LOG = "users.lock", "redis.sock", "redis.log"
_SERVER_LOCK, _USER_CONFIG = Path("server.lock"), Path("redis.conf")
# A user's redis.conf comes between and may change the first part only. `everysec` answers before a slow write to disk
# has ended; a kill would lose it.
_DEFAULTS = b'appendfsync always\nsave ""\nloglevel warning\n'
_FIXED = f"port 0\nunixsocket {SOCKET}\nunixsocketperm 700\ndir .\nappendonly yes\ndaemonize no\n".encode()
_LOOK_EVERY_S = 0.25
_STOP_S = 30.0
_RESTARTS = RestartPolicy(first_delay_s=0.1, window_s=10.0, max_deaths=sys.maxsize)
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def _in_child() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its memory holds jobs
    end_with_parent()


def _start(binary: str, server_lock: IO[bytes]) -> Child:
    config = _DEFAULTS + (_USER_CONFIG.read_bytes() + b"\n" if _USER_CONFIG.exists() else b"") + _FIXED
    redis = Child([binary, "-"], stdin=subprocess.PIPE, pass_fds=(server_lock.fileno(),), preexec_fn=_in_child)
    with contextlib.suppress(OSError), redis.stdin as stdin:  # it died; the loop sees it
        stdin.write(config)
    return redis


def _note(text: str) -> None:
    sys.stderr.write(f"guard: {text}\n")
    sys.stderr.flush()


def guard(binary: str, server_lock: IO[bytes]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    with Path(USERS_LOCK).open("ab") as users_lock:
        redis = RestartedChild("Redis", partial(_start, binary, server_lock), _note, _RESTARTS)
        while not flock(users_lock, fcntl.LOCK_EX):
            number = signal.sigtimedwait(_SIGNALS, _LOOK_EVERY_S)
            if number is not None and number.si_signo != signal.SIGCHLD:
                break
            redis.watch()
        redis.child.end(_STOP_S)


def main() -> None:
    if (server_lock := try_lock(_SERVER_LOCK)) is not None:
        for left in Path().glob("temp-rewriteaof-*.aof"):  # of a killed Redis
            left.unlink(missing_ok=True)
        guard(sys.argv[1], server_lock)


if __name__ == "__main__":
    main()
