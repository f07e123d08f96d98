"""The images' health probe against a real health service."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from deploy.healthcheck import dialled, main


@pytest.fixture
def server() -> Iterator[tuple[str, health.HealthServicer]]:
    """An address, and the servicer that answers there."""
    servicer = health.HealthServicer()
    with ThreadPoolExecutor(1) as pool:
        grpc_server = grpc.server(pool)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, grpc_server)
        port = grpc_server.add_insecure_port("127.0.0.1:0")
        grpc_server.start()
        yield f"0.0.0.0:{port}", servicer
        grpc_server.stop(0).wait(10)


@pytest.mark.parametrize(
    ("status", "code"),
    [(health_pb2.HealthCheckResponse.SERVING, 0), (health_pb2.HealthCheckResponse.NOT_SERVING, 1)],
)
def test_the_exit_code_is_the_health(
    server: tuple[str, health.HealthServicer],
    status: health_pb2.HealthCheckResponse.ServingStatus.ValueType,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    listen, servicer = server
    servicer.set("", status)
    monkeypatch.setenv("STEPWIRE_LISTEN", listen)
    assert main([]) == code
    assert capsys.readouterr().out.strip() == health_pb2.HealthCheckResponse.ServingStatus.Name(status)


def test_an_unknown_service_is_not_healthy(
    server: tuple[str, health.HealthServicer], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([dialled(server[0]), "no.such.Service"]) == 1
    assert "NOT_FOUND" in capsys.readouterr().out


def test_nobody_there_is_not_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["127.0.0.1:1"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().out


def test_a_wildcard_is_dialled_on_loopback() -> None:
    assert dialled("0.0.0.0:50051") == "127.0.0.1:50051"
    assert dialled("[::]:50051") == "127.0.0.1:50051"
    assert dialled("unix:/run/s.sock") == "unix:/run/s.sock"
