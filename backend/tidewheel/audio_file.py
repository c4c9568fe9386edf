"""Files of sound: WAV of 16 bits, and with the package soundfile also other WAV, FLAC, OGG and MP3."""

from __future__ import annotations

import importlib.util
import io
import wave

import numpy as np

from tidewheel.batch import Float32Array
from tidewheel.errors import InvalidRequest, PromptTooLarge

SAMPLING_RATE = 16_000  # Hz
_RATES = (1_000, 192_000)  # Hz
_MAX_CHANNELS = 8
_BLOCK_FRAMES = 1 << 16  # decoded at once: a small file can hold many channels of silence


def read_audio(data: bytes, max_seconds: float) -> Float32Array:
    """Return mono samples [num_samples] at 16 kHz. Raise `InvalidRequest`, or `PromptTooLarge` before decoding."""
    try:
        mono, rate = (_by_soundfile if importlib.util.find_spec("soundfile") else _by_wave)(data, max_seconds)
    except InvalidRequest:
        raise
    except Exception as error:  # libsndfile has many
        text = "it ends early" if isinstance(error, EOFError) else str(error).rpartition(">: ")[2]  # after an address
        reason = " ".join(text.split())[:200] or type(error).__name__
        raise InvalidRequest(
            f"audio_file cannot be read: {reason}; send WAV of 16 bits, or install the extra audio in the server"
        ) from None
    count = len(mono) * SAMPLING_RATE // rate
    if rate == SAMPLING_RATE or not count:
        return mono
    spectrum = np.fft.rfft(mono)[: count // 2 + 1]
    return (np.fft.irfft(spectrum, count) * (count / len(mono))).astype(np.float32)


def _by_wave(data: bytes, max_seconds: float) -> tuple[Float32Array, int]:
    with wave.open(io.BytesIO(data)) as file:
        if file.getsampwidth() != 2:
            raise ValueError(f"its samples have {8 * file.getsampwidth()} bits")
        rate, channels = file.getframerate(), file.getnchannels()
        _check(file.getnframes(), rate, channels, max_seconds)
        raw = file.readframes(file.getnframes())
    whole = np.frombuffer(raw, "<i2", len(raw) // (2 * channels) * channels)
    return whole.reshape(-1, channels).mean(axis=1, dtype=np.float32) / 32768, rate


def _by_soundfile(data: bytes, max_seconds: float) -> tuple[Float32Array, int]:
    import soundfile

    with soundfile.SoundFile(io.BytesIO(data)) as file:
        _check(file.frames, file.samplerate, file.channels, max_seconds)
        blocks = file.blocks(_BLOCK_FRAMES, dtype="float32", always_2d=True)
        return np.concatenate([np.empty(0, np.float32), *(block.mean(axis=1) for block in blocks)]), file.samplerate


def _check(num_frames: int, rate: int, channels: int, max_seconds: float) -> None:
    if not (_RATES[0] <= rate <= _RATES[1] and 1 <= channels <= _MAX_CHANNELS):
        limits = "{} to {} and 1 to {} are read".format(*_RATES, _MAX_CHANNELS)
        raise ValueError(f"it has {rate} Hz and {channels} channels, of which {limits}")
    if num_frames > max_seconds * rate:
        raise PromptTooLarge(f"audio_file has {num_frames / rate:,.1f} s: at most {max_seconds:g} s are allowed")
