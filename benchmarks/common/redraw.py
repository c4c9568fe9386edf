"""Draw the pictures of `benchmarks/results` again, from their records: nothing is measured.

python benchmarks redraw [cpu_capacity] [host_timeline] [overload] [shared_device_policies]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from common.study import RESULTS
from engine import host_timeline
from one_shot import shared_device
from path import overload
from tidewheel.bench.charts import ChartImage
from tidewheel.bench.pictures import capacity_picture, pictures
from tidewheel.bench.results import StageResult


def of_capacity(record: Mapping[str, Any]) -> dict[str, ChartImage]:
    search = StageResult.of_document(record["stages"][-1])
    found = [capacity_picture(record, search.stage.targets), *pictures(search)]
    return {f"cpu_capacity_{one.name}": one for one in found}


DRAWN: dict[str, Callable[[Mapping[str, Any]], dict[str, ChartImage]]] = {
    "cpu_capacity": of_capacity,
    "host_timeline": lambda record: {"host_timeline": host_timeline.picture(record["models"])},
    "shared_device_policies": lambda record: {"shared_device_policies": shared_device.picture(record)},
    "overload": lambda record: {"overload": overload.picture(record)},
}


def main() -> None:
    names = sys.argv[1:] or list(DRAWN)
    if unknown := set(names) - set(DRAWN):
        sys.exit(f"{min(unknown)!r} is none of {', '.join(DRAWN)}")
    for name in names:
        for file, picture in DRAWN[name](json.loads((RESULTS / f"{name}.json").read_text())).items():
            (RESULTS / f"{file}.webp").write_bytes(picture.webp())


if __name__ == "__main__":
    main()
