"""A port for a server that can not be asked for one of its own choice."""

import socket


def free_port() -> int:
    """Of the loopback address. Free now: another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
