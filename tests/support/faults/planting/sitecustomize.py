"""Plants the defects in any Python that starts with this folder in its path."""

from __future__ import annotations

from support.faults import defects

defects.plant()
