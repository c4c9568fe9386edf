"""Results of `tidewheel bench` on the terminal and in files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidewheel.bench.pictures import Picture
    from tidewheel.bench.results import Recorder


def report(recorder: Recorder, record: Path | None) -> None:
    """Write all results; `record` adds a JSON copy, with the plots beside it."""
    from tidewheel.bench.columns import SHORT, as_text, table, without_empty
    from tidewheel.bench.html_page import render

    pictures = _pictures(recorder)
    for result in recorder.stages:
        print(f"\n{result.stage.title}\n{as_text(without_empty(table(result, SHORT)))}")
    page = recorder.folder / "report.html"
    page.write_text(render(recorder, pictures), encoding="utf-8")
    drawn = [picture for of_stage in pictures.values() for picture in of_stage]
    saved = [recorder.save()]
    _save_pictures(drawn, recorder.folder, "")
    if record is not None:
        saved.append(recorder.save(record))
        _save_pictures(drawn, record.parent, f"{record.stem}_")
    print(f"\nreport: {page}\nresults: {', '.join(map(str, saved))}")


def _pictures(recorder: Recorder) -> dict[str, list[Picture]]:
    """Return plots by stage name, or none, with a note, without matplotlib."""
    try:
        from tidewheel.bench.pictures import pictures
    except ImportError:
        print("no pictures: matplotlib is not installed (pip install 'tidewheel[load]')", file=sys.stderr)
        return {}
    return {result.stage.name: pictures(result) for result in recorder.stages}


def _save_pictures(drawn: list[Picture], folder: Path, prefix: str) -> None:
    for picture in drawn:
        (folder / f"{prefix}{picture.name}.png").write_bytes(picture.png())
