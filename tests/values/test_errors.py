from __future__ import annotations

import subprocess
import sys

import pytest

from tidewheel import errors
from tidewheel_client.errors import from_tagged


@pytest.mark.parametrize("tag", sorted(errors.TAGS))
@pytest.mark.parametrize("retry", [None, 250])
def test_text_and_back(tag: str, retry: int | None) -> None:
    error = errors.from_wire(tag, "waiting set is full:\n512 of 512 requests", retry)
    again = from_tagged(str(error))
    assert type(again) is type(error)
    assert again.message == error.message
    assert again.retry_after_ms == retry


def test_message_format_is_the_documented_one() -> None:
    error = errors.Busy("waiting set is full: 512 of 512 requests", retry_after_ms=250)
    assert str(error) == "[TW-BUSY retry_after_ms=250] waiting set is full: 512 of 512 requests"
    assert error.code == "UNAVAILABLE"


def test_text_without_a_tag() -> None:
    assert from_tagged("Exceeds maximum queue size") is None


def test_unknown_tag_keeps_its_text() -> None:
    error = errors.from_wire("TW-NEWER", "from a newer server")
    assert isinstance(error, errors.InternalError)
    assert "TW-NEWER" in str(error)
    assert "from a newer server" in str(error)


def test_errors_need_no_transport() -> None:
    code = "import sys, tidewheel.errors; print({'grpc', 'tritonclient', 'httpx2'} & sys.modules.keys())"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
    )
