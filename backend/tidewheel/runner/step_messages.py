"""Messages from rank 0 to the ranks that sample no tokens: steps, and adapters of which each reads its part.

The other ranks read on a thread of their own, and rank 0 uses an adapter once all have it: no step waits for a file.
"""

import contextlib
import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tidewheel.batch import NO_TRANSFERS, Int32Array, NewRow, ScheduledBatch, TransferArrays, no_ids
from tidewheel.errors import ConfigError
from tidewheel.lora import Lora, LoraLoad
from tidewheel.models.lora_folder import LoraWeights
from tidewheel.models.model_folder import one_line
from tidewheel.request import Pooling, Request
from tidewheel.runner.sampling_plan import reads_all_logits
from tidewheel.sampling import SamplingParams

_APART = ("new_rows", "transfers", "lora_loads")
_FIELDS = [field.name for field in fields(ScheduledBatch) if field.name not in _APART]
RowMessage = tuple[int, bytes, int, Pooling, SamplingParams]  # row, tokens, prompt's length
Read = Callable[[Path], LoraWeights]
ReadOrder = tuple[int, str]  # number of the adapter, and its folder
CLOCK_TICK_S = 0.01  # changes within a tick of the kernel's clock may have one time


class StepMessage(msgspec.Struct, array_like=True):
    fields: list[Any]  # of the batch, by `_FIELDS`; an array is bytes of int32
    new_rows: list[RowMessage]
    transfers: list[bytes]  # int32; empty: none
    lora_loads: list[tuple[int, int]]  # slot, number of the adapter
    dropped_loras: list[int]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StepMessage)


def encode_step(batch: ScheduledBatch, loras: "LeaderLoras") -> bytes:
    values = [getattr(batch, name) for name in _FIELDS]
    transfers = () if batch.transfers is NO_TRANSFERS else batch.transfers
    return _encoder.encode(
        StepMessage(
            [_bytes(value) if isinstance(value, np.ndarray) else value for value in values],
            [_row_message(new) for new in batch.new_rows],
            [_bytes(ids) for ids in transfers],
            [(slot, lora.weights.number) for slot, lora in batch.lora_loads],
            loras.take_dropped(),
        )
    )


def _row_message(new: NewRow) -> RowMessage:
    row, request, token_ids, whole = new
    sampling = SamplingParams(
        temperature=whole.temperature, top_k=whole.top_k, top_p=whole.top_p, min_p=whole.min_p,
        logprobs=0 if reads_all_logits(new) else None, prompt_logprobs=whole.prompt_logprobs,
    )  # fmt: skip
    return row, _bytes(token_ids), request.num_prompt_tokens, request.pooling, sampling


def decode_step(payload: bytes, loras: MutableMapping[int, LoraWeights]) -> ScheduledBatch:
    """Return the batch. Its requests have no text, and of sampling parameters `prompt_logprobs` and filters.

    `loras`: adapters by number; those that rank 0 has dropped are removed.
    """
    message = _decoder.decode(payload)
    loads = tuple(LoraLoad(slot, Lora("", number, Path(), loras[number])) for slot, number in message.lora_loads)
    for number in message.dropped_loras:
        loras.pop(number, None)
    given = zip(_FIELDS, message.fields, strict=True)
    values: dict[str, Any] = {name: _ids(value) if isinstance(value, bytes) else value for name, value in given}
    values["samples"] = values["samples"].astype(np.bool_)
    transfers = TransferArrays(*map(_ids, message.transfers)) if message.transfers else NO_TRANSFERS
    new_rows = tuple(map(_new_row, message.new_rows))
    return ScheduledBatch(**values, new_rows=new_rows, transfers=transfers, lora_loads=loads)


def _new_row(message: RowMessage) -> NewRow:
    row, data, num_prompt_tokens, pooling, sampling = message
    token_ids = _ids(data)
    prompt = token_ids[:num_prompt_tokens]
    return NewRow(
        row, Request("", prompt, sampling, max_tokens=1, arrival_time=0.0, pooling=pooling), token_ids, sampling
    )


def _bytes(ids: npt.NDArray[Any]) -> bytes:
    return ids.astype(np.int32, copy=False).tobytes()


def _ids(data: bytes) -> Int32Array:
    return np.frombuffer(bytearray(data), np.int32)  # torch shares no memory that cannot be written


def without_rows(batch: ScheduledBatch) -> ScheduledBatch:
    """Return a batch of the block copies alone: rank 0 then repeats the step without them and a failed row."""
    return ScheduledBatch(
        batch.step_id, no_ids(), no_ids(), no_ids(), np.empty(0, np.bool_), 0, 0, transfers=batch.transfers
    )


class LeaderLoras:
    """Adapters of rank 0, which tells the other ranks which to read and which to drop."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections
        self._numbers = itertools.count()
        self._dropped = deque[int]()  # that the other ranks still have

    def read(self, folder: Path, read: Read) -> LoraWeights:
        """Read an adapter on all ranks, for one caller at a time. Raise `ConfigError`."""
        number = next(self._numbers)
        time.sleep(CLOCK_TICK_S)  # else a change that one rank misses may leave no trace
        for connection in self._connections:
            connection.send_bytes(msgspec.msgpack.encode((number, str(folder))))
        weights, own = _read(folder, read)
        problems = [own, *(connection.recv_bytes().decode() for connection in self._connections)]
        if weights is None or any(problems):
            self._dropped.append(number)
            raise ConfigError(next(filter(None, problems)))
        weights.number = number
        weakref.finalize(weights, self._dropped.append, number)
        return weights

    def take_dropped(self) -> list[int]:
        """Return the numbers of the adapters that rank 0 has dropped since the last call."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]


def serve_reads(connection: Connection, read: Read, loras: MutableMapping[int, LoraWeights]) -> None:
    """Read the adapters that rank 0 orders, into `loras` by number, until its process ends."""
    with connection, contextlib.suppress(EOFError, OSError):
        while True:
            number, folder = msgspec.msgpack.decode(connection.recv_bytes(), type=ReadOrder)
            weights, problem = _read(Path(folder), read)
            if weights is not None:
                loras[number] = weights
            connection.send_bytes(problem.encode())


def _read(folder: Path, read: Read) -> tuple[LoraWeights | None, str]:
    """Return a rank's part of an adapter, or None and the error."""
    try:
        return read(folder), ""
    except Exception as error:  # it must be answered
        return None, str(error) if isinstance(error, ConfigError) else f"{folder} cannot be read: {one_line(error)}"
