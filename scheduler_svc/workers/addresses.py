"""Where worker processes listen: one address that all share, and one each.

A gateway keeps one connection, and a connection stays with the worker the kernel gave it to; whoever wants to spread
load over workers dials their own addresses.
"""

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from common.errors import ConfigError

MAX_PORT: Final = 65535


@dataclass(frozen=True, slots=True)
class Addresses:
    """`shared` empty: there is none, as with unix: addresses. `own`: of each worker, by its place. A path can not be
    shared, so the first worker serves the one that was asked for, beside its own."""

    shared: str
    own: tuple[tuple[str, ...], ...]

    def of(self, place: int) -> tuple[str, ...]:
        """Everything the worker in this place binds."""
        return (*([self.shared] if self.shared else []), *self.own[place])

    def listing(self) -> list[str]:
        """The one to call first, then those of single workers."""
        return [*([self.shared] if self.shared else []), *(address for own in self.own for address in own)]


class PortHolder:
    """Keeps drawn ports for workers to come: sockets that are bound but do not listen, so they get no connection.

    Owned by the core process; workers bind the same ports with SO_REUSEPORT.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def addresses(self, listen: str, worker_listen: str, num_workers: int) -> Addresses:
        """Draws what is needed. `worker_listen` empty: any free ports of the host in `listen`.

        Raises ConfigError for an address that is taken or no address of this machine.
        """
        if listen.startswith("unix:"):
            own = [[f"{listen}.{place + 1}"] for place in range(num_workers)]
            own[0].insert(0, listen)
            if worker_listen:
                for place, address in enumerate(self._row(worker_listen, num_workers)):
                    own[place].append(address)
            return Addresses("", tuple(tuple(addresses) for addresses in own))
        shared = self._hold(listen, "listen")
        first = worker_listen or f"{listen.rpartition(':')[0]}:0"
        return Addresses(shared, tuple((address,) for address in self._row(first, num_workers)))

    def close(self) -> None:
        for held in self._sockets:
            held.close()
        self._sockets = []

    def _row(self, first: str, count: int) -> Sequence[str]:
        """`first` and the ports after it; with port 0 any free ones."""
        host, _, port = first.rpartition(":")
        step = 1 if int(port) else 0
        return [self._hold(f"{host}:{int(port) + place * step}", "worker_listen") for place in range(count)]

    def _hold(self, address: str, field: str) -> str:
        host, _, port = address.rpartition(":")
        if int(port) > MAX_PORT:
            raise ConfigError(f"{field}: there is no port {port} for the last API process", field=field)
        if int(port) and any(held.getsockname()[1] == int(port) for held in self._sockets):
            raise ConfigError(
                f"{field}: two API processes would have port {port} as their own, or all of them", field=field
            )
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, target = found[0]
            with _bindable(family) as probe:  # of another server, which would share the port without a word
                probe.bind(target)
            held = _bindable(family)
            self._sockets.append(held)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(target)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"can not listen on {address}: is it in use, or not an address of this machine?", field=field
            ) from error
        return f"{host}:{held.getsockname()[1]}"


def _bindable(family: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # former connections in TIME_WAIT do not matter
    if family == socket.AF_INET6:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return sock
