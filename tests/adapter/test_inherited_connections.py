from __future__ import annotations

import os
import socket
import subprocess
import sys

from tidewheel.adapter import stub_process

CLOSE = f"""
import os, sys
from {stub_process.__name__} import close_inherited_connections
close_inherited_connections()
os.fstat(int(sys.argv[1]))
sys.stdin.read()
"""


def test_a_client_sees_the_end_of_a_connection_that_was_inherited() -> None:
    """Other descriptors stay open."""
    ours, other = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, ours, other:
        client = socket.create_connection(server.getsockname())
        connection, _ = server.accept()
        client.settimeout(60)
        command = [sys.executable, "-c", CLOSE, str(other.fileno())]
        inherited = (connection.fileno(), other.fileno())
        with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=inherited, env=os.environ) as child, client:
            connection.close()
            assert client.recv(1) == b""
            child.communicate(b"")
        assert child.returncode == 0
