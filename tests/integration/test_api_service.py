"""What surrounds the calls: health, reflection, ports, pings, stopping."""

import asyncio
import importlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.clock import SystemClock
from common.errors import ConfigError
from scheduler_svc.api.health import LIVENESS
from scheduler_svc.api.server import ApiOptions, build_server
from scheduler_svc.api.worker import ApiWorker
from scheduler_svc.messages import Cancel, CoreState, FinishReason
from stepwire.v1 import inference_pb2 as pb
from stepwire.v1 import inference_pb2_grpc
from tests.integration.api_scene import ANYWHERE, failing, joined_text, rest, run, scene, until
from tests.unit.api.fakes import MODEL, READY, FakeCore, forever

SERVING = int(health_pb2.HealthCheckResponse.SERVING)
NOT_SERVING = int(health_pb2.HealthCheckResponse.NOT_SERVING)
UNKNOWN = int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
HI = pb.GenerateRequest(text="hi")


# --------------------------------------------------------------------------------------------------------------- health


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


# ----------------------------------------------------------------------------------------------------------- reflection


def test_an_answer_whose_call_has_just_ended_is_no_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """It takes a race that can not be called for: what gRPC then logs is logged here, by its own names."""
    cygrpc = importlib.import_module("grpc._cython.cygrpc")
    errors = (cygrpc.ExecuteBatchError("Failed"), ValueError("a defect"))

    async def test() -> None:
        async with scene():
            for error in errors:
                try:
                    raise error
                except Exception:
                    logging.getLogger(cygrpc.__name__).exception("raised in core by servicer method [/some/Method]")

    run(test)
    assert [record.exc_info and record.exc_info[1] for record in caplog.records] == [errors[1]]


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


# ----------------------------------------------------------------------------------------------- ports, pings, messages


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
