"""Time to first token of a session's second turn, which should cost only its new tokens, through Triton.

python benchmarks session_resume FOLDER --save

cold      the second turn's whole conversation, never seen before
new only  a prompt as long as the second turn's new tokens
session   the second turn, with the session's blocks on the device
swapped   the same, with the session pushed to the host tier
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.serving import served
from common.study import Study, in_turns, summary
from tidewheel_client import Client

FIRST_TURN = 384  # prompt tokens
ANSWER = 16
NEW_TOKENS = 16
NUM_BLOCKS = 96  # of 16 tokens: room for three conversations, not four
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_threads": 1, "max_model_len": 512, "num_blocks": NUM_BLOCKS, "swap_space": 0.25,
}  # fmt: skip


class Turns:
    def __init__(self, client: Client, seed: int) -> None:
        self._client = client
        self._rng = random.Random(seed)
        self._sessions = itertools.count()

    def ids(self, count: int) -> list[int]:
        return [self._rng.randrange(4, 10_000) for _ in range(count)]

    def send(self, input_ids: list[int], **parameters: Any) -> tuple[float, list[int]]:
        start, first, answer = time.perf_counter(), 0.0, []
        for chunk in self._client.stream(
            input_ids=input_ids, max_tokens=ANSWER, temperature=0.0, ignore_eos=True, return_token_ids=True,
            **parameters,
        ):  # fmt: skip
            first = first or time.perf_counter() - start
            answer += chunk.token_ids
        return first, answer

    def cold(self) -> float:
        return self.send(self.ids(FIRST_TURN + ANSWER + NEW_TOKENS))[0]

    def new_only(self) -> float:
        return self.send(self.ids(NEW_TOKENS))[0]

    def session(self, between: Callable[[], None] = lambda: None) -> float:
        name = f"s{next(self._sessions)}"
        prompt = self.ids(FIRST_TURN)
        _, answer = self.send(prompt, session_id=name)
        between()
        seconds, _ = self.send([*prompt, *answer, *self.ids(NEW_TOKENS)], session_id=name)
        self._client.close_session(name)
        return seconds

    def swapped(self) -> float:
        return self.session(between=self.fill_the_pool)

    def fill_the_pool(self) -> None:
        for _ in range(2 * NUM_BLOCKS * 16 // FIRST_TURN):
            self.send(self.ids(FIRST_TURN))


def main() -> None:
    study = Study("session_resume", __doc__, "torch", "tritonclient")
    study.add_argument("folder", type=Path, help="a model that tidewheel serves")
    study.add_argument("--repeats", type=int, default=20)
    study.add_argument("--seed", type=int, default=0)
    options = study.begin()
    with served(options.folder, SETTINGS) as address, Client(address.grpc, model=address.model) as client:
        turns = Turns(client, options.seed)
        kinds = {"cold": turns.cold, "new only": turns.new_only, "session": turns.session, "swapped": turns.swapped}
        samples = in_turns(kinds, options.repeats)
    figures = {name: summary(values) for name, values in samples.items()}
    for name, figure in figures.items():
        ratio = figure["median"] / figures["new only"]["median"]
        print(f"{name:9} TTFT {figure['median'] * 1e3:7.1f} ms   {ratio:5.2f} x that of the new tokens alone")
    lengths = {"first_turn": FIRST_TURN, "answer": ANSWER, "new": NEW_TOKENS}
    study.save({"settings": SETTINGS, "tokens": lengths, "ttft_s": figures})


if __name__ == "__main__":
    main()
