"""Public call to toy executor, everything between them real: right tokens, and everything given back whatever
happened."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from google.protobuf.message import Message

from common.clock import SystemClock
from common.grpc_options import PUBLIC_MAX_MESSAGE_BYTES, channel_options
from common.messages import U32, StepPlan, u32
from scheduler_svc.api.served_model import ServedModel
from scheduler_svc.api.server import ApiOptions, build_server
from scheduler_svc.api.worker import ApiWorker
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine_loop import EngineLoop, EngineOptions
from scheduler_svc.executor_driver import DriverOptions
from scheduler_svc.messages import ExecutorStats
from scheduler_svc.metrics.beside import Beside
from scheduler_svc.metrics.observer import MetricsObserver
from scheduler_svc.tracing import Tracing
from stepwire.v1 import inference_pb2 as pb
from stepwire.v1 import inference_pb2_grpc
from tests.fakes.toy_executor import ToyExecutor, toy_info
from tests.fakes.toy_tokens import log_softmax, toy_logits
from tests.integration.api_scene import ANYWHERE, failing, joined_text, reason, rest, until
from tests.integration.engine_harness import QUICK_STREAM, oracle, seeded
from tests.integration.protocol_harness import run, serving
from tests.unit.api.fakes import ByteTokenizer

PROMPT = list(range(10, 30))
VOCAB, EOS = 1000, (2,)


class NumberDecoder:
    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(f" {token_id}" for token_id in token_ids)

    def flush(self) -> str:
        return ""


class NumberTokenizer(ByteTokenizer):
    """Each token's text is its number."""

    def decoder(self, prompt_ids: Sequence[int] | U32 = ()) -> Any:
        return NumberDecoder()


@dataclass
class Whole:
    """The scheduler's parts as `app` puts them together."""

    engine: EngineLoop
    worker: ApiWorker
    channel: grpc.aio.Channel
    target: str

    @property
    def stub(self) -> Any:
        return inference_pb2_grpc.InferenceStub(self.channel)

    def executor(self) -> ExecutorStats:
        return self.engine.stats().executors[0]

    async def at_rest(self) -> None:
        """Every row and block is back, and nobody holds a stream."""
        start = self.executor()

        def is_at_rest() -> bool:
            stats = self.engine.stats()
            (now,) = stats.executors
            return (
                (now.free_rows, now.free_blocks, now.limbo_blocks) == (start.num_rows, start.num_blocks, 0)
                and (now.in_flight_steps, stats.waiting, stats.running) == (0, 0, 0)
                and self.worker.num_streams == 0
            )

        await until(is_at_rest)


@contextlib.asynccontextmanager
async def whole(
    address: str,
    options: ApiOptions | None = None,
    core: CoreConfig | None = None,
    channel_args: Sequence[tuple[str, Any]] = (),
    tracing: Tracing = Tracing(),  # noqa: B008 - switched off it has no state
) -> AsyncIterator[Whole]:
    driver = DriverOptions(b"s" * 16, 2, QUICK_STREAM, first_backoff_s=0.02, max_backoff_s=0.1)
    clock = SystemClock()
    observer = Beside(tracing.observer, MetricsObserver())
    engine = EngineLoop(Scheduler(core or CoreConfig()), EngineOptions((address,), driver), clock, observer)
    worker = ApiWorker(clock)
    worker.connect(engine.add_worker(worker))
    server = build_server(
        options or ApiOptions(listen=ANYWHERE),
        worker,
        NumberTokenizer(),
        ServedModel(),
        tracing.interceptors,
        tracing.request_tracer,
    )
    args = [*channel_options(PUBLIC_MAX_MESSAGE_BYTES), *channel_args]
    target = f"127.0.0.1:{server.port}"
    channel = grpc.aio.insecure_channel(target, options=args)
    await server.start()
    engine.start()
    try:
        await until(lambda: worker.state.ready)
        yield Whole(engine, worker, channel, target)
    finally:
        await channel.close()
        await server.stop()
        await engine.stop()
        assert not engine.failed.done(), engine.failed.result()


def request(seed: int = 1, prompt: Sequence[int] = PROMPT, **fields: Message | int) -> pb.GenerateRequest:
    stop = fields.pop("stop", pb.StopConditions(max_tokens=24))
    ids = pb.TokenIds(ids=prompt)
    return pb.GenerateRequest(token_ids=ids, sampling=pb.SamplingParams(seed=seed), stop=stop, **fields)  # type: ignore[arg-type]


