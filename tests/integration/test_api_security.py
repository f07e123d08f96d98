"""Who may call: TLS, mutual TLS, bearer tokens."""

import asyncio
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from common.clock import SystemClock
from common.errors import ConfigError
from deploy.how_to_call import address_to_call, how_to_call
from scheduler_svc.api.auth import read_tokens
from scheduler_svc.api.listen import TlsFiles
from scheduler_svc.api.server import ApiOptions, build_server
from scheduler_svc.api.worker import ApiWorker
from scheduler_svc.config import SchedulerConfig
from stepwire.v1 import admin_pb2 as admin
from stepwire.v1 import inference_pb2 as pb
from tests.integration.api_scene import ANYWHERE, failing, joined_text, reason, run, scene
from tests.unit.api.fakes import MODEL, FakeCore, say

SERVING = int(health_pb2.HealthCheckResponse.SERVING)
HI = pb.GenerateRequest(text="hi")


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem signs server.pem (for localhost) and client.pem; other.pem is nobody's."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made with the openssl command, which this machine lacks")
    at = tmp_path_factory.mktemp("pki")

    def openssl(*args: str) -> None:
        subprocess.run(["openssl", *args], cwd=at, check=True, capture_output=True, timeout=60)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "other"):
        openssl(
            "req",
            "-x509",
            *curve,
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
            "-subj",
            f"/CN={name}",
            "-days",
            "2",
        )
    for name in ("server", "client"):
        (at / f"{name}.ext").write_text("subjectAltName=DNS:localhost\n")
        openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", "2", "-extfile", f"{name}.ext", "-out", f"{name}.pem")  # fmt: skip
    return at


def client_credentials(pki: Path, name: str | None = None) -> grpc.ChannelCredentials:
    key = (pki / f"{name}.key").read_bytes() if name else None
    chain = (pki / f"{name}.pem").read_bytes() if name else None
    return grpc.ssl_channel_credentials((pki / "ca.pem").read_bytes(), key, chain)


def test_tls(pki: Path) -> None:
    async def test() -> None:
        options = ApiOptions(listen=ANYWHERE, tls=TlsFiles(pki / "server.pem", pki / "server.key"))
        async with scene(say("ok"), options=options, credentials=client_credentials(pki)) as s:
            assert joined_text(await s.generate(HI)) == "ok"
        async with scene(say("ok"), options=options) as s:
            assert (await failing(s.inference.Generate(HI))).code() is grpc.StatusCode.UNAVAILABLE

    run(test)


def test_what_up_prints_works(pki: Path, tmp_path: Path) -> None:
    """With a certificate for `localhost` alone, signed by an authority the caller need not know, and with a token."""
    tokens = tmp_path / "to kens"
    tokens.write_text("# the first counts\n\n  first-token\nsecond-token\n")
    config = SchedulerConfig(tls_cert=pki / "server.pem", tls_key=pki / "server.key", auth_tokens_file=tokens)

    async def test() -> None:
        tls = TlsFiles(pki / "server.pem", pki / "server.key")
        options = ApiOptions(listen=ANYWHERE, tls=tls, auth_tokens=("first-token",))
        async with scene(say("ok"), options=options, credentials=client_credentials(pki)) as s:
            address = await address_to_call(f"127.0.0.1:{s.server.port}", config)
            assert address == f"localhost:{s.server.port}"
            text = how_to_call(address, config)
            lines = [line.strip() for line in text.splitlines()]
            (export,) = [line for line in lines if line.startswith("export")]
            command = shlex.split(next(line for line in lines if line.startswith("stepwire chat")))
            start = next(n for n, line in enumerate(lines) if line.startswith("import os"))
            python = "\n".join(lines[start : lines.index("", start)])
            for called in (shlex.join([sys.executable, "-P", "-m", "deploy.cli", *command[1:], "Hello"]),
                           shlex.join([sys.executable, "-c", python])):  # fmt: skip
                done = await asyncio.create_subprocess_exec(
                    "sh", "-c", f"{export}; {called}", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
                )
                out, problem = await done.communicate()
                assert (out, problem) == (b"ok\n", b"")

    run(test)


def test_mutual_tls(pki: Path) -> None:
    async def test() -> None:
        tls = TlsFiles(pki / "server.pem", pki / "server.key", pki / "ca.pem")
        options = ApiOptions(listen=ANYWHERE, tls=tls)
        async with scene(say("ok"), options=options, credentials=client_credentials(pki, "client")) as s:
            assert joined_text(await s.generate(HI)) == "ok"
        for name in (None, "other"):
            async with scene(say("ok"), options=options, credentials=client_credentials(pki, name)) as s:
                assert (await failing(s.inference.Generate(HI))).code() is grpc.StatusCode.UNAVAILABLE

    run(test)


def test_wrong_tls_files_are_named(pki: Path, tmp_path: Path) -> None:
    async def test() -> None:
        worker = ApiWorker(SystemClock())
        FakeCore(worker)
        cert, key = pki / "server.pem", pki / "server.key"
        (tmp_path / "empty").write_text("")
        wrong = {
            "tls_cert": TlsFiles(tmp_path / "missing", key),
            "tls_key": TlsFiles(cert, tmp_path / "empty"),
            "tls_client_ca": TlsFiles(cert, key, tmp_path / "empty"),
        }
        for field, tls in wrong.items():
            with pytest.raises(ConfigError) as caught:
                build_server(ApiOptions(listen=ANYWHERE, tls=tls), worker, None, MODEL)
            assert caught.value.field == field
        with pytest.raises(ConfigError) as caught:
            build_server(ApiOptions(listen=ANYWHERE, tls=TlsFiles(cert, pki / "client.key")), worker, None, MODEL)
        assert caught.value.field == "listen" and "belong together" in caught.value.message

    run(test)


def test_bearer_tokens() -> None:
    async def test() -> None:
        options = ApiOptions(listen=ANYWHERE, auth_tokens=("first-token", "second-token"))
        async with scene(say("ok"), options=options) as s:
            for token in ("first-token", "second-token"):
                metadata = (("authorization", f"Bearer {token}"),)
                assert joined_text(await s.generate(HI, metadata=metadata)) == "ok"
            wrong: list[tuple[tuple[str, str], ...]] = [
                (),
                (("authorization", "Bearer "),),
                (("authorization", "Bearer first-toke"),),
                (("authorization", "Bearer first-token2"),),
                (("authorization", "Basic first-token"),),
                (("authorization", "first-token"),),
            ]
            for metadata_ in wrong:
                for call in (
                    s.inference.Generate(HI, metadata=metadata_),
                    s.inference.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata_),
                    s.admin.WatchSteps(admin.WatchStepsRequest(), metadata=metadata_),
                ):
                    error = await failing(call)
                    assert error.code() is grpc.StatusCode.UNAUTHENTICATED and reason(error) == "UNAUTHENTICATED"
            assert await s.status("") == SERVING, "health needs no token"
            assert len(s.core.sent) == 2

    run(test)


def test_reading_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# for the gateway\nfirst-token\n\n  second-token  \n")
    assert read_tokens(path) == ("first-token", "second-token")
    for content in (
        "", "# nothing\n", "short\n", "two words here\n", "tökens-all-right\n", "first\x00token\n",
        "in-two\x0ctokens-here\n",
    ):  # fmt: skip
        path.write_text(content)
        with pytest.raises(ConfigError) as caught:
            read_tokens(path)
        assert caught.value.field == "auth_tokens_file"
    with pytest.raises(ConfigError):
        read_tokens(tmp_path / "missing")
