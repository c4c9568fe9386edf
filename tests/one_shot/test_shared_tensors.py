from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tidewheel.errors import Busy, InternalError
from tidewheel.one_shot import shared_tensors
from tidewheel.one_shot.shared_tensors import INLINE_BYTES, PackedTensors, kept_files, remove_unread, sweep_kept
from tidewheel.one_shot.signature import DTYPES, Array

LARGE = {"x": np.arange(INLINE_BYTES, dtype=np.uint16).reshape(2, -1), "y": np.float32([[1.5]])}


def sent(packed: PackedTensors) -> PackedTensors:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=PackedTensors)


def check_equal(found: dict[str, Array], wanted: dict[str, Array]) -> None:
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert (found[name] == array).all()


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "BYTES"])
def test_small_tensors_of_each_dtype_travel_in_the_message(dtype: str, shared_folder: Path) -> None:
    arrays = {"a": np.ones((3, 2), DTYPES[dtype]), "empty": np.ones((0, 2), DTYPES[dtype])}
    check_equal(sent(PackedTensors.of(arrays)).arrays, arrays)
    assert not list(shared_folder.iterdir())


def test_texts_travel_with_their_lengths() -> None:
    texts = np.array([[b"", "ä".encode()], [b"\x00\xff", b"long" * 9]], np.object_)
    found = sent(PackedTensors.of({"bytes": texts, "text": np.array(["ö"])})).arrays
    check_equal(found, {"bytes": texts, "text": np.array(["ö".encode()], np.object_)})


def test_large_tensors_pass_by_a_private_file_without_a_name_once_mapped(shared_folder: Path) -> None:
    packed = PackedTensors.of(LARGE)
    (file,) = shared_folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(shared_folder.stat().st_mode) == 0o700
    received = sent(packed)
    assert not received.data
    check_equal(received.arrays, LARGE)
    assert not list(shared_folder.iterdir())
    check_equal(received.arrays, LARGE)
    assert not received.arrays["x"].flags.writeable
    packed.discard()


def test_what_nobody_receives_is_removed(shared_folder: Path) -> None:
    PackedTensors.of(LARGE).discard()
    assert not list(shared_folder.iterdir())
    PackedTensors.of(LARGE, is_result=True)
    remove_unread(older_than_s=3600.0)
    assert len(list(shared_folder.iterdir())) == 1
    remove_unread(older_than_s=0.0)
    assert not list(shared_folder.iterdir())


def test_files_of_dead_processes_are_removed_at_the_next_start(shared_folder: Path) -> None:
    PackedTensors.of(LARGE)
    (mine,) = shared_folder.iterdir()
    for name in (f"{os.getpid()}-1-0", f"{2**22 + 1}-5-0", "nonsense"):
        (shared_folder / name).touch()
    shared_tensors.folder.cache_clear()
    assert list(shared_tensors.folder().iterdir()) == [mine]


def test_a_kept_file_is_used_again_only_after_it_was_given_back_unused(shared_folder: Path) -> None:
    def pack(value: int) -> PackedTensors:
        arrays = {"x": np.full(INLINE_BYTES, value, np.uint16)}
        packed = PackedTensors.of(arrays, keeps=True)
        check_equal(sent(packed).arrays, arrays)
        return packed

    first, second = pack(1), pack(2)
    first.discard(is_unused=True)
    first.discard()  # a second time is without effect
    assert pack(3).file == first.file and len(list(shared_folder.iterdir())) == 2
    second.discard()  # an engine may read it still
    assert pack(4).file not in (first.file, second.file) and len(list(shared_folder.iterdir())) == 2
    kept_files.close()
    assert not list(shared_folder.iterdir())


def test_kept_files_take_bounded_memory(shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = np.zeros(INLINE_BYTES + 64, np.uint8), np.zeros(4 * INLINE_BYTES, np.uint8)
    monkeypatch.setattr(shared_tensors, "MAX_KEPT_BYTES", large.nbytes)
    lent = [PackedTensors.of({"x": x}, keeps=True) for x in (small, large)]
    for packed in lent:
        packed.discard(is_unused=True)
    assert [file.name for file in shared_folder.iterdir()] == [lent[1].file]
    assert PackedTensors.of({"x": small}, keeps=True).file != lent[1].file  # more than twice the size


def test_kept_files_of_a_dead_front_end_are_removed_and_unmapped(shared_folder: Path) -> None:
    packed = PackedTensors.of(LARGE, keeps=True)
    dead = shared_folder / f"{2**22 + 1}-5-0"
    (shared_folder / packed.file).rename(dead)
    received = PackedTensors(packed.tensors, file=dead.name, is_kept=True)
    check_equal(received.arrays, LARGE)
    sweep_kept()
    assert not list(shared_folder.iterdir())
    with pytest.raises(InternalError, match="cannot be read"):
        _ = PackedTensors(packed.tensors, file=dead.name, is_kept=True).arrays


@pytest.mark.parametrize("keeps", [False, True])
def test_full_shared_memory_is_busy(keeps: bool, shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fallocate(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared_tensors.os, "posix_fallocate", fallocate)
    with pytest.raises(Busy, match="shared memory is full"):
        PackedTensors.of(LARGE, keeps=keeps)
    assert not list(shared_folder.iterdir())


@pytest.mark.parametrize(
    "tensor",
    [
        ("x", "FP32", (2,), 4),
        ("x", "FP32", (-1,), 4),
        ("x", "FP128", (1,), 4),
        ("x", "BYTES", (3,), 4),
        ("x", "FP32", (99,), 396),
    ],
)
def test_a_broken_message_is_an_error(tensor: tuple[str, str, tuple[int, ...], int]) -> None:
    packed = PackedTensors([shared_tensors.PackedTensor(*tensor)], data=bytes(64))
    packed.claim()
    with pytest.raises(InternalError, match="cannot be read"):
        _ = packed.arrays


@pytest.mark.parametrize("name", ["gone", "../outside"])
def test_only_files_of_the_folder_are_read(name: str, shared_folder: Path) -> None:
    (shared_folder.parent / "outside").write_bytes(bytes(1 << 17))
    packed = PackedTensors([], file=name)
    with pytest.raises(InternalError, match="cannot be read"):
        _ = packed.arrays
    assert (shared_folder.parent / "outside").exists()
