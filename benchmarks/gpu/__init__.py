"""Measurements on a GPU."""

import time

STARTED = time.monotonic()  # before the process imports torch, which takes seconds of its time
