"""An engine whose deltas a test scripts, and a sink that records what a client would get."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from support.frontend.tokenizers_on_the_spot import NAMED, byte_level_bpe
from tidewheel.engine.messages import WHOLE_REQUEST, AddRequest, EngineInfo
from tidewheel.errors import TidewheelError
from tidewheel.frontend.output import OutputChunk, Response, is_last

TIMEOUT_S = 30.0  # of waits that end at once unless something is broken
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_info(folder: Path, *, vocab_size: int, max_model_len: int = 256, num_blocks: int = 64) -> EngineInfo:
    return EngineInfo(
        pid=1, model=str(folder), architecture="LlamaForCausalLM", device="cpu", dtype="float32",
        vocab_size=vocab_size, max_model_len=max_model_len, max_num_seqs=8, max_num_batched_tokens=64, block_size=16,
        num_blocks=num_blocks, weights_bytes=1, activation_bytes=1, kv_cache_bytes=1, enable_prefix_caching=True,
        load_seconds=0.1,
    )  # fmt: skip


def write_model_folder(folder: Path, *, template: str | None = TEMPLATE, **generation: object) -> int:
    """Write the files of a model that the front end reads; return the size of the vocabulary."""
    backend = byte_level_bpe()
    backend.save(str(folder / "tokenizer.json"))
    named = NAMED if template is None else {**NAMED, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [2]}))
    return backend.get_vocab_size()


class FakeEngine:
    """An engine that records its calls; `add` raises `refusal`."""

    def __init__(self) -> None:
        self.added: dict[int, AddRequest] = {}
        self.closed: list[AddRequest] = []
        self.num_added = 0  # the same request again included
        self.cancelled: list[int] = []
        self.cancelled_sequences: list[tuple[int, int]] = []
        self.reported: list[tuple[int, TidewheelError | None]] = []
        self.refusal: TidewheelError | None = None
        self.refused: Counter[str] = Counter()
        self._changed = threading.Condition()

    def add(self, message: AddRequest) -> None:
        with self._changed:
            if self.refusal is not None:
                raise self.refusal
            if message.options.order:
                self.closed.append(message)
            else:
                self.added[message.key] = message
            self.num_added += 1
            self._changed.notify_all()

    def count_refused(self, tenant: str, count: int) -> None:
        with self._changed:
            self.refused[tenant] += count
            self._changed.notify_all()

    def report(self, key: int, error: TidewheelError | None = None) -> None:
        self.reported.append((key, error))

    def cancel(self, key: int, index: int = WHOLE_REQUEST) -> None:
        with self._changed:
            if index == WHOLE_REQUEST:
                self.cancelled.append(key)
            else:
                self.cancelled_sequences.append((key, index))
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition is true after a call."""
        with self._changed:
            assert self._changed.wait_for(condition, TIMEOUT_S)

    def wait_added(self, count: int) -> list[int]:
        """Wait for so many requests; return their keys."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.added) >= count, TIMEOUT_S)
            return list(self.added)

    def wait_cancelled(self, key: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.cancelled, TIMEOUT_S)


class RecordingSink:
    """A client. A `gate` holds each `send` until it is set. `chunks` belong to the first sequence."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.responses: list[Response] = []
        self.error: TidewheelError | None = None
        self.num_ends = 0
        self.gone = threading.Event()
        self._gate = gate
        self._changed = threading.Condition()
        self._is_busy = threading.Lock()

    def send(self, response: Response) -> None:
        assert self._is_busy.acquire(blocking=False), "two threads send at once"
        try:
            if self._gate is not None:
                assert self._gate.wait(TIMEOUT_S)
            with self._changed:
                assert not self.num_ends, "a chunk after the end"
                self.responses.append(response)
                self.num_ends += is_last(response)
                self._changed.notify_all()
        finally:
            self._is_busy.release()

    def fail(self, error: TidewheelError) -> None:
        with self._changed:
            self.error = error
            self.num_ends += 1
            self._changed.notify_all()

    def is_cancelled(self) -> bool:
        return self.gone.is_set()

    def wait_chunks(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.chunks) >= count, TIMEOUT_S)

    def wait_end(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_ends > 0, TIMEOUT_S)

    @property
    def chunks(self) -> list[OutputChunk]:
        return [response[0] for response in self.responses]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    def texts(self) -> list[str]:
        """Return the text of each sequence."""
        return ["".join(chunk.text for chunk in chunks) for chunks in zip(*self.responses, strict=True)]

    @property
    def token_ids(self) -> list[int]:
        return [token_id for chunk in self.chunks for token_id in chunk.token_ids]

    @property
    def finish_reason(self) -> str | None:
        return self.chunks[-1].finish_reason if self.chunks else None
