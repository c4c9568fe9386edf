import math
from html import escape
from typing import NamedTuple

NOTHING = "-"


def number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return NOTHING
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


class TextTable(NamedTuple):
    header: list[str]
    rows: list[list[str]]
    num_labels: int = 2

    def without_empty(self) -> "TextTable":
        kept = [
            i for i in range(len(self.header)) if i < self.num_labels or any(row[i] != NOTHING for row in self.rows)
        ]
        rows = [[row[i] for i in kept] for row in self.rows] if len(kept) > self.num_labels else []
        return self._replace(header=[self.header[i] for i in kept] if rows else self.header, rows=rows)

    def as_text(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )

    def as_markdown(self) -> str:
        rule = ["---"] * self.num_labels + ["--:"] * (len(self.header) - self.num_labels)
        lines = [[cell.replace("|", "/") for cell in line] for line in (self.header, *self.rows)]
        return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))

    def as_html(self) -> str:
        if not self.rows:
            return ""
        header = "".join(f"<th>{escape(cell)}</th>" for cell in self.header)
        lines, before = [], ""
        for row in self.rows:
            is_new = row[0] != before
            cells = "".join(f"<td>{escape(cell)}</td>" for cell in (row[0] if is_new else "", *row[1:]))
            lines.append(f'<tr class="first">{cells}</tr>' if is_new and before else f"<tr>{cells}</tr>")
            before = row[0]
        return f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
