"""Audio in windows that a speech model takes, cut at pauses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tidewheel.audio_file import SAMPLING_RATE
from tidewheel.batch import Float32Array

HOP = 512  # samples of an activity, as of silero-vad
_SMOOTHED = 8  # hops, a quarter of a second
_QUIET = 1e-3  # root mean square, -60 dB of full scale


class AudioWindow(NamedTuple):
    samples: Float32Array
    seconds: tuple[float, float, float]  # begin, end, and length of the whole audio


# Returns the activity of each `HOP` of samples: at most 0.5 is silence.
Activity = Callable[[Float32Array], Float32Array]


def loudness(samples: Float32Array) -> Float32Array:
    sums = np.add.reduceat(np.square(samples), np.arange(0, len(samples), HOP))
    found: Float32Array = np.sqrt(sums / HOP) * np.float32(0.5 / _QUIET)
    return found


def cut(samples: Float32Array, most: int, activity: Activity = loudness) -> list[AudioWindow]:
    """Return windows of at most `most` samples without the silent ones, but one at least.

    A longer audio is cut where its activity is least in the last third of a window.
    """
    total, begin = len(samples), 0
    whole = AudioWindow(samples, (0.0, total / SAMPLING_RATE, total / SAMPLING_RATE))
    if total <= most:
        return [whole]
    active, windows = activity(samples), []
    smooth = np.convolve(active, np.full(_SMOOTHED, 1 / _SMOOTHED), "same")
    while begin < total:
        end = total
        if total - begin > most:
            first, last = -(-(begin + 2 * most // 3) // HOP), (begin + most) // HOP
            end = (last - int(np.argmin(smooth[first:last][::-1]))) * HOP
        if not active[begin // HOP : -(-end // HOP)].max() <= 0.5:  # NaN too
            seconds = begin / SAMPLING_RATE, end / SAMPLING_RATE, total / SAMPLING_RATE
            windows.append(AudioWindow(samples[begin:end], seconds))
        begin = end
    return windows or [AudioWindow(samples[:most], whole.seconds)]
