"""gRPC channel and server options, spelled once.

gRPC ignores an option whose key it does not know, so a misspelt key fails silently (and long calls then die with
"Too many pings"); tests/unit/common checks these against a real server with a pinging client.
"""

import os
from typing import Final

# Before gRPC is first used. By default it prepares for fork(): in a child that only wants to start another program (an
# api worker, through uvloop) those preparations abort now and then while other threads are inside gRPC; see
# github.com/grpc/grpc/issues/43055. Nothing here uses gRPC in a forked child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

Option = tuple[str, int | str]

PUBLIC_MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
PRIVATE_MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024

KEEPALIVE_TIME_MS: Final = 30_000
KEEPALIVE_TIMEOUT_MS: Final = 10_000


def server_options(max_message_bytes: int, *, share_port: bool = False) -> list[Option]:
    """Options of a server that survives clients which ping whenever they like.

    `share_port`: several processes listen on one address and the kernel spreads connections over them. Never by
    default: a second server on a taken port would else get half of the first one's callers without a word.
    """
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", int(share_port)),
    ]


def channel_options(max_message_bytes: int) -> list[Option]:
    """Options of a channel that notices a dead peer within KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
