from __future__ import annotations

import os
import selectors
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from tidewheel.server import processes

_READ_BYTES = 1 << 16


class ServerProcess:
    """A running tritonserver, whose end and output make a selector call."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        selector: selectors.BaseSelector,
        on_output: Callable[[bytes], None],
    ) -> None:
        self._selector = selector
        self._on_output = on_output
        # In its own session: Ctrl-C reaches only this process, which ends the others in order.
        self._process = subprocess.Popen(  # noqa: S603 - the located program
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        selector.register(self._output, selectors.EVENT_READ, self.read_output)
        started = processes.read(self.pid)
        assert started is not None  # not reaped before `poll`
        self._watch = processes.Watch(started)
        if self._watch.fileno is not None:
            selector.register(self._watch.fileno, selectors.EVENT_READ, lambda: None)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> None:
        self._process.wait()

    def ask_to_end(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.kill()

    def exit(self) -> str:
        returncode = self._process.poll()
        if returncode is None:
            return "no exit status"
        if returncode < 0:
            return f"signal {-returncode}, {signal.strsignal(-returncode)}"
        return f"exit code {returncode}"

    def read_output(self) -> None:
        while True:
            try:
                data = os.read(self._output.fileno(), _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._unregister_output()
                return
            self._on_output(data)

    def stop_watching(self) -> None:
        """Watch its output alone."""
        if self._watch.fileno is not None:
            self._selector.unregister(self._watch.fileno)
        self._watch.close()

    def close(self) -> None:
        """Forget an ended server. May be called twice."""
        self.stop_watching()
        if self._output.closed:
            return
        self.read_output()
        self._unregister_output()
        self._output.close()

    def _unregister_output(self) -> None:
        if self._output in self._selector.get_map():
            self._selector.unregister(self._output)
