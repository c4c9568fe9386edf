from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tidewheel.entries.finding import Edit, Finding


def mend(findings: Iterable[Finding]) -> list[Finding]:
    """Write the right names into the files, and nothing else; return the findings that this mends."""
    mended = [finding for finding in findings if finding.edit is not None]
    edits: dict[str, list[Edit]] = defaultdict(list)
    for finding in mended:
        if finding.edit is not None:
            edits[finding.file].append(finding.edit)
    for file, changes in edits.items():
        path = Path(file)
        newline = "\r\n" if b"\r\n" in path.read_bytes() else "\n"
        path.write_text(edited(path.read_text(encoding="utf-8"), changes), encoding="utf-8", newline=newline)
    return mended


def edited(text: str, edits: Iterable[Edit]) -> str:
    """Return the text with pieces replaced. They must not overlap."""
    for edit in sorted(edits, reverse=True):  # the last one first, so that offsets hold
        end = edit.start + len(edit.old)
        assert text[edit.start : end] == edit.old, "the text is another than the one that was checked"
        text = text[: edit.start] + edit.new + text[end:]
    return text
