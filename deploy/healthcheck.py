"""Asks a gRPC health service once: exit 0 when it says SERVING. The images' HEALTHCHECK.

    python -P -m deploy.healthcheck [ADDRESS [SERVICE]]

ADDRESS defaults to where STEPWIRE_LISTEN makes the service in this container listen. SERVICE "" is readiness. Plain
connections only: behind TLS a deployment brings a probe that knows its certificates.
"""

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def dialled(listen: str) -> str:
    """The address to dial for one that is listened on: a wildcard host becomes loopback."""
    for wildcard in ("0.0.0.0:", "[::]:"):
        if listen.startswith(wildcard):
            return "127.0.0.1:" + listen.removeprefix(wildcard)
    return listen


def check(address: str, service: str) -> str:
    """The health status by name; UNREACHABLE or UNKNOWN and the reason when there is no answer."""
    # A proxy named in the environment is meant for the outside, never for this.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main(argv: list[str]) -> int:
    """Prints the status, which `docker inspect` then shows."""
    address = argv[0] if argv else dialled(os.environ["STEPWIRE_LISTEN"])
    status = check(address, argv[1] if len(argv) > 1 else "")
    print(status)
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
