"""vllm.grpc.engine.VllmEngine, which the SMG gateway speaks."""

import hashlib
import io
import zipfile
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from scheduler_svc.messages import ExecutorStats, Stats
from tests.integration.api_scene import failing, reason, run, scene, until
from tests.unit.api.fakes import READY, ByteTokenizer, forever, say


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
            error = await failing(stub.Generate(vllm_request(True, json_object=True)))
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED and reason(error) == "NOT_SUPPORTED"
            error = await failing(stub.Generate(vllm.GenerateRequest(tokenized=vllm.TokenizedInput())))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_the_gateway_gets_each_choice_by_its_index(stream: bool) -> None:
    async def test() -> None:
        async with scene(say("hello")) as s:
            stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(s.channel)
            messages = [message async for message in stub.Generate(vllm_request(stream, n=3))]
            ends = [message.complete for message in messages if message.HasField("complete")]
            assert sorted(end.index for end in ends) == [0, 1, 2]
            for index in range(3):
                chunks = [m.chunk for m in messages if m.HasField("chunk") and m.chunk.index == index]
                (end,) = [end for end in ends if end.index == index]
                tokens = [i for chunk in chunks for i in chunk.token_ids] if stream else list(end.output_ids)
                assert tokens == [*b"hello", 256] and end.completion_tokens == 6

    run(test)


def test_the_gateway_flushes_the_prefix_cache() -> None:
    async def test() -> None:
        async with scene() as s:
            stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(s.channel)
            answer = await stub.FlushCache(common_pb2.FlushCacheRequest())
            assert answer.success and answer.message == "5 blocks dropped, 2 in use forgotten"

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
                stub.StartProfile(common_pb2.StartProfileRequest()),
                stub.StopProfile(common_pb2.StopProfileRequest()),
                stub.GetTokenizer(common_pb2.GetTokenizerRequest()),
                stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()),
            ):
                error = await failing(call)
                assert error.code() is grpc.StatusCode.UNIMPLEMENTED and reason(error) == "NOT_SUPPORTED"

    run(test)
