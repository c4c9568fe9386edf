"""Files of sound: WAV of 16 bits, and with the package soundfile also other WAV, FLAC, OGG and MP3."""

import importlib.util
import io
import wave

import numpy as np

from tidewheel.batch import Float32Array
from tidewheel.errors import InvalidRequest, PromptTooLarge

SAMPLING_RATE = 16_000  # Hz
SAMPLES_PER_POSITION = 320  # of Whisper's encoder: a frame each 160, and a convolution of stride 2
_RATES = (1_000, 192_000)  # Hz
_MAX_CHANNELS = 8
_BLOCK_FRAMES = 1 << 16  # decoded at once: a small file can hold many channels of silence
_BLOCK_S = 30  # resampled at once, with a second on either side


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
    if rate == SAMPLING_RATE or not len(mono) * SAMPLING_RATE // rate:
        return mono
    return np.concatenate([_resampled(mono, begin, rate) for begin in range(0, len(mono), _BLOCK_S * rate)])


def _resampled(mono: Float32Array, begin: int, rate: int) -> Float32Array:
    before = min(rate, begin)
    part = mono[begin - before : begin + (_BLOCK_S + 1) * rate]
    count = len(part) * SAMPLING_RATE // rate
    spectrum = np.fft.rfft(part)[: count // 2 + 1]
    samples = np.fft.irfft(spectrum, count)[before // rate * SAMPLING_RATE :][: _BLOCK_S * SAMPLING_RATE]
    return (samples * (count / len(part))).astype(np.float32)


def _by_wave(data: bytes, max_seconds: float) -> tuple[Float32Array, int]:
    with wave.open(io.BytesIO(data)) as file:
        if file.getsampwidth() != 2:
            raise ValueError(f"its samples have {8 * file.getsampwidth()} bits")
        rate, channels = file.getframerate(), file.getnchannels()
        check_sound(file.getnframes(), rate, channels, max_seconds)
        raw = file.readframes(file.getnframes())
    whole = np.frombuffer(raw, "<i2", len(raw) // (2 * channels) * channels)
    return whole.reshape(-1, channels).mean(axis=1, dtype=np.float32) / 32768, rate


def _by_soundfile(data: bytes, max_seconds: float) -> tuple[Float32Array, int]:
    import soundfile

    with soundfile.SoundFile(io.BytesIO(data)) as file:
        check_sound(file.frames, file.samplerate, file.channels, max_seconds)
        blocks = file.blocks(_BLOCK_FRAMES, dtype="float32", always_2d=True)
        return np.concatenate([np.empty(0, np.float32), *(block.mean(axis=1) for block in blocks)]), file.samplerate


def check_sound(num_frames: int, rate: int, channels: int, max_seconds: float, name: str = "audio_file") -> None:
    if not (_RATES[0] <= rate <= _RATES[1] and 1 <= channels <= _MAX_CHANNELS):
        limits = "{} to {} and 1 to {} are read".format(*_RATES, _MAX_CHANNELS)
        raise ValueError(f"it has {rate} Hz and {channels} channels, of which {limits}")
    if num_frames > max_seconds * rate:
        seconds = f"{num_frames / rate:,.1f} s: at most {max_seconds:,g} s are allowed (max_audio_s)"
        raise PromptTooLarge(f"{name} has {seconds}")
