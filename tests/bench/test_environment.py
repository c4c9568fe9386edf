from __future__ import annotations

from tidewheel.bench.environment import command_line


def test_a_recorded_command_names_no_folder_of_the_machine() -> None:
    arguments = ["/home/me/x/overload.py", "/data/m40", "--peer", "vllm=/opt/v/bin/python", "--url", "http://a/v1/b"]
    expected = "python overload.py m40 --peer vllm=python --url http://a/v1/b"
    assert command_line("python", arguments) == expected
    assert command_line("tidewheel", ["bench", "--out", "build/bench"]) == "tidewheel bench --out build/bench"
