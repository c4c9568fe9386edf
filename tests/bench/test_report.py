"""Results on disk, in tables, pictures and the page."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support.bench.runs import ENVIRONMENT, measured, outcome, recorder, stage
from tidewheel.bench.arrivals import LoadPattern
from tidewheel.bench.capacity import CapacityBracket
from tidewheel.bench.figure_columns import (
    LATENCIES,
    RATES,
    SERVER,
    SHORT,
    capacity_table,
    class_table,
    table,
    verdicts,
)
from tidewheel.bench.html_page import render, write_files
from tidewheel.bench.outcome import RequestOutcome
from tidewheel.bench.pictures import capacity_picture, pictures
from tidewheel.bench.results import SAMPLE_COLUMNS, ResultRecorder, RunResult, StageResult
from tidewheel.bench.run_plan import PlannedRun, PlannedStage
from tidewheel.bench.suites import capacity_findings
from tidewheel.bench.terminal import result_tables

VOID = {"meta", "img", "br"}


def some(run: PlannedRun) -> list[RequestOutcome]:
    slow = 3.0 if run.target.name == "baseline_dynamic" else 0.2
    streamed = run.target.name != "baseline_dynamic"
    return [outcome(sent=0.5 * i, ttft=slow + 0.01 * i, streamed=streamed) for i in range(20)] + [
        outcome(sent=9.0, code="TW-BUSY")
    ]


class Page(HTMLParser):
    """Checks that tags are closed, and collects what matters."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.images: list[str] = []
        self.cells: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("href", "src", "srcset", "action"):
                self.links.append(value or "")
        if tag == "img":
            self.images.append(dict(attrs)["src"] or "")
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


STAGES = {
    "bars": stage(),
    "curve": stage(loads=[LoadPattern("poisson", rate) for rate in (1.0, 2.0, 3.0, 4.0)]),
    "batch": stage(loads=[LoadPattern("closed", size) for size in (1, 2, 4)]),
    "one repeat": stage(repeats=1),
}


@pytest.mark.parametrize("name", STAGES)
def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path, name: str) -> None:
    result = measured(STAGES[name], some)
    one = recorder(tmp_path, result)
    one.extra |= {"reference": "baseline_dynamic", "capacity_ratio": 12.3456, "capacity_ratio_is_lower_bound": True}
    page = Page(render(one, {"run": pictures(result)}))
    assert page.images
    assert all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    for image in page.images:
        ElementTree.fromstring(base64.b64decode(image.partition(",")[2]))
    assert "@import" not in page.text
    assert "≥ 12.3x" in page.text
    assert "A <test>" in page.text  # escaped, so that it reads as it was written
    assert "tidewheel bench --target <continuous>" in page.text
    assert "commit 0123456789ab" in page.text
    assert {"continuous", "baseline_dynamic"} <= set(page.cells)
    assert "nan" not in " ".join(page.cells)


def test_the_page_without_pictures_has_its_tables(tmp_path: Path) -> None:
    page = Page(render(recorder(tmp_path, measured(stage(), some)), {}))
    assert not page.images
    assert "TW-BUSY 2" in page.cells


def test_pictures_are_images_for_pages() -> None:
    for picture in pictures(measured(stage(), some)):
        assert picture.png().startswith(b"\x89PNG")
        assert picture.webp()[8:12] == b"WEBP"
        assert picture.caption


def test_one_load_of_one_target_has_its_latencies() -> None:
    one = stage()
    one = replace(one, targets=one.targets[:1], loads=one.loads[:1])
    (picture,) = pictures(measured(one, some))
    assert picture.figure.axes[0].get_title(loc="left") == "First token, ms"


def test_a_sentence_says_what_was_in_time_and_what_made_the_rest_late(tmp_path: Path) -> None:
    result = measured(stage(), some)
    said = verdicts(result)
    assert len(said) == len(result.stage.targets)
    (late,) = [text for text in said if text.startswith("baseline_dynamic")]
    assert " 0 % in time: " in late and "ms to the first token, objective " in late and "a token" not in late
    one = recorder(tmp_path, result)
    assert late in "\n".join(result_tables(one))
    assert late in Page(render(one, {})).text


