"""The engine that fails on purpose is run by tests alone."""

from __future__ import annotations

import logging

import pytest

from tidewheel.engine.launcher import FAULTS, FAULTS_ALLOWED, engine_command
from tidewheel.errors import ConfigError


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAULTS, raising=False)
    monkeypatch.delenv(FAULTS_ALLOWED, raising=False)


def test_the_engine_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULTS_ALLOWED, "1")
    assert engine_command()[-2:] == ["-m", "tidewheel.engine.process"]


def test_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULTS, "support.faults.planted")
    with pytest.raises(ConfigError, match=f"{FAULTS} is 'support.faults.planted'.*unset it"):
        engine_command()


def test_allowed_and_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(FAULTS, "support.faults.planted")
    monkeypatch.setenv(FAULTS_ALLOWED, "1")
    with caplog.at_level(logging.WARNING):
        assert engine_command()[-1] == "support.faults.planted"
    assert "fails on purpose" in caplog.text
