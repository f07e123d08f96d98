"""What surrounds the calls: health, reflection, TLS, tokens, ports, pings, drain, the gateway's protocol."""

import asyncio
import hashlib
import io
import shutil
import subprocess
import zipfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from common.clock import SystemClock
from common.errors import ConfigError
from scheduler_svc.api.auth import read_tokens
from scheduler_svc.api.health import LIVENESS
from scheduler_svc.api.listen import TlsFiles
from scheduler_svc.api.server import ApiOptions, build_server
from scheduler_svc.api.worker import ApiWorker
from scheduler_svc.messages import Cancel, CoreState, ExecutorStats, FinishReason, Stats, StepSeen, WatchSteps
from stepwire.v1 import admin_pb2 as admin
from stepwire.v1 import inference_pb2 as pb
from stepwire.v1 import inference_pb2_grpc
from tests.integration.api_scene import ANYWHERE, failing, joined_text, reason, rest, run, scene, until
from tests.unit.api.fakes import MODEL, READY, ByteTokenizer, FakeCore, forever, say

SERVING = int(health_pb2.HealthCheckResponse.SERVING)
NOT_SERVING = int(health_pb2.HealthCheckResponse.NOT_SERVING)
UNKNOWN = int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
HI = pb.GenerateRequest(text="hi")


# ---------------------------------------------------------------------------------------------------------- health


def test_readiness_follows_the_executor_and_liveness_does_not() -> None:
    async def test() -> None:
        async with scene(state=CoreState(ready=False, draining=False, info=None)) as s:
            assert [await s.status(name) for name in ("", "stepwire.v1.Inference", LIVENESS)] == [
                NOT_SERVING,
                NOT_SERVING,
                SERVING,
            ]
            watch = s.health.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == NOT_SERVING
            s.core.tell(READY)
            assert (await watch.read()).status == SERVING
            assert await s.status("stepwire.v1.Inference") == SERVING
            s.core.tell(replace(READY, ready=False, draining=True))
            assert (await watch.read()).status == NOT_SERVING
            assert await s.status(LIVENESS) == SERVING
            watch.cancel()
            unknown = s.health.Watch(health_pb2.HealthCheckRequest(service="what"))
            assert (await unknown.read()).status == UNKNOWN
            error = await failing(s.health.Check(health_pb2.HealthCheckRequest(service="what")))
            assert error.code() is grpc.StatusCode.NOT_FOUND

    run(test)


def test_stopping_turns_watchers_to_not_serving_before_calls_end() -> None:
    async def test() -> None:
        async with scene() as s:
            watch = s.health.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            call = s.inference.Generate(HI)
            await call.read()
            (key,) = s.core.live
            stopping = asyncio.ensure_future(s.server.stop(grace_s=20))
            assert (await watch.read()).status == NOT_SERVING
            s.core.emit(key, b"to the end", FinishReason.MAX_TOKENS)
            assert joined_text(await rest(call)) == "to the end"
            watch.cancel()
            await stopping

    run(test)


def test_stopping_without_grace_ends_the_work() -> None:
    async def test() -> None:
        async with scene(forever) as s:
            call = s.inference.Generate(HI)
            await call.read()
            await s.server.stop()
            await until(lambda: s.core.live == {})
            assert len(s.core.of(Cancel)) == 1
            await s.server.stop()

    run(test)


# ------------------------------------------------------------------------------------------------------ reflection


def test_reflection_lists_the_services_and_knows_their_files() -> None:
    async def test() -> None:
        async with scene() as s:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(s.channel)
            questions = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="stepwire.v1.Inference"),
            ]

            async def ask() -> AsyncIterator[Any]:
                for question in questions:
                    yield question

            answers = [answer async for answer in stub.ServerReflectionInfo(ask())]
            names = {service.name for service in answers[0].list_services_response.service}
            assert names >= {
                "stepwire.v1.Inference",
                "stepwire.v1.Admin",
                "grpc.health.v1.Health",
                "vllm.grpc.engine.VllmEngine",
            }
            assert answers[1].file_descriptor_response.file_descriptor_proto

    run(test)


# ------------------------------------------------------------------------------------------- ports, pings, messages