def tokens(messages: Sequence[pb.GenerateResponse]) -> list[int]:
    return [token for message in messages for token in message.delta.token_ids]


def held_by(gate: threading.Event) -> Callable[[StepPlan], None]:
    """Results come only while the gate is open."""

    def wait(plan: StepPlan) -> None:
        assert gate.wait(20)

    return wait


def test_tokens_are_the_oracles_and_everything_comes_back() -> None:
    async def test() -> None:
        toy = ToyExecutor()
        async with serving(toy) as served, whole(served.address) as w:
            answers = await asyncio.gather(*[rest(w.stub.Generate(request(seed))) for seed in range(40)])
            for seed, messages in enumerate(answers):
                expected = oracle(PROMPT, seeded(seed))
                assert tokens(messages) == expected
                assert joined_text(messages) == "".join(f" {token}" for token in expected)
                finished = messages[-1].finished
                assert finished.reason == pb.FINISH_REASON_MAX_TOKENS and messages[0].started.seed == seed
                assert finished.usage.prompt_tokens == len(PROMPT) and finished.usage.completion_tokens == 24
            assert any(messages[-1].finished.usage.cached_tokens for messages in answers)
            await w.at_rest()
            assert (toy.corrupt_reads, toy.limbo_violations) == (0, 0)

    run(test())


def test_every_value_belongs_to_its_token() -> None:
    async def test() -> None:
        async with serving(ToyExecutor()) as served, whole(served.address) as w:
            output = pb.OutputOptions(logprobs=2, raw_logits=True, prompt_logprobs=1)
            messages = await rest(w.stub.Generate(request(3, output=output)))
            prompt = [entry for message in messages for entry in message.delta.prompt_logprobs]
            assert [entry.token_id for entry in prompt] == PROMPT[1:]
            known = list(PROMPT)
            for position, entry in enumerate(prompt, 1):
                values = log_softmax(toy_logits(u32(known[:position]), VOCAB, EOS))
                assert entry.logprob == pytest.approx(values[known[position]], abs=1e-5)
                assert [top.token_id for top in entry.top] == [int(values.argmax())]
            chosen = [entry for message in messages for entry in message.delta.logprobs]
            logits = [entry for message in messages for entry in message.delta.raw_logits]
            generated = tokens(messages)
            assert len(chosen) == len(logits) == len(generated) == 24
            for entry, raw, token in zip(chosen, logits, generated, strict=True):
                expected = toy_logits(u32(known), VOCAB, EOS)
                assert raw.position == len(known) and entry.token_id == token
                np.testing.assert_allclose(np.frombuffer(raw.data, "<f4"), expected, rtol=1e-6)
                values = log_softmax(expected)
                assert entry.logprob == pytest.approx(values[token], abs=1e-5)
                assert entry.top[0].token_id == int(values.argmax()) and len(entry.top) == 2
                known.append(token)
            await w.at_rest()

    run(test())


def test_a_stop_string_frees_the_row_and_counts_to_its_token() -> None:
    async def test() -> None:
        async with serving(ToyExecutor()) as served, whole(served.address) as w:
            expected = oracle(PROMPT, seeded(5))
            stop = pb.StopConditions(stop_strings=[f" {expected[6]}"], max_tokens=200)
            messages = await rest(w.stub.Generate(request(5, stop=stop)))
            assert tokens(messages) == expected[:7]
            assert joined_text(messages) == "".join(f" {token}" for token in expected[:6])
            assert messages[-1].finished.reason == pb.FINISH_REASON_STOP_STRING
            assert messages[-1].finished.usage.completion_tokens == 7
            await w.at_rest()
            assert w.engine.stats().requests_finished == 1

    run(test())


