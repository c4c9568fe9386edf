"""Front-end time for hostile requests: stop strings, and refusals at the engine's door, in median microseconds.

    python benchmarks/front_end_cost.py --save

Stop strings are of the worst legal request, on output that keeps most of them possible. No figure of the door may
depend on `--sent`. `refuse` includes making the error.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from study import Study, show
from tidewheel.engine.messages import AddRequest, Room
from tidewheel.errors import WaitingSetFull
from tidewheel.frontend.door import RefusingDoor
from tidewheel.frontend.text import StopChecker, StopStrings
from tidewheel.request import Priority
from tidewheel.sampling import MAX_STOP_BYTES, MAX_STOP_STRINGS, SamplingParams

NUM_CHARS = 4096
PROMPT = bytes(4 * 16)


def median_us(work: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return round(statistics.median(seconds) * 1e6, 2)


def stop_cost(rounds: int) -> dict[str, float]:
    """Time building a request's matcher, and one output character."""
    strings = ["a" * (MAX_STOP_BYTES - 1) + chr(ord("b") + index) for index in range(MAX_STOP_STRINGS)]
    output = ("a" * (MAX_STOP_BYTES - 1) + "z") * (NUM_CHARS // MAX_STOP_BYTES)
    matcher = StopStrings(strings)
    return {
        "stop_build_us": median_us(lambda: StopStrings(strings), rounds),
        "stop_char_us": round(median_us(lambda: StopChecker(matcher).push(output), 20) / len(output), 3),
    }


def full_door(sent: int) -> RefusingDoor:
    """Return a door with room for one request."""
    door = RefusingDoor()
    door.hear(Room(0, sent + 1, 0, 1 << 40, Priority.CRITICAL, 250, []))
    for key in range(sent):
        door.claim(request(key))
    return door


def request(key: int) -> AddRequest:
    return AddRequest(key, PROMPT, SamplingParams(max_tokens=1))


def door_cost(sent: int, rounds: int) -> dict[str, float]:
    door, one, another = full_door(sent), request(sent), request(sent + 1)
    word = Room(0, sent + 1, 0, 1 << 40, Priority.CRITICAL, 250, [sent])

    def refuse() -> None:
        try:
            door.claim(another)
        except WaitingSetFull:
            return
        raise RuntimeError("a request passed a full door")

    def pass_by(leave: Callable[[], None]) -> Callable[[], None]:
        def work() -> None:
            door.claim(one)
            leave()

        return work

    figures = {
        "sent": sent,
        "claim_and_forget_us": median_us(pass_by(lambda: door.forget(sent)), rounds),
        "claim_and_hear_us": median_us(pass_by(lambda: door.hear(word)), rounds),
    }
    door.claim(one)
    return {**figures, "refuse_us": median_us(refuse, rounds)}


def main() -> None:
    study = Study("front_end_cost", __doc__, "numpy", "msgspec")
    study.add_argument("--sent", type=int, nargs="+", default=[4000, 16384], help="requests not yet heard of")
    study.add_argument("--rounds", type=int, default=2000)
    options = study.begin()
    stop = stop_cost(options.rounds)
    doors = [door_cost(sent, options.rounds) for sent in options.sent]
    show([stop])
    show(doors)
    study.save({"unit": "us", "stop": stop, "door": doors})


if __name__ == "__main__":
    main()
