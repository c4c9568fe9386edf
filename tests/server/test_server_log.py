"""Lines as tritonserver 2.51 writes them."""

from __future__ import annotations

import errno
import io
from typing import Any

import pytest

from tidewheel.server.server_log import LogLine, ServerLog, parse

FAILED = (
    r'E1121 08:34:23.823455 9534 model_lifecycle.cc:642] "failed to load '
    r"'bad' version 1: Internal: TritonModelException: max_num_seqs is 0: it must be at least 1\n\nAt:\n"
    r'  /repo/bad/1/model.py(4): initialize\n"'
)


def fed(*lines: str) -> ServerLog:
    log = ServerLog()
    log.feed("".join(f"{line}\n" for line in lines).encode())
    return log


def test_parse() -> None:
    line = parse('W1121 08:33:51.926273 9191 model.py:7] "a \\"quoted\\" warning"')
    assert line == LogLine("W", 'a "quoted" warning')
    assert line.is_problem
    assert parse("+-----+") == LogLine("", "+-----+")
    assert not parse('I1121 08:33:51.926273 9191 a.cc:7] "x"').is_problem
    assert not parse('E1121 08:33:50.4 9191 server.cc:241] "CudaDriverHelper has not been initialized."').is_problem


def test_a_line_in_pieces() -> None:
    log = ServerLog()
    data = 'I1121 08:33:51.92 9191 a.cc:7] "é"\nrest'.encode()
    cut = data.index(b"\xa9")
    assert log.feed(data[:cut]) == []
    assert log.feed(data[cut:]) == [LogLine("I", "é")]
    assert log.feed(b"\n") == [LogLine("", "rest")]


def test_a_line_without_an_end_does_not_grow() -> None:
    log = ServerLog()
    lines = [line for _ in range(40) for line in log.feed(b"x" * 10_000)]
    assert lines
    assert max(len(line.message) for line in lines) < 100_000


class FullDisk(io.BytesIO):
    has_room = False

    def write(self, data: Any) -> int:
        if not self.has_room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_a_copy_on_a_full_disk() -> None:
    disk = FullDisk()
    log = ServerLog(disk)
    problem, line = log.feed(b"one\n")
    assert problem.is_problem and "No space left on device" in problem.message
    assert [line, *log.feed(b"two\n")] == [LogLine("", "one"), LogLine("", "two")]
    disk.has_room = True
    log.feed(b"three\n")
    assert disk.getvalue() == b"three\n"


def test_version() -> None:
    assert fed("| server_version                   | 2.51.0          |").version == "2.51.0"


def test_loads_are_reported_as_they_end() -> None:
    log, ends = ServerLog(), []
    log.on_load = lambda *end: ends.append(end)
    lines = [
        FAILED,
        "I1121 08:34:23.8 9534 model_lifecycle.cc:849] \"successfully loaded 'good'\"",
        "I1121 08:34:23.8 9534 model_lifecycle.cc:636] \"successfully unloaded 'good' version 1\"",
        "E1121 08:34:23.8 9534 a.cc:7] \"failed to load model 'odd': at least one version must be available\"",
        "E1121 08:34:23.8 9534 a.cc:7] \"Invalid argument: ensemble 'sum' depends on 'odd' which is not valid.\"",
    ]
    log.feed("".join(f"{line}\n" for line in lines).encode())
    assert ends == [
        ("bad", "max_num_seqs is 0: it must be at least 1"),
        ("good", ""),
        ("odd", "at least one version must be available"),
        ("sum", "depends on 'odd' which is not valid."),
    ]
    assert log.failure is not None and log.failure.model == "bad"


def found(log: ServerLog) -> tuple[str, str] | None:
    return None if log.failure is None else (log.failure.model, log.failure.reason)


def test_the_first_failed_load() -> None:
    later = FAILED.replace("'bad'", "'worse'")
    assert found(fed(FAILED, later)) == ("bad", "max_num_seqs is 0: it must be at least 1")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "E1121 08:34:23.8 9 lifecycle.cc:642] \"failed to load 'm' version 2: Invalid argument: no [TW-X] b\"",
            ("m", "no [TW-X] b"),
        ),
        (
            "E1121 08:34:23.8 9 model_repository_manager.cc:1] \"Poll failed for model directory 'm': a\\nb\"",
            ("m", "a b"),
        ),
        (FAILED.replace("E1121", "I1121"), None),
    ],
)
def test_load_failures(line: str, expected: tuple[str, str] | None) -> None:
    assert found(fed(line)) == expected


def test_what_is_wrong_with_a_config_file() -> None:
    log = fed(
        "[libprotobuf ERROR text_format.cc:337] Error parsing text-format inference.ModelConfig: 1:27: No field x.",
        "E1121 08:34:23.8 9 m.cc:1] \"Poll failed for model directory 'm': failed to read text proto from /m\"",
    )
    assert log.failure is not None
    assert log.failure.reason == "failed to read text proto from /m: 1:27: No field x."


def test_last_words() -> None:
    table, plain = "| Model | Version |", "error: creating server: Internal - failed to load all models"
    error = 'E1121 08:34:23.8 9 http_server.cc:1] "failed to start HTTP service"'
    assert fed(plain, table).last_words() == plain
    assert fed(error, plain).last_words() == "failed to start HTTP service"
    assert fed(table).last_words() == table
    assert fed().last_words() == "it printed nothing"


def test_a_death_is_quoted_and_not_explained() -> None:
    error = 'E1121 08:33:51.926273 9191 a.cc:7] "an error of yesterday"'
    lines = [f"I1121 08:33:5{i}.0 9191 a.cc:7] {i}" for i in range(9)]
    log = fed(error, *lines, "")
    assert log.quote().splitlines() == [f"  {line}" for line in lines[1:]]
    log.feed(b"Signal (11) received.\n" + b" 0# 0x55 in tritonserver\n" * 9)
    assert log.quote().splitlines() == ["  Signal (11) received.", *["   0# 0x55 in tritonserver"] * 7]
    cut_short = fed()
    cut_short.feed(b"x" * 1000)
    assert cut_short.quote() == "  " + "x" * 300
    assert fed().quote() == "  (nothing)"


def test_every_byte_goes_to_the_copy() -> None:
    copy = io.BytesIO()
    log = ServerLog(copy)
    log.feed(b"a\nb")
    log.feed(b"\xff\n")
    assert copy.getvalue() == b"a\nb\xff\n"


def test_an_entry_of_another_backend() -> None:
    reason = "Invalid argument: unable to find backend library for backend 'vllm', try specifying runtime"
    log = ServerLog()
    log.feed(f"E1121 08:34:23.8 9 model_lifecycle.cc:654] \"failed to load 'm' version 1: {reason}\"\n".encode())
    assert log.failure is not None
    assert log.failure.reason.endswith("tidewheel migrate makes such an entry ours")