def test_a_taken_port_is_a_clear_error() -> None:
    async def test() -> None:
        async with scene() as s:
            worker = ApiWorker(SystemClock())
            FakeCore(worker)
            with pytest.raises(ConfigError) as caught:
                build_server(ApiOptions(listen=f"127.0.0.1:{s.server.port}"), worker, None, MODEL)
            assert caught.value.field == "listen" and str(s.server.port) in caught.value.message

    run(test)


def test_a_unix_socket_serves(tmp_path: Path) -> None:
    async def test() -> None:
        worker = ApiWorker(SystemClock())
        FakeCore(worker)
        server = build_server(ApiOptions(listen=f"unix:{tmp_path}/api.sock"), worker, None, MODEL)
        await server.start()
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/api.sock") as channel:
            info = await inference_pb2_grpc.InferenceStub(channel).GetModelInfo(pb.GetModelInfoRequest())
            assert info.model == "bytes"
        await server.stop()

    run(test)


EAGER_PINGS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 10),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


def test_a_pinging_client_may_wait_for_its_first_token() -> None:
    """A server with gRPC's own options tells the same client "Too many pings"; only then is ours asked."""

    async def never(request: bytes, context: object) -> AsyncIterator[bytes]:
        await asyncio.get_running_loop().create_future()
        yield b""

    async def test() -> None:
        plain = grpc.aio.server()
        methods: dict[str, Any] = {"Generate": grpc.unary_stream_rpc_method_handler(never)}
        plain.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("stepwire.v1.Inference", methods),))
        port = plain.add_insecure_port(ANYWHERE)
        await plain.start()
        async with (
            scene(channel_args=EAGER_PINGS) as s,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=EAGER_PINGS) as plain_channel,
        ):
            call = s.inference.Generate(HI)
            await call.read()
            error = await failing(inference_pb2_grpc.InferenceStub(plain_channel).Generate(HI))
            assert error.details() == "Too many pings"
            (key,) = s.core.live
            s.core.emit(key, b"still here", FinishReason.MAX_TOKENS)
            assert joined_text(await rest(call)) == "still here"
        await plain.stop(None)

    run(test)


# ------------------------------------------------------------------------------------------------------ TLS, tokens


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
    for content in ("", "# nothing\n", "short\n", "two words here\n"):
        path.write_text(content)
        with pytest.raises(ConfigError):
            read_tokens(path)
    with pytest.raises(ConfigError):
        read_tokens(tmp_path / "missing")


# ----------------------------------------------------------------------------------------------------------- admin


def test_stats() -> None:
    async def test() -> None:
        async with scene() as s:
            s.core.stats = Stats(requests_accepted=3, executors=(ExecutorStats("e:1", True, free_blocks=7, rtt_ns=-1),))
            answer = await s.admin.GetStats(admin.GetStatsRequest())
            assert answer.requests_accepted == 3
            assert answer.executors[0] == admin.ExecutorStats(address="e:1", connected=True, free_blocks=7, rtt_ns=-1)

    run(test)


def test_watching_steps() -> None:
    async def test() -> None:
        async with scene() as s:
            call = s.admin.WatchSteps(admin.WatchStepsRequest(max_steps=2))
            await until(lambda: len(s.core.of(WatchSteps)) == 1)
            for step_id in (1, 2, 3):
                s.core.tell(StepSeen("e", 1, step_id, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13))
            steps = [step async for step in call]
            assert [step.step_id for step in steps] == [1, 2]
            assert (steps[0].executor, steps[0].decode_tokens, steps[0].device_idle_ns) == ("e", 4, 13)
            await until(lambda: s.core.of(WatchSteps)[-1] == WatchSteps(0, False))
            endless = s.admin.WatchSteps(admin.WatchStepsRequest())
            await until(lambda: s.core.of(WatchSteps)[-1] == WatchSteps(0, True))
            endless.cancel()
            await until(lambda: s.core.of(WatchSteps)[-1] == WatchSteps(0, False))

    run(test)


def test_draining() -> None:
    async def test() -> None:
        async with scene(forever) as s:
            call = s.inference.Generate(HI)
            await call.read()
            assert (await s.admin.Drain(admin.DrainRequest(deadline_ms=5))).unfinished == 1
            assert await s.status("") == NOT_SERVING and await s.status(LIVENESS) == SERVING
            error = await failing(s.inference.Generate(HI))
            assert error.code() is grpc.StatusCode.UNAVAILABLE and reason(error) == "DRAINING"
            call.cancel()

    run(test)


