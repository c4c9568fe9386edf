"""Lets programs under test be interrupted where a script runs the tests in the background, which ignores Ctrl-C."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
