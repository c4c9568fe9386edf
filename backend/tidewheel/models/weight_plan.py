"""A checkpoint as a list of reads of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tidewheel.models.safetensors_file import SafetensorsFile

MAX_PARTS = 512  # per read: preadv(2) takes 1,024 buffers


class Part(NamedTuple):
    """Run of elements of one tensor."""

    begin: int  # bytes from the start of the file's data
    end: int
    dtype: torch.dtype  # in the file
    destination: torch.Tensor  # flat view [n], of its own dtype


@dataclass(frozen=True, slots=True)
class Chunk:
    """Contiguous bytes of a file, read at once.

    Parts start at multiples of their element size from the chunk's start.
    """

    file: SafetensorsFile
    parts: tuple[Part, ...]

    @property
    def begin(self) -> int:
        return self.parts[0].begin

    @property
    def size(self) -> int:
        return self.parts[-1].end - self.parts[0].begin

    @property
    def is_converted(self) -> bool:
        return any(part.dtype != part.destination.dtype for part in self.parts)


def plan_chunks(
    files: Iterable[SafetensorsFile], destinations: Mapping[str, torch.Tensor], max_bytes: int
) -> list[Chunk]:
    """Return reads of at most `max_bytes` (a multiple of 8) that fill every destination once, in file order.

    Destinations are contiguous; other tensors are not read.
    """
    return [
        Chunk(file, parts) for file in files for parts in _grouped(_parts(file, destinations, max_bytes), max_bytes)
    ]


def _parts(file: SafetensorsFile, destinations: Mapping[str, torch.Tensor], max_bytes: int) -> Iterator[Part]:
    for name, entry in file.in_order():
        if name not in destinations:
            continue
        size = entry.dtype.itemsize
        pieces = torch.split(destinations[name].view(-1), max_bytes // size)
        begin = entry.begin
        for piece in pieces:
            end = begin + piece.numel() * size
            if end > begin:
                yield Part(begin, end, entry.dtype, piece)
            begin = end


def _grouped(parts: Iterable[Part], max_bytes: int) -> Iterator[tuple[Part, ...]]:
    group: list[Part] = []
    for part in parts:
        if group and not _joins(group, part, max_bytes):
            yield tuple(group)
            group = []
        group.append(part)
    if group:
        yield tuple(group)


def _joins(group: list[Part], part: Part, max_bytes: int) -> bool:
    first = group[0].begin
    is_aligned = (part.begin - first) % part.dtype.itemsize == 0
    fits = part.end - first <= max_bytes and len(group) < MAX_PARTS
    return part.begin == group[-1].end and is_aligned and fits
