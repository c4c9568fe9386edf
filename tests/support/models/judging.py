"""What `tidewheel check` says of a model."""

from __future__ import annotations

from tidewheel.config import EngineConfig
from tidewheel.entries.findings import CheckReport, Problem
from tidewheel.entries.model_rules import ModelJudge

NAME = "entry"


def judge(config: EngineConfig) -> tuple[list[Problem], CheckReport]:
    """Judge the model of the entry `NAME`. Return its problems, and the report with what is known of it."""
    report = CheckReport()
    return list(ModelJudge(config, report, NAME, is_this_machine=True).problems()), report