ENDINGS = ["cancel", "deadline", "abort"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("moment", ["queued", "prefill", "decode"])
def test_whenever_and_however_it_ends_everything_comes_back(moment: str, ending: str) -> None:
    """queued: behind one that has the only place. prefill: its first chunk is in flight. decode: tokens flow."""

    async def test() -> None:
        gate = threading.Event()
        toy = ToyExecutor(toy_info(max_num_seqs=1 if moment == "queued" else 16), on_wait=held_by(gate))
        async with serving(toy) as served, whole(served.address, core=CoreConfig(max_prefill_chunk=8)) as w:
            first = w.stub.Generate(request(1)) if moment == "queued" else None
            if first is not None:
                await first.read()
                await until(lambda: w.executor().in_flight_steps > 0)
            stop = pb.StopConditions(max_tokens=200)
            timeout = 0.5 if ending == "deadline" else None
            call = w.stub.Generate(request(2, stop=stop), timeout=timeout)
            started = (await call.read()).started
            if moment == "decode":
                gate.set()
                await call.read()
                gate.clear()
            else:
                expected = 1 if moment == "queued" else 0
                await until(lambda: w.engine.stats().waiting == expected and w.executor().in_flight_steps > 0)
            if ending == "cancel":
                call.cancel()
            elif ending == "abort":
                assert (await w.stub.Abort(pb.AbortRequest(request_id=started.request_id))).found
                assert not (await w.stub.Abort(pb.AbortRequest(request_id=started.request_id))).found
                error = await failing(call)
                assert error.code() is grpc.StatusCode.CANCELLED and reason(error) == "ABORTED"
            else:
                assert (await failing(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: w.engine.stats().requests_aborted == 1)
            gate.set()
            if first is not None:
                assert tokens(await rest(first)) == oracle(PROMPT, seeded(1)), "the one in front is unharmed"
            again = await rest(w.stub.Generate(named(started.request_id, 3)))
            assert tokens(again) == oracle(PROMPT, seeded(3)), "its id is free again"
            await w.at_rest()
            assert (toy.corrupt_reads, toy.limbo_violations) == (0, 0)

    run(test())


def test_a_live_id_is_refused_by_the_core() -> None:
    async def test() -> None:
        gate = threading.Event()
        async with serving(ToyExecutor(on_wait=held_by(gate))) as served, whole(served.address) as w:
            first = w.stub.Generate(named("same", 1))
            await first.read()
            error = await failing(w.stub.Generate(named("same", 2)))
            assert error.code() is grpc.StatusCode.ALREADY_EXISTS and reason(error) == "DUPLICATE_REQUEST"
            gate.set()
            assert tokens(await rest(first)) == oracle(PROMPT, seeded(1))
            await w.at_rest()

    run(test())


def test_a_stalled_reader_gives_its_row_back_and_others_go_on() -> None:
    """triton#5833: a client that stops reading keeps the inference running."""

    async def test() -> None:
        options = ApiOptions(listen=ANYWHERE, max_buffered_bytes=40_000)
        small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)]
        async with (
            serving(ToyExecutor()) as served,
            whole(served.address, options, channel_args=small_window) as w,
        ):
            stalled = w.stub.Generate(
                request(1, stop=pb.StopConditions(max_tokens=200), output=pb.OutputOptions(raw_logits=True))
            )
            await stalled.read()
            await until(lambda: w.engine.stats().requests_aborted == 1)
            assert tokens(await rest(w.stub.Generate(request(2)))) == oracle(PROMPT, seeded(2))
            error = await failing(stalled)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and reason(error) == "SLOW_READER"
            await w.at_rest()

    run(test())


def test_a_lost_executor_is_a_pause() -> None:
    async def test() -> None:
        async with contextlib.AsyncExitStack() as first:
            gate = threading.Event()
            toy = ToyExecutor(on_wait=held_by(gate))
            served = await first.enter_async_context(serving(toy))
            async with whole(served.address) as w:
                gate.set()
                calls = [w.stub.Generate(request(seed, stop=pb.StopConditions(max_tokens=100))) for seed in range(4)]
                heads = [[await call.read(), await call.read()] for call in calls]
                await first.aclose()
                await until(lambda: not w.worker.state.ready)
                async with serving(ToyExecutor(incarnation=99), listen=served.address):
                    for seed, (head, call) in enumerate(zip(heads, calls, strict=True)):
                        assert tokens(head + await rest(call)) == oracle(PROMPT, seeded(seed, 100))
                    await w.at_rest()

    run(test())


def named(request_id: str, seed: int) -> pb.GenerateRequest:
    message = request(seed)
    message.request_id = request_id
    return message
