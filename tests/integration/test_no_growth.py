"""Thousands of public calls of every kind leave both services as large as they were: everything between a client and
the toy executor is real, traced and counted.

A sample runs always; NO_GROWTH_REQUESTS=20000 for many.
"""

import asyncio
import contextlib
import gc
import os
import random
import sys
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from common.clock import SystemClock
from common.grpc_options import PUBLIC_MAX_MESSAGE_BYTES, channel_options
from common.telemetry.context import new_trace
from common.telemetry.provider import telemetry
from executor_svc.session import SessionLimits
from executor_svc.tracing import ExecutorTracing
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.tracing import TracingOptions, tracing_into
from stepwire.v1 import inference_pb2 as pb
from stepwire.v1 import inference_pb2_grpc
from tests.fakes.toy_executor import ToyExecutor, toy_info
from tests.integration.protocol_harness import run, serving
from tests.integration.test_api_core import Whole, whole

REQUESTS = int(os.environ.get("NO_GROWTH_REQUESTS", "900"))
WARM_REQUESTS = 1800
# An executor keeps what belongs to a step for so long, for a stream that may come for it.
OUTPUTS_WAIT_S = 1.0
TOGETHER = 30
# One small object kept for every second request would be more. (What is bounded fills up slowly.)
MAX_BLOCKS = REQUESTS // 2
DEADLINE_S = 100.0


class Discard(SpanExporter):
    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.SUCCESS


class Caller:
    """Calls of every kind and of every end, over a connection that is new for each round."""

    def __init__(self) -> None:
        self.rng = random.Random(1)
        self.made = 0
        self.ends: set[str] = set()

    async def round(self, target: str) -> None:
        async with grpc.aio.insecure_channel(target, options=channel_options(PUBLIC_MAX_MESSAGE_BYTES)) as channel:
            stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
            await asyncio.gather(*[self.call(stub) for _ in range(TOGETHER)])

    async def call(self, stub: "inference_pb2_grpc.InferenceAsyncStub") -> None:
        self.made += 1
        rng = self.rng
        kind = rng.choice(["plain", "choices", "values", "text", "cancel", "deadline", "abort", "refused", "twice"])
        name = f"r{self.made}" if kind != "twice" else f"twice{rng.randrange(2)}"
        request = pb.GenerateRequest(
            request_id=name,
            token_ids=pb.TokenIds(
                ids=[rng.randrange(3)] * 8 + [rng.randrange(3, 900) for _ in range(rng.randint(1, 30))]
            ),
            sampling=pb.SamplingParams(seed=self.made),
            stop=pb.StopConditions(max_tokens=rng.randint(1, 20), stop_strings=[" 77"] if kind == "text" else []),
            output=pb.OutputOptions(raw_logits=kind == "values", logprobs=2 if kind == "values" else None),
            n=3 if kind == "choices" else 1,
            model="another" if kind == "refused" else "",
            tenant=f"tenant {self.made % 50}",
        )
        sampled = (("traceparent", new_trace().traceparent),)
        call = stub.Generate(request, metadata=sampled, timeout=0.02 if kind == "deadline" else None)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for message in call:
                if kind == "cancel" and message.delta.token_ids:
                    call.cancel()
                elif kind == "abort" and message.delta.token_ids:
                    await stub.Abort(pb.AbortRequest(request_id=name))
        self.ends.add(f"{kind} {(await call.code()).name}")


@contextlib.asynccontextmanager
async def everything(toy: ToyExecutor) -> AsyncIterator[Whole]:
    """Both services of `toy`, traced."""
    clock = SystemClock()
    executors = telemetry("stepwire-executor", "e", Discard(), collect_s=0.01)
    tracing = tracing_into(telemetry("stepwire-scheduler", "s", Discard(), collect_s=0.01), TracingOptions(), clock)
    limits = SessionLimits(outputs_wait_s=OUTPUTS_WAIT_S)
    try:
        async with (
            serving(toy, limits=limits, trace=ExecutorTracing(executors, clock)) as served,
            whole(served.address, core=CoreConfig(max_prefill_chunk=16), tracing=tracing) as w,
        ):
            yield w
    finally:
        await asyncio.to_thread(tracing.shutdown)
        await asyncio.to_thread(executors.shutdown)


async def size(w: Whole, toy: ToyExecutor) -> int:
    """Blocks that Python has handed out, without what is kept on purpose: for a while, or in the prefix cache."""
    await w.worker.reset_prefix_cache()
    await asyncio.sleep(1.5 * OUTPUTS_WAIT_S)
    toy.forget_admissions()
    gc.collect()
    return sys.getallocatedblocks()


@pytest.mark.slow
def test_nothing_grows_with_requests() -> None:
    async def main() -> None:
        toy = ToyExecutor(toy_info(num_blocks=96))
        caller = Caller()
        async with everything(toy) as w:
            target, before = w.target, 0
            while caller.made < WARM_REQUESTS + REQUESTS:
                await caller.round(target)
                await w.at_rest()
                if not before and caller.made >= WARM_REQUESTS:
                    before = await size(w, toy)
            more = await size(w, toy) - before
        assert {"plain OK", "text OK", "twice ALREADY_EXISTS", "refused NOT_FOUND", "abort CANCELLED"} <= caller.ends
        assert {"cancel CANCELLED", "deadline DEADLINE_EXCEEDED", "choices OK", "values OK"} <= caller.ends
        assert more < MAX_BLOCKS, f"{more} more blocks of Python's after {REQUESTS} requests"

    run(main(), DEADLINE_S)
