"""Text has its encoding by name, so that a locale without UTF-8 changes nothing. Other programs may say anything."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLAIN_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
POSITION_OF_ENCODING = {"read_text": 0, "write_text": 1}
POSITION_OF_MODE = {"open": 0, "fdopen": 1}  # of a method
SUBPROCESS = {"run", "Popen", "check_output"}


def decodes_by_locale(call: ast.Call) -> bool:
    """Return whether a call reads or writes text without an encoding."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in named:
        return False
    if name in POSITION_OF_ENCODING:
        return len(call.args) <= POSITION_OF_ENCODING[name]
    if name in POSITION_OF_MODE:
        position = 1 if name == "open" and isinstance(function, ast.Name) else POSITION_OF_MODE[name]
        mode = named.get("mode", call.args[position] if len(call.args) > position else None)
        is_text = isinstance(mode, ast.Constant) and isinstance(mode.value, str) and "b" not in mode.value
        return is_text or (mode is None and (name == "fdopen" or isinstance(function, ast.Name)))
    return name in SUBPROCESS and bool({"text", "universal_newlines"} & named.keys())


def found_in(source: str) -> list[int]:
    return [
        node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and decodes_by_locale(node)
    ]


@pytest.mark.parametrize("part", ["backend", "client", "kernels", "process", "queue"])
def test_every_text_has_its_encoding(part: str) -> None:
    paths = sorted((ROOT / part).rglob("*.py"))
    found = {f"{path.relative_to(ROOT)}:{line}" for path in paths for line in found_in(path.read_text("utf-8"))}
    assert found == set()


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("path.read_text()", True),
        ("path.read_text('utf-8')", False),
        ("path.write_text(text, errors='replace')", True),
        ("path.open('w')", True),
        ("path.open('wb')", False),
        ("open(name)", True),
        ("os.fdopen(number)", True),
        ("os.fdopen(number, 'rb')", False),
        ("transport.open(ask)", False),
        ("subprocess.run(command, text=True)", True),
        ("subprocess.run(command, encoding='utf-8')", False),
    ],
)
def test_what_is_found(code: str, is_found: bool) -> None:
    assert bool(found_in(code)) == is_found


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env={**os.environ, **PLAIN_LOCALE}, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_flags_are_read_from_a_help_of_any_bytes(tmp_path: Path) -> None:
    """The help of tritonserver 2.51 has a typographic dash."""
    binary = tmp_path / "tritonserver"
    binary.write_bytes(b"#!/bin/sh\nprintf '  --model-repository \\342\\200\\223 \\377\\n'\n")
    binary.chmod(0o755)
    code = """if True:
        import sys
        from pathlib import Path
        from tidewheel.server.tritonserver import TritonInstall, known_flags

        path = Path(sys.argv[1])
        install = TritonInstall(binary=path, backends=path, stub=path, libraries=(), origin="test")
        print(*known_flags(install, {}))"""
    assert run(code, str(binary)) == "--model-repository\n"


def test_a_process_may_have_any_name() -> None:
    """Any user may give a process a name that is no text: it may not end the look at all processes."""
    code = """if True:
        import os
        from pathlib import Path
        from tidewheel_process import process_tree

        Path("/proc/self/comm").write_bytes(b"\\xff) Z (\\xc3")
        (found,) = [one for one in process_tree.descendants(os.getppid()) if one.pid == os.getpid()]
        print(process_tree.is_alive(found), len(process_tree.name(found)))"""
    assert run(code) == "True 7\n"


def test_a_character_that_the_locale_lacks_ends_no_command() -> None:
    code = """if True:
        from types import SimpleNamespace
        from tidewheel.cli import main

        said = SimpleNamespace(add_arguments=lambda parser: None, run=lambda args: print(chr(233)) or 0)
        main.import_module, main.COMMANDS = lambda name: said, {"say": "something"}
        raise SystemExit(main.main(["say"]))"""
    assert run(code) == "?\n"
