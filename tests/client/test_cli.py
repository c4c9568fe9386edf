"""`tidewheel generate` and `chat`, against the Triton in this process."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest
from tritonclient.grpc import service_pb2_grpc

from support.triton.grpc_triton import Answer, Asked, FakeTriton, Refused, response, say_words
from tidewheel.cli import usage
from tidewheel.cli.main import main
from tidewheel.cli.usage import printable, show
from tidewheel.server import run_server, workdir
from tidewheel.server.endpoints import Endpoints
from tidewheel.server.run_server import ServeOptions
from tidewheel_client import Chunk, Stream


def url(triton: FakeTriton) -> list[str]:
    return ["--url", f"127.0.0.1:{triton.port}"]


def run(*arguments: str, triton: FakeTriton) -> int:
    return main([*arguments, *url(triton), "--model", "demo"])


def answer_messages(asked: Asked) -> Answer:
    """The number of messages so far, and the last one."""
    messages = json.loads(asked.inputs["messages"])
    yield response(asked.message, text_output=f"{len(messages)}:{messages[-1]['content']}", finish_reason="stop")


def test_generate_streams(triton: FakeTriton, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "--max-tokens",
        "7",
        "--temperature",
        "0",
        "--stop",
        "x",
        "--set",
        "logit_bias={}",
        "--set",
        "tenant=me",
    )
    assert run("generate", "one two", *arguments, triton=triton) == 0
    assert capsys.readouterr().out == "one two\n"
    (asked,) = triton.asked
    assert asked.inputs["stream"] is True
    expected = {"max_tokens": 7, "temperature": 0.0, "stop": ["x"], "logit_bias": {}, "tenant": "me"}
    assert asked.sampling == expected


def test_generate_with_nothing_but_the_prompt(triton: FakeTriton, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "one two", triton=triton) == 0
    assert capsys.readouterr().out == "one two\n"
    assert triton.asked[0].sampling == {"max_tokens": 2**31 - 1}  # what fits the context


def test_another_name_of_max_tokens_is_left_alone(triton: FakeTriton) -> None:
    assert run("generate", "one two", "--set", "max_new_tokens=5", triton=triton) == 0
    assert triton.asked[0].sampling == {"max_new_tokens": 5}


def test_generate_reads_standard_input(
    triton: FakeTriton, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert run("generate", "-", "--stats", triton=triton) == 0
    printed = capsys.readouterr()
    assert printed.out == "from a pipe\n"
    assert "7 tokens in, 3 out" in printed.err
    assert "ended by stop" in printed.err


def test_the_only_model_need_not_be_named(triton: FakeTriton, capsys: pytest.CaptureFixture[str]) -> None:
    triton.models = ("solo", "solo_infer")
    assert main(["generate", "hi", *url(triton)]) == 0
    assert triton.asked[0].message.model_name == "solo"


@pytest.mark.parametrize(
    ("models", "arguments", "word"),
    [
        (("a", "b"), [], "--model: a, b"),
        (("x_infer",), [], "no model that streams"),
        (("a",), ["--set", "nonsense"], "key=value"),
    ],
)
def test_wrong_usage(
    triton: FakeTriton, capsys: pytest.CaptureFixture[str], models: tuple[str, ...], arguments: list[str], word: str
) -> None:
    triton.models = models
    assert main(["generate", "hi", *url(triton), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tidewheel: error: ")
    assert word in line


def test_errors_of_the_server_are_one_line(triton: FakeTriton, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(asked: Asked) -> Answer:
        raise Refused(service_pb2_grpc.grpc.StatusCode.INVALID_ARGUMENT, "[TW-INPUT] top_p is 2: it must be …")
        yield

    triton.answer = refuse
    assert run("generate", "hi", "--top-p", "2", triton=triton) == 2
    assert capsys.readouterr().err == "tidewheel: error: [TW-INPUT] top_p is 2: it must be …\n"


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"]])
@pytest.mark.parametrize("model", [[], ["--model", "demo"]])
def test_no_server(capsys: pytest.CaptureFixture[str], command: list[str], model: list[str]) -> None:
    assert main([*command, "--url", "127.0.0.1:9", *model]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("tidewheel: error: no server answers at 127.0.0.1:9")
    assert "tidewheel serve" in line


def test_no_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model-repository", "/no/such/folder"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'/no/such/folder'" in line and "--model-repository" in line


def test_a_fault_in_the_thread_of_the_demo_ends_it(
    triton: FakeTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(options: ServeOptions, when_ready: Callable[[Endpoints], None]) -> int:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(when_ready, Endpoints(grpc=triton.port))
        return 0

    monkeypatch.setattr(run_server, "serve", serve)
    monkeypatch.setattr(usage, "show", Mock(side_effect=ValueError("broken")))
    with pytest.raises(ValueError, match="broken"):
        main(["demo", "--model-repository", str(tmp_path)])


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--http-port", "x", "no port"),
        ("--grpc-port", "65536", "no port"),
        ("--drain-s", "soon", "no time in seconds"),
    ],
)
def test_numbers_of_serve(capsys: pytest.CaptureFixture[str], option: str, value: str, says: str) -> None:
    with pytest.raises(SystemExit):
        main(["serve", option, value])
    assert f"argument {option}: {value!r} is {says}" in capsys.readouterr().err


def test_chat_keeps_the_conversation(
    triton: FakeTriton, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    triton.answer = answer_messages
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nagain\n/new\nfresh\n"))
    assert run("chat", "--system", "Be brief.", triton=triton) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["2:hello", "4:again", "2:fresh"]
    last = json.loads(triton.asked[1].inputs["messages"])
    assert [message["role"] for message in last] == ["system", "user", "assistant", "user"]
    assert last[2]["content"] == "2:hello"


def test_a_failed_turn_leaves_no_trace(
    triton: FakeTriton, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(asked: Asked) -> Answer:
        if "bad" in asked.inputs["messages"]:
            raise Refused(service_pb2_grpc.grpc.StatusCode.UNAVAILABLE, "[TW-BUSY retry_after_ms=9] full")
        yield from answer_messages(asked)

    triton.answer = answer
    monkeypatch.setattr(sys, "stdin", io.StringIO("bad\ngood\n"))
    assert run("chat", triton=triton) == 0
    printed = capsys.readouterr()
    assert "1:good" in printed.out
    assert "error: [TW-BUSY retry_after_ms=9] full" in printed.err


def test_ctrl_c_stops_an_answer_and_not_the_chat(triton: FakeTriton) -> None:
    """On a terminal of its own, as a user has it."""
    release = threading.Event()

    def answer(asked: Asked) -> Answer:
        if "slow" not in asked.inputs["messages"]:
            yield from answer_messages(asked)
            return
        yield response(asked.message, text_output="partial", finish_reason="None")
        release.wait(30)

    triton.answer = answer
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "tidewheel.cli.main", "chat", *url(triton), "--model", "demo"]
    chat = subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        # A shell that runs the tests in the background ignores Ctrl-C for all below it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(terminal)
    try:
        read_until(controller, b"> ")
        os.write(controller, b"slow\n")
        read_until(controller, b"partial")
        chat.send_signal(signal.SIGINT)
        read_until(controller, b"> ")
        assert triton.ended.wait(60)
        triton.answer = answer_messages
        os.write(controller, b"next\n")
        # The partial answer is part of the conversation. Then the prompt: a terminal may forget what is typed
        # before its program reads.
        read_until(controller, b"3:next", b"> ")
        os.write(controller, b"\x04")
        assert chat.wait(60) == 0
    finally:
        release.set()
        chat.kill()
        chat.wait()
        os.close(controller)


class InterruptedStream:
    """Each chunk meets a Ctrl-C within the client's own code."""

    finish_reason = None
    is_cancelled = False
    num_whole_reads = 0

    def __iter__(self) -> Iterator[Chunk]:
        while not self.is_cancelled:
            signal.raise_signal(signal.SIGINT)
            self.num_whole_reads += 1
            yield Chunk(text="partial")

    def cancel(self) -> None:
        self.is_cancelled = True


