"""A scripted stepwire.v1 server on a real port, built from the client's own stubs."""

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from stepwire_client._gen.stepwire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from stepwire_client._gen.stepwire.v1 import inference_pb2 as pb

Script = Callable[[pb.GenerateRequest, grpc.ServicerContext], Iterator[pb.GenerateResponse]]


def fail(context: grpc.ServicerContext, code: grpc.StatusCode, text: str, *details: Message) -> None:
    """Ends the call with google.rpc details, as the real server does."""
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    status = status_pb2.Status(code=code.value[0], message=text, details=packed)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(code, text)


def retry_info(milliseconds: int) -> error_details_pb2.RetryInfo:
    return error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=milliseconds * 1_000_000))


def answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    """The usual script: "Hello world", in two deltas or in one message, for each choice."""
    for index in range(request.n or 1):
        for message in _choice(request):
            message.index = index
            yield message


def _choice(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
    started = pb.Started(request_id=request.request_id or "drawn", prompt_tokens=3, seed=request.sampling.seed or 7)
    finished = pb.Finished(
        reason=pb.FINISH_REASON_EOS,
        usage=pb.Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=2),
        stop_token_id=2,
    )
    if request.HasField("stream") and not request.stream:
        yield pb.GenerateResponse(
            started=started, delta=pb.Delta(text="Hello world", token_ids=[5, 6]), finished=finished
        )
        return
    yield pb.GenerateResponse(started=started)
    yield pb.GenerateResponse(delta=pb.Delta(text="Hello", token_ids=[5]))
    yield pb.GenerateResponse(delta=pb.Delta(text=" world", token_ids=[6]), finished=finished)


class FakeInference(inference_pb2_grpc.InferenceServicer):
    """Runs `script` for each Generate; keeps what it was sent."""

    def __init__(self) -> None:
        self.script: Script = answer
        self.requests: list[pb.GenerateRequest] = []
        self.peers: set[str] = set()
        self.metadata: list[dict[str, str | bytes]] = []
        self.arrived = threading.Event()
        self.cancelled = threading.Event()
        self.model_failures: list[Callable[[grpc.ServicerContext], None]] = []

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.peers.add(context.peer())
        self.metadata.append(dict(context.invocation_metadata()))
        self.arrived.set()
        context.add_callback(lambda: None if context.code() else self.cancelled.set())
        yield from self.script(request, context)

    def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        self.peers.add(context.peer())
        if self.model_failures:
            self.model_failures.pop(0)(context)
        return pb.GetModelInfoResponse(
            model="toy", vocab_size=64, max_context=128, eos_token_ids=[2],
            default_sampling=pb.SamplingParams(temperature=0.5, top_k=4), features=["chat"],
        )  # fmt: skip

    def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(ids=[ord(c) for c in request.text], tokens=list(request.text))

    def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text="".join(chr(i) for i in request.ids))

    def ApplyChatTemplate(self, request: pb.ApplyChatTemplateRequest, context: Any) -> pb.ApplyChatTemplateResponse:
        text = "".join(f"<{m.role}>{m.content}" for m in request.chat.messages)
        return pb.ApplyChatTemplateResponse(text=text, ids=[1, 2])

    def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        return pb.AbortResponse(found=request.request_id == "live")


class FakeAdmin(admin_pb2_grpc.AdminServicer):
    def GetStats(self, request: admin_pb2.GetStatsRequest, context: Any) -> admin_pb2.GetStatsResponse:
        executor = admin_pb2.ExecutorStats(address="e:1", connected=True, num_blocks=9)
        tenant = admin_pb2.TenantStats(tenant="a", running=2, weight=1.5)
        return admin_pb2.GetStatsResponse(requests_accepted=4, running=2, executors=[executor], tenants=[tenant])

    def WatchSteps(self, request: admin_pb2.WatchStepsRequest, context: Any) -> Iterator[admin_pb2.WatchStepsResponse]:
        for step in range(1, request.max_steps + 1):
            yield admin_pb2.WatchStepsResponse(executor="e:1", step_id=step, decode_tokens=3)

    def Drain(self, request: admin_pb2.DrainRequest, context: Any) -> admin_pb2.DrainResponse:
        return admin_pb2.DrainResponse(unfinished=request.deadline_ms)

    def ResetPrefixCache(
        self, request: admin_pb2.ResetPrefixCacheRequest, context: Any
    ) -> admin_pb2.ResetPrefixCacheResponse:
        return admin_pb2.ResetPrefixCacheResponse(dropped_blocks=5, forgotten_blocks=2)


@contextmanager
def serving(
    address: str = "127.0.0.1:0", credentials: grpc.ServerCredentials | None = None
) -> Iterator[tuple[FakeInference, str]]:
    """A server and the address it got."""
    server = grpc.server(futures.ThreadPoolExecutor(8))
    inference = FakeInference()
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
    admin_pb2_grpc.add_AdminServicer_to_server(FakeAdmin(), server)
    states = health.HealthServicer()
    states.set("stepwire.v1.Inference", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    server.start()
    try:
        yield inference, address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait(10)
