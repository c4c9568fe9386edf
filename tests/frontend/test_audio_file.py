"""Files of sound: mono samples at 16 kHz, one line for others, and little memory for small files."""

from __future__ import annotations

import io
import tracemalloc
import wave
from typing import Any

import numpy as np
import pytest

from tidewheel.audio_file import read_audio
from tidewheel.errors import InvalidRequest
from tidewheel.one_shot.signature import Array


def wav(samples: Array, rate: int = 16_000, width: int = 2) -> bytes:
    """Return a WAV file of int16 [num_frames, num_channels]; of `width` 3, with a byte before each sample."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((samples.shape[1], width, rate, 0, "NONE", ""))
        writer.writeframes(samples.astype("<i2").tobytes() if width == 2 else bytes(width * samples.size))
    return file.getvalue()


def changed(start: int, end: int) -> bytes:
    """Return a WAV file with zeros in some bytes of its header."""
    data = bytearray(wav(np.zeros((8, 1))))
    data[start:end] = bytes(end - start)
    return bytes(data)


def test_channels_are_averaged() -> None:
    samples = np.array([[16384, 0, -16384], [3276, 3276, 3276]], np.int16)
    assert np.allclose(read_audio(wav(samples), 30), [0, 0.1], atol=1e-4)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (wav(np.zeros((8, 9))), "16000 Hz and 9 channels, of which 1000 to 192000 and 1 to 8 are read"),
        (changed(22, 24), "audio_file cannot be read: "),
        (changed(24, 28), "audio_file cannot be read: "),
        (wav(np.zeros((16_000 * 31, 1), np.int16)), "audio_file has 31.0 s: at most 30 s"),
        (b"text", "audio_file cannot be read: "),
        (b"", "audio_file cannot be read: "),
    ],
)
def test_what_is_no_sound_is_named_in_one_line(data: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_audio(data, 30)
    assert words in str(refused.value) and "\n" not in str(refused.value) and " at 0x" not in str(refused.value)


def test_a_small_file_of_many_channels_takes_the_memory_of_one() -> None:
    soundfile: Any = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, np.zeros((16_000 * 29, 8), np.int16), 16_000, format="FLAC")
    tracemalloc.start()
    samples = read_audio(file.getvalue(), 30)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(samples) == 16_000 * 29 and peak < 6 * samples.nbytes  # whole, it takes 9