class ShortStream:
    finish_reason = "stop"

    def __iter__(self) -> Iterator[Chunk]:
        yield Chunk(text="partial", finish_reason="stop")


def test_ctrl_c_interrupts_no_code_of_the_client(capsys: pytest.CaptureFixture[str]) -> None:
    """gRPC may keep a lock if an exception comes between two of its lines; later calls then wait forever."""
    stream = InterruptedStream()
    answer = show(cast(Stream, stream))
    assert stream.is_cancelled and stream.num_whole_reads == 1
    assert answer.text == "partial" and capsys.readouterr().out == "partial\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_thread_shows_an_answer_too() -> None:
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(show, cast(Stream, ShortStream())).result()
    assert answer.text == "partial"


def read_until(descriptor: int, *texts: bytes) -> None:
    """Each text after the one before; what comes in one piece with the last of them is gone."""
    seen = b""
    for text in texts:
        while text not in seen:
            seen += os.read(descriptor, 1024)
        seen = seen.partition(text)[2]


def test_a_closed_pipe_is_no_error(triton: FakeTriton) -> None:
    triton.answer = say_words
    command = [sys.executable, "-m", "tidewheel.cli.main", "generate", "a " * 200, *url(triton), "--model", "demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as generate:
        assert generate.stdout is not None
        assert generate.stderr is not None
        generate.stdout.read(1)
        generate.stdout.close()
        assert generate.stderr.read() == b""


def test_escape_sequences_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[31mb\x07\r\nc\td\u202e é 漢 😀") == "a[31mb\nc\td é 漢 😀"


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["serve", "--help"], ["top", "--help"]])
def test_help_needs_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom tidewheel.cli.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as e:\n    assert e.code == 0\n"
        "assert not {'torch', 'grpc', 'numpy', 'transformers', 'zmq'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.fixture
def served(triton: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> FakeTriton:
    """Return a server that `tidewheel load` finds."""
    ports = Endpoints(grpc=triton.port)
    monkeypatch.setattr(workdir, "running_servers", lambda: [(workdir.WorkDir(Path("serve-x")), ports)])
    return triton


def test_adapters_are_loaded_and_unloaded(served: FakeTriton, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "demo", "--lora", "sql=sql/v2", "--lora", "fr=a=b"]) == 0
    assert served.loras["demo"] == {"sql": "sql/v2", "fr": "a=b"}
    assert main(["reload", "demo", "--lora", "sql=sql/v3", "--server", str(served.port)]) == 0
    assert served.loras["demo"]["sql"] == "sql/v3"
    assert main(["unload", "demo", "--lora", "fr"]) == 0
    assert list(served.loras["demo"]) == ["sql"]
    adapters = [
        "sql of demo is loaded",
        "fr of demo is loaded",
        "sql of demo is loaded again",
        "fr of demo is unloaded",
    ]
    assert capsys.readouterr().out.splitlines() == [f"adapter {one}" for one in adapters]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["load", "demo", "--lora", "sql"], 2, "lora_path is not set"),
        (["unload", "demo", "--lora", "missing"], 2, "no adapter 'missing'"),
        (["load", "demo", "--lora", "a=/etc"], 2, "lora_path is outside of lora_dir"),
        (["load", "demo", "--lora", "a=b", "--server", "1"], 1, "no server of this user runs here with port 1"),
    ],
)
def test_adapters_that_cannot_be_loaded(
    served: FakeTriton, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    served.refused_path = "/etc"
    assert main(arguments) == code
    assert words in capsys.readouterr().err
    assert served.loras.get("demo", {}) == {}
