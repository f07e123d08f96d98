"""Opening the public port: plain, TLS or mutual TLS."""

from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from common.errors import ConfigError
from common.serving import refuse_served_path


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. With `client_ca` every client must show a certificate signed by it."""

    cert: Path
    key: Path
    client_ca: Path | None = None


def credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Raises ConfigError naming the file that can not be read."""
    cert = _read(files.cert, "tls_cert", b"-----BEGIN CERTIFICATE-----")
    key = _read(files.key, "tls_key", b"PRIVATE KEY-----")
    client_ca = None
    if files.client_ca is not None:
        client_ca = _read(files.client_ca, "tls_client_ca", b"-----BEGIN CERTIFICATE-----")
    return grpc.ssl_server_credentials([(key, cert)], client_ca, require_client_auth=client_ca is not None)


def open_port(server: grpc.aio.Server, address: str, tls: TlsFiles | None) -> int:
    """The port bound (1 for unix: addresses). Raises ConfigError: the address is taken or wrong, or TLS is."""
    refuse_served_path(address)
    try:
        port = server.add_secure_port(address, credentials(tls)) if tls else server.add_insecure_port(address)
    except RuntimeError as error:
        reason = "is it in use, or not an address of this machine?"
        if tls is not None:
            reason = "is it in use, or do tls_cert and tls_key not belong together?"
        raise ConfigError(f"can not listen on {address}: {reason}", field="listen") from error
    if port == 0:
        raise ConfigError(f"can not listen on {address}", field="listen")
    return port


def _read(path: Path, field: str, marker: bytes) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{field}: {path} can not be read: {error.strerror}", field=field) from error
    if marker not in data:
        raise ConfigError(f"{field}: {path} is not a PEM file of the expected kind", field=field)
    return data
