"""Processes that hold texts leave no core dump, and report errors without their messages."""

from __future__ import annotations

import base64
import io
import logging
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.faults.text_traces import SecretText, holders
from tidewheel.confidential import TracebackFormatter

SECRET = "zebraquagga7261"
RAISE = "text = 'zebraquagga' + '7261'; raise ValueError(text)"
HARD_LIMIT = resource.getrlimit(resource.RLIMIT_CORE)[1]
PROTECT = "from tidewheel.confidential import protect_texts; protect_texts();"


def run(code: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    # By a shell: a function that subprocess runs before the program forks this process, in which gRPC has threads.
    allow_core_dumps = 'ulimit -Sc "$(ulimit -Hc)" && exec "$@"'
    command = ["sh", "-c", allow_core_dumps, "sh", sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, timeout=60)


@pytest.mark.skipif(
    HARD_LIMIT != resource.RLIM_INFINITY or Path("/proc/sys/kernel/core_pattern").read_text().strip() != "core",
    reason="core dumps are not written beside the process here",
)
def test_a_process_that_holds_texts_leaves_no_core_dump(tmp_path: Path) -> None:
    abort = "text = 'zebraquagga' + '7261'; import os; os.abort()"
    assert run(abort, tmp_path).returncode == -signal.SIGABRT
    assert [SecretText(SECRET).is_in(path.read_bytes()) for path in tmp_path.iterdir()] == [True], "the test can fail"
    next(tmp_path.iterdir()).unlink()
    assert run(PROTECT + abort, tmp_path).returncode == -signal.SIGABRT
    assert list(tmp_path.iterdir()) == []


def test_processes_below_it_leave_none_either(tmp_path: Path) -> None:
    below = f"""import subprocess, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from support.faults.text_traces import dumpable
with subprocess.Popen(['sleep', '60']) as child:
    print(dumpable(child.pid))
    child.kill()"""
    assert b"filter" in run(below, tmp_path).stdout
    assert run(f"{PROTECT}\n{below}", tmp_path).stdout == b"[]\n"


@pytest.mark.parametrize(
    "code", [RAISE, f"import threading; threading.Thread(target=lambda: exec({RAISE!r})).start()"]
)
def test_an_uncaught_error_has_no_message(tmp_path: Path, code: str) -> None:
    assert SECRET.encode() in run(code, tmp_path).stderr
    shown = run(PROTECT + code, tmp_path).stderr.decode()
    assert SECRET not in shown
    assert "line 1, in <module>" in shown
    assert "ValueError (its message is not shown)" in shown


def test_nor_has_a_logged_one() -> None:
    shown = io.StringIO()
    handler, logger = logging.StreamHandler(shown), logging.getLogger("tidewheel.test")
    handler.setFormatter(TracebackFormatter("%(message)s"))
    logger.addHandler(handler)
    try:
        raise ValueError(SECRET) from KeyError(SECRET)
    except ValueError:
        logger.exception("a request failed")
    finally:
        logger.removeHandler(handler)
    assert SECRET not in shown.getvalue()
    assert shown.getvalue().startswith("a request failed\nTraceback (most recent call last):\n  File")
    assert shown.getvalue().endswith("ValueError (its message is not shown)\n")


def test_an_error_that_was_never_raised_has_no_traceback() -> None:
    assert (
        TracebackFormatter().formatException((KeyError, KeyError(SECRET), None))
        == "KeyError (its message is not shown)"
    )


def test_a_text_is_found_in_any_form(tmp_path: Path) -> None:
    secret, data = SecretText(SECRET, [17, 4, 1032]), SECRET.encode()
    forms = [
        data,
        SECRET.upper().encode(),
        data.hex().encode(),
        b"[3, 17, 4, 1032]",
        b"\x11\0\0\0\x04\0\0\0\x08\x04\0\0",
    ]
    forms += [base64.b64encode(b"{" * before + data + b"}") for before in range(5)]
    for number, form in enumerate(forms):
        (tmp_path / f"{number}").write_bytes(b"before " + form + b" behind")
    (tmp_path / "none").write_bytes(data[:-1] + b"[17, 4, 1033]")
    found = holders([secret], [tmp_path], {"page": b'last{text="' + data + b'"} 1', "other": b""})
    assert sorted(found) == sorted([*(str(tmp_path / f"{number}") for number in range(len(forms))), "page"])
