"""Who has to leave when blocks or rows run out."""

from __future__ import annotations

import numpy as np

from tidewheel.scheduler.columns import Columns


def protected_row(columns: Columns) -> int:
    """The oldest running request of the highest class: it is never a victim, so something always progresses."""
    rows = columns.running.nonzero()[0]
    order = np.lexsort((columns.sequences[rows], columns.arrival_times[rows], columns.classes[rows]))
    return int(rows[order[0]])


def choose_victim(columns: Columns, *, lowest_class: int, max_preemptions: int) -> int | None:
    """The running row to preempt among those of `lowest_class` or a lower class; None if there is none.

    The lowest class goes first, in it the row that loses least (fewest computed tokens), of these the youngest. Rows
    that were preempted `max_preemptions` times are taken only when nobody else is left.
    """
    rows = (columns.running & (columns.classes >= lowest_class)).nonzero()[0]
    if not len(rows):
        return None
    rows = rows[rows != protected_row(columns)]
    if not len(rows):
        return None
    order = np.lexsort(
        (
            -columns.sequences[rows],
            -columns.arrival_times[rows],
            columns.num_computed_tokens[rows],
            -columns.classes[rows],
            columns.num_preemptions[rows] >= max_preemptions,
        )
    )
    return int(rows[order[0]])