def test_nothing_measured_gives_no_picture() -> None:
    assert pictures(StageResult(stage())) == []


def test_tables_have_a_row_per_load_and_target() -> None:
    result = measured(stage(), some)
    rows = table(result, SHORT).rows
    assert [row[:2] for row in rows] == [
        ["2/s", "continuous"],
        ["2/s", "baseline_dynamic"],
        ["4 in flight", "continuous"],
        ["4 in flight", "baseline_dynamic"],
    ]
    text = table(result, RATES).as_text().splitlines()
    assert len(text) == 5
    assert len({line.index("continuous") for line in text if "continuous" in line}) == 1
    markdown = table(result, LATENCIES).as_markdown().splitlines()
    assert len({line.count("|") for line in markdown}) == 1


def test_columns_in_which_nothing_is_known_are_left_out() -> None:
    shown = table(measured(stage(), some), SERVER).without_empty()
    assert shown.header == ["load", "target", "batch req/step", "busy %"]
    assert shown.rows[0][2:] == ["4.00", "50.0"]
    silent = StageResult(stage(), [RunResult(run, some(run), {}) for run in stage().runs()])
    assert table(silent, SERVER).without_empty().rows == []


def test_classes_have_rows_of_their_own(tmp_path: Path) -> None:
    def two_classes(run: PlannedRun) -> list[RequestOutcome]:
        return [outcome(priority=4, ttft=2.0), outcome(priority=1), outcome(code="TW-BUSY", priority=4)]

    result = measured(stage(["continuous"], repeats=1, loads=[LoadPattern("closed", 2)]), two_classes)
    assert [row[2:7] for row in class_table(result).rows] == [
        ["critical", "1", "100", "0.48", "100"],
        ["low", "2", "0.00", "0.00", "2,000"],
    ]
    assert class_table(measured(stage(), some)).rows == []
    assert "critical" in Page(render(recorder(tmp_path, result), {})).cells


def test_a_client_that_fell_behind_is_told_of(tmp_path: Path) -> None:
    def late(run: PlannedRun) -> list[RequestOutcome]:
        outcomes = some(run)
        outcomes[0].lag = 0.3 if run.target.name == "continuous" and run.load.kind == "poisson" else 0.01
        return outcomes

    page = Page(render(recorder(tmp_path, measured(stage(), late)), {})).text
    assert "continuous at 2/s: the client itself was late, by 300 ms" in page
    assert page.count("the client itself was late") == 1


CAPACITIES = capacity_findings(
    {
        "continuous": {"whole answer": CapacityBracket(16.0, 17.0), "stream": CapacityBracket(8.0, math.inf)},
        "baseline_dynamic": {"whole answer": CapacityBracket(0.0, 0.5, (0.25,))},
    },
    "continuous",
    "baseline_dynamic",
) | {"reference": "baseline_dynamic", "objective": {"ttft_s": 0.2, "tpot_s": 0.02}}


def searched() -> StageResult:
    of = stage(
        name="capacity", loads=[LoadPattern("poisson", rate) for rate in (1.0, 2.0, 4.0)], repeats=1, longest_s=20.0
    )
    return measured(of, some)


def test_capacities_lead_the_page(tmp_path: Path) -> None:
    one = recorder(tmp_path, measured(stage(name="alone", title="Alone", is_preliminary=True), some), searched())
    one.extra |= CAPACITIES
    written = write_files(one, None)
    page = Page((tmp_path / "report.html").read_text())
    assert str(tmp_path / "report.html") in written
    assert "33.0x" in page.text  # the baseline has less than 0.5/s
    rows = [page.cells[at : at + 6] for at in range(6, 24, 6)]
    assert rows == [
        ["whole answer", "continuous", "16.5", "16.0 to 17.0", "≥ 33.0", "-"],
        ["", "baseline_dynamic", "0.00", "0.00 to 0.50", "-",
         "no rate met the objective, down to 0.25/s; undecided at 0.25/s"],
        ["stream", "continuous", "≥ 8.00", "8.00 to ?", "-", "no rate missed the objective, up to 8/s"],
    ]  # fmt: skip
    assert page.text.index("A <test>") < page.text.index("Alone")
    for name in ("capacity.png", "capacity_rates.png"):
        assert (tmp_path / name).stat().st_size > 0
    assert len(page.images) == 2
    tables = list(result_tables(one))
    assert tables[0] == capacity_table(CAPACITIES).as_text()
    assert len(tables) == 2


