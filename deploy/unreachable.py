"""Why no call reached a server: what gRPC's own text gives away, in words for people."""

import contextlib
import re
import socket
from typing import Final

HUNG_UP: Final = "what listens there hung up: it may expect TLS (--tls-ca) or a client certificate (--tls-cert)"
# In this order: what a text contains, and what that means.
_SIGNS: Final = (
    ("WRONG_VERSION_NUMBER", "what listens there expects no TLS; leave out --tls-ca, --tls-cert and --tls-key"),
    ("CERTIFICATE_VERIFY_FAILED", "TLS handshake failed: no authority trusted here (--tls-ca) signed its certificate"),
    ("Hostname Verification", "TLS handshake failed: its certificate is for another name than --address has"),
    ("Tls handshake failed", "TLS handshake failed"),
    ("http1.x server", "what listens there speaks HTTP/1, not gRPC"),
    ("Socket closed", HUNG_UP),
    ("security handshaker", "the files of --tls-ca, --tls-cert and --tls-key can not be used"),
    ("errors resolving", "there is no such host"),
)
PROBE_S: Final = 0.5


def why_unreachable(message: str) -> str:
    """One line about an UNAVAILABLE that no server sent; `message` is its text. May try whether somebody listens."""
    if message.startswith(("Stream removed", "Socket closed")):  # it had been reached
        return f"the connection was lost: {message}"
    for sign, meaning in _SIGNS:
        if sign in message:
            return f"{meaning} ({message})"
    # Of several addresses gRPC tells the last one's error alone, and `localhost` has two.
    local = re.search(r"(?:ipv4:127\.0\.0\.1|ipv6:%5B::1%5D):(\d+): .*refused", message)
    if local and any(_listens(host, int(local[1])) for host in ("127.0.0.1", "::1")):
        return f"{HUNG_UP} ({message})"
    return f"no server answers: {message}; start one with: stepwire up"


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), PROBE_S):
        return True
    return False
