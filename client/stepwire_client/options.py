"""Where a client connects, how, and how often it tries."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from stepwire_client.errors import StepwireError, Unavailable

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
DEFAULT_MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
# Said with the number of a character: a byte of an argument that is not UTF-8, or half of a surrogate pair.
NO_TEXT: Final = "not Unicode text, from character {} on"
# gRPC takes a time past what it can count for one that is over.
LONGEST_DEADLINE_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files. Without `ca` the system's authorities are trusted; `cert` and `key` are for a server that asks."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError when a file can't be read, ValueError when it is no PEM file of its kind or when cert or key
        is given alone."""
        if (self.cert is None) != (self.key is None):
            raise ValueError("tls: cert and key belong together")
        return grpc.ssl_channel_credentials(
            root_certificates=_read_pem("ca", self.ca, b"CERTIFICATE-----"),
            private_key=_read_pem("key", self.key, b"PRIVATE KEY-----"),
            certificate_chain=_read_pem("cert", self.cert, b"CERTIFICATE-----"),
        )


def _read_pem(field: str, path: Path | None, marker: bytes) -> bytes | None:
    """gRPC would try in vain to connect with what is no PEM file, again and again."""
    data = path.read_bytes() if path else None
    if data is not None and marker not in data:
        raise ValueError(f"tls.{field}: {path} is not a PEM file of the expected kind")
    return data


@dataclass(frozen=True, slots=True)
class Retry:
    """Calls that fail UNAVAILABLE before any message came are tried again, `attempts` times in all.

    Pauses double from `first_s` to at most `max_s`, each shortened at random by up to half, and are never shorter than
    what the server asked for. A pause that would pass the call's deadline or `longest_s` is not made: the error is
    raised.
    """

    attempts: int = 4
    first_s: float = 0.2
    max_s: float = 5.0
    longest_s: float = 30.0

    def pauses(self, draw: Callable[[], float] = random.random) -> Iterator[float]:
        """The length of each pause, seconds."""
        for attempt in range(self.attempts - 1):
            yield min(self.max_s, self.first_s * 2**attempt) * (1 - draw() / 2)


def pause_before_retry(
    error: StepwireError, retry: Retry, pauses: Iterator[float], time_left: float | None
) -> float | None:
    """Seconds to wait before the next attempt; None: raise `error`. `time_left`: until the deadline, None without."""
    if not isinstance(error, Unavailable):
        return None
    pause = next(pauses, None)
    if pause is None:
        return None
    pause = max(pause, error.retry_after or 0.0)
    longest = retry.longest_s if time_left is None else min(retry.longest_s, time_left)
    return pause if pause < longest else None


def limit_of(deadline: float | None, otherwise: float | None = None) -> float | None:
    """Seconds for a call that was given `deadline`; None: no limit, as with one that lasts for ever.

    Raises ValueError when it is no number.
    """
    limit = otherwise if deadline is None else deadline
    if limit is not None and math.isnan(limit):
        raise ValueError("the deadline is not a number of seconds")
    return None if limit is None or limit > LONGEST_DEADLINE_S else limit


def is_local(address: str) -> bool:
    """Whether the address is this machine's own."""
    host = address.rpartition(":")[0]
    return address.startswith("unix:") or host in ("localhost", "[::1]") or host.startswith("127.")


def channel_options(address: str, max_message_bytes: int) -> list[tuple[str, int | str]]:
    """Channel arguments. A local subchannel pool, or all channels of the pool would share one connection.

    A proxy named in the environment is meant for the outside; gRPC alone would send even loopback through it.

    Raises ValueError when the address is no Unicode text.
    """
    try:
        address.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"address: {NO_TEXT.format(error.start + 1)}") from None
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0 if is_local(address) else 1),
    ]


def call_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """Raises ValueError for a token with a character that a header can not carry; the token itself is not shown."""
    if token and (bad := next((c for c in token if not "!" <= c <= "~"), "")):
        what = f"character {token.index(bad) + 1} is {bad!a}"
        raise ValueError(f"token: {what}; a token has visible ASCII characters alone: no space, no line's end")
    return (("authorization", f"Bearer {token}"),) if token else ()