def test_the_bars_of_capacities_are_sorted_and_have_their_ratio() -> None:
    (axes,) = capacity_picture(CAPACITIES, stage().targets).figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["baseline_dynamic", "continuous"]
    said = {text.get_text() for text in axes.texts}
    assert said >= {"16.5   ≥ 33.0x", "under 0.5"} and "0" not in said


def test_a_search_has_a_panel_for_each_target() -> None:
    (picture,) = pictures(searched())
    assert [axes.get_title(loc="left") for axes in picture.figure.axes] == ["continuous", "baseline_dynamic"]
    assert all(len(axes.get_lines()) == 3 for axes in picture.figure.axes)  # its own, the other's, and the goal


def test_a_recorded_stage_has_the_figures_that_were_measured(tmp_path: Path) -> None:
    one = searched()
    recorder(tmp_path, one).save_summaries(tmp_path / "record.json")
    (stage_of_record,) = json.loads((tmp_path / "record.json").read_text())["stages"]
    assert "runs" not in stage_of_record
    again = StageResult.of_document(stage_of_record)
    assert table(again, RATES).as_text() == table(one, RATES).as_text()
    assert [picture.name for picture in pictures(again)] == ["capacity_rates"]


def test_the_record_has_all_that_is_needed_to_repeat_and_every_sample(tmp_path: Path) -> None:
    one = recorder(tmp_path, measured(stage(), some))
    document = json.loads(one.save().read_text(), parse_constant=lambda name: pytest.fail(name))
    assert {name: document[name] for name in ENVIRONMENT} == ENVIRONMENT
    (recorded,) = document["stages"]
    assert recorded["seed"] == 0
    assert recorded["workload"]["inputs"] == {"low": 16, "high": 128}
    assert recorded["slo"] == {"ttft_s": 1.0, "tpot_s": 0.1}
    assert [target["name"] for target in recorded["targets"]] == ["continuous", "baseline_dynamic"]
    assert len(recorded["runs"]) == 8
    for run in recorded["runs"]:
        assert len(run["samples"]) == 21
        assert {len(sample) for sample in run["samples"]} == {len(SAMPLE_COLUMNS)}
    columns = document["sample_columns"]
    refused = dict(zip(columns, recorded["runs"][0]["samples"][-1], strict=True))
    assert refused["error"] == "TW-BUSY"
    assert refused["ttft_s"] is None


def test_runs_are_kept_as_they_come(tmp_path: Path) -> None:
    recorder(tmp_path, measured(stage(), some))
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert [json.loads(line)["target"] for line in lines[:2]] == ["continuous", "baseline_dynamic"]
    assert len(lines) == 8


def test_a_run_that_was_cut_short_counts_only_when_there_is_no_other(tmp_path: Path) -> None:
    of: PlannedStage = stage(repeats=2)
    result = measured(of, some)
    result.runs[0].interrupted = True
    assert result.figures("continuous", 0)["repeats"] == 1
    alone = StageResult(of, [RunResult(result.runs[0].run, some(result.runs[0].run), {}, interrupted=True)])
    assert alone.figures("continuous", 0)["requests"] == 21
    assert alone.figures("baseline_dynamic", 1) == {}
    one = ResultRecorder(tmp_path, ENVIRONMENT)
    one.stages.append(alone)
    assert "Cut short" in Page(render(one, {"run": pictures(alone)})).text