# ------------------------------------------------------------------------------------------- the gateway's protocol


def vllm_request(stream: bool, **params: Any) -> Any:
    tokens = vllm.TokenizedInput(input_ids=list(b"hi"))
    return vllm.GenerateRequest(
        request_id="g", tokenized=tokens, stream=stream, sampling_params=vllm.SamplingParams(max_tokens=20, **params)
    )


def test_the_gateway_generates() -> None:
    async def test() -> None:
        async with scene(say("hello STOP")) as s:
            stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(s.channel)
            *chunks, last = [message async for message in stub.Generate(vllm_request(True))]
            assert [i for message in chunks for i in message.chunk.token_ids] == [*b"hello STOP", 256]
            assert sum(message.chunk.completion_tokens for message in chunks) == 11
            assert last.complete.finish_reason == "stop" and last.complete.WhichOneof("matched_stop") is None
            assert last.complete.completion_tokens == 11 and last.complete.prompt_tokens == 2
            (whole,) = [message async for message in stub.Generate(vllm_request(False, stop=["STOP"]))]
            assert bytes(whole.complete.output_ids) == b"hello STOP"
            assert whole.complete.matched_stop_str == "STOP"
            error = await failing(stub.Generate(vllm_request(True, n=2)))
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED and reason(error) == "NOT_SUPPORTED"
            error = await failing(stub.Generate(vllm.GenerateRequest(tokenized=vllm.TokenizedInput())))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(test)


def test_the_gateway_cancels_and_aborts() -> None:
    async def test() -> None:
        async with scene(forever) as s:
            stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(s.channel)
            call = stub.Generate(vllm_request(True))
            await call.read()
            call.cancel()
            await until(lambda: s.core.live == {})
            call = stub.Generate(vllm_request(True))
            await call.read()
            await stub.Abort(vllm.AbortRequest(request_ids=["g", "unknown"]))
            assert (await failing(call)).code() is grpc.StatusCode.CANCELLED
            await until(lambda: s.core.worker.num_streams == 0)

    run(test)


def test_the_gateway_asks_about_the_server() -> None:
    async def test() -> None:
        async with scene() as s:
            stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(s.channel)
            assert (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy
            model = await stub.GetModelInfo(vllm.GetModelInfoRequest())
            assert (model.served_model_name, model.vocab_size, list(model.eos_token_ids)) == ("bytes", 258, [256])
            server = await stub.GetServerInfo(vllm.GetServerInfoRequest())
            assert server.server_type == "vllm-grpc" and server.max_num_seqs == 8 and server.block_size == 16
            s.core.stats = Stats(waiting=2, executors=(ExecutorStats("e", True, num_blocks=100, free_blocks=75),))
            (load,) = (await stub.GetLoads(vllm.GetLoadsRequest())).loads
            assert (load.num_waiting_reqs, load.num_used_tokens, load.token_usage) == (2, 400, 0.25)
            s.core.tell(replace(READY, ready=False))
            assert not (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy

    run(test)


class Exportable(ByteTokenizer):
    def files(self) -> dict[str, bytes]:
        return {"tokenizer.json": bytes(range(256)) * 4000, "tokenizer_config.json": b"{}"}


def test_the_gateway_gets_the_tokenizer() -> None:
    async def test() -> None:
        async with scene(tokenizer=Exportable()) as s:
            stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(s.channel)
            for _ in range(2):
                chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
                data = b"".join(chunk.data for chunk in chunks)
                assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
                assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
                with zipfile.ZipFile(io.BytesIO(data)) as archive:
                    assert {name: archive.read(name) for name in archive.namelist()} == Exportable().files()

    run(test)


def test_what_the_gateway_can_not_have_is_unimplemented() -> None:
    async def test() -> None:
        async with scene() as s:
            stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(s.channel)
            for call in (
                stub.Embed(vllm.EmbedRequest()),
                stub.FlushCache(common_pb2.FlushCacheRequest()),
                stub.StartProfile(common_pb2.StartProfileRequest()),
                stub.StopProfile(common_pb2.StopProfileRequest()),
                stub.GetTokenizer(common_pb2.GetTokenizerRequest()),
                stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()),
            ):
                error = await failing(call)
                assert error.code() is grpc.StatusCode.UNIMPLEMENTED and reason(error) == "NOT_SUPPORTED"

    run(test)
