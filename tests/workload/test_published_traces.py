"""Traces with the columns of Azure and of BurstGPT."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidewheel.errors import ConfigError
from tidewheel.workload.trace_files import read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_azure(tmp_path: Path) -> None:
    text = AZURE + "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.4799600,110,27\n"
    trace = read_trace(written(tmp_path, text))
    assert trace.arrivals.tolist() == pytest.approx([0.0, 0.5])
    assert trace.prompt_tokens.tolist() == [4808, 110]
    assert trace.output_tokens.tolist() == [10, 27]


def test_azure_of_2024_has_a_time_zone(tmp_path: Path) -> None:
    text = AZURE + "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01.009930+00:00,2399,6\n"
    assert read_trace(written(tmp_path, text)).arrivals.tolist() == pytest.approx([0.0, 1.0])


def test_burstgpt_without_its_failed_requests(tmp_path: Path) -> None:
    text = BURSTGPT + "45,ChatGPT,391,244,635,Conversation log\n5,ChatGPT,472,18,490,Conversation log\n"
    text += "50,GPT-4,100,0,100,API log\n"
    trace = read_trace(written(tmp_path, text))
    assert trace.arrivals.tolist() == [0.0, 40.0]
    assert trace.prompt_tokens.tolist() == [472, 391]


def test_the_projects_own_format_is_told_apart(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "arrival,prompt_tokens,output_tokens\n3,4,5\n"))
    assert trace.prompt_tokens.tolist() == [4]


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        (AZURE + "2023-11-16 18:17:03,1,2\nyesterday,3,4\n", 3, "TIMESTAMP is 'yesterday'"),
        (AZURE + "2023-11-16 18:17:03,0,2\n", 2, "ContextTokens is '0'"),
        (AZURE + "2023-11-16 18:17:03,1\n", 2, "2 values"),
        (BURSTGPT + "1,M,2,3,5,L\n\n2,M,2.5,3,5,L\n", 4, "Request tokens is '2.5'"),
        (BURSTGPT + "-1,M,2,3,5,L\n", 2, "Timestamp is '-1'"),
        (BURSTGPT + "1,M,2,many,5,L\n", 2, "Response tokens is 'many'"),
        ("arrival,prompt_tokens,output_tokens\n1,2,3\n1,2,x\n", 3, "output_tokens is 'x'"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, text: str, line: int, reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_trace(written(tmp_path, text))
    assert f"line {line}" in str(refusal.value)
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", [AZURE, BURSTGPT, BURSTGPT + "1,M,2,0,2,L\n"])
def test_an_empty_trace_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(written(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "none.csv")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(AZURE.encode() + b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(path)
