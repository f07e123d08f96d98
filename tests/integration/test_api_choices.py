"""Several choices of one request, from the call to the rows and back: real core, toy executor, real sockets."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
import pytest

from scheduler_svc.api.server import ApiOptions
from scheduler_svc.choice_seed import choice_seed
from scheduler_svc.core.config import CoreConfig
from stepwire.v1 import admin_pb2, admin_pb2_grpc
from stepwire.v1 import inference_pb2 as pb
from stepwire_client import AsyncClient, Client, Completion, Finished, Started
from tests.fakes.toy_executor import ToyExecutor, toy_info
from tests.integration.api_scene import ANYWHERE, failing, joined_text, reason, rest, scene, until, violated_field
from tests.integration.api_scene import run as run_scene
from tests.integration.engine_harness import oracle, seeded
from tests.integration.protocol_harness import run, serving
from tests.integration.test_api_core import PROMPT, held_by, request, tokens, whole
from tests.unit.api.fakes import forever, say

N = 4


def wanted(seed: int, index: int, max_tokens: int = 24) -> list[int]:
    return oracle(PROMPT, seeded(choice_seed(seed, index), max_tokens))


def by_choice(messages: Sequence[pb.GenerateResponse]) -> list[list[pb.GenerateResponse]]:
    return [[m for m in messages if m.index == index] for index in range(1 + max(m.index for m in messages))]


@pytest.mark.parametrize("stream", [True, False])
def test_each_choice_has_its_tokens_its_seed_and_its_end(stream: bool) -> None:
    async def test() -> None:
        toy = ToyExecutor()
        async with serving(toy) as served, whole(served.address) as w:
            messages = await rest(w.stub.Generate(request(7, n=N, stream=stream)))
            if stream:
                assert [m.started.request_id != "" for m in messages[: N + 1]] == [True] * N + [False]
                ended = next(i for i, m in enumerate(messages) if m.HasField("finished"))
                assert {m.index for m in messages[N:ended]} == set(range(N)), "no choice waits for another's end"
            else:
                assert len(messages) == N
            for index, own in enumerate(by_choice(messages)):
                assert tokens(own) == wanted(7, index)
                assert joined_text(own) == "".join(f" {token}" for token in wanted(7, index))
                assert own[0].started.seed == choice_seed(7, index)
                assert [m.HasField("finished") for m in own] == [False] * (len(own) - 1) + [True]
                usage = own[-1].finished.usage
                assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 24)
                assert usage.cached_tokens == (len(PROMPT) - 1 if index else 0)
            alone = await rest(w.stub.Generate(request(choice_seed(7, 2))))
            assert tokens(alone) == wanted(7, 2), "a choice's seed gives it again"
            await w.at_rest()
            stats = w.engine.stats()
            assert (stats.requests_accepted, stats.requests_finished) == (N + 1, N + 1)
            assert (toy.corrupt_reads, toy.limbo_violations) == (0, 0)

    run(test())


def test_a_stop_string_ends_its_choice_alone() -> None:
    async def test() -> None:
        async with serving(ToyExecutor()) as served, whole(served.address) as w:
            text = f" {wanted(7, 1)[5]}"
            stop = pb.StopConditions(stop_strings=[text], max_tokens=24)
            messages = by_choice(await rest(w.stub.Generate(request(7, n=3, stop=stop))))
            for index, own in enumerate(messages):
                expected = wanted(7, index)
                reason_ = own[-1].finished.reason
                if index == 1:
                    assert tokens(own) == expected[:6] and reason_ == pb.FINISH_REASON_STOP_STRING
                else:
                    assert tokens(own) == expected and reason_ == pb.FINISH_REASON_MAX_TOKENS
            await w.at_rest()
            assert w.engine.stats().requests_finished == 3

    run(test())


def test_values_belong_to_their_choice_and_the_prompts_come_once() -> None:
    async def test() -> None:
        async with serving(ToyExecutor()) as served, whole(served.address) as w:
            output = pb.OutputOptions(logprobs=2, raw_logits=True, prompt_logprobs=1)
            stop = pb.StopConditions(max_tokens=6)
            together = by_choice(await rest(w.stub.Generate(request(3, n=3, output=output, stop=stop))))
            for index, own in enumerate(together):
                prompt = [entry for m in own for entry in m.delta.prompt_logprobs]
                assert len(prompt) == (0 if index else len(PROMPT) - 1)
                one = request(choice_seed(3, index), output=output, stop=stop)
                alone = await rest(w.stub.Generate(one))
                for name in ("logprobs", "raw_logits", "token_ids"):
                    got = [v for m in own for v in getattr(m.delta, name)]
                    assert got == [v for m in alone for v in getattr(m.delta, name)] and len(got) == 6
            await w.at_rest()

    run(test())


ENDINGS = ["cancel", "deadline", "abort"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("moment", ["prompt", "decode"])
def test_however_it_ends_all_choices_end(moment: str, ending: str) -> None:
    """prompt: its first chunk is in flight and the other choices wait for it. decode: tokens flow."""

    async def test() -> None:
        gate = threading.Event()
        toy = ToyExecutor(on_wait=held_by(gate))
        async with serving(toy) as served, whole(served.address, core=CoreConfig(max_prefill_chunk=8)) as w:
            stop = pb.StopConditions(max_tokens=200)
            call = w.stub.Generate(request(2, n=N, stop=stop), timeout=0.5 if ending == "deadline" else None)
            started = (await call.read()).started
            if moment == "decode":
                gate.set()
                while not (await call.read()).delta.token_ids:
                    pass
                gate.clear()
            else:
                await until(lambda: w.engine.stats().waiting == N - 1 and w.executor().in_flight_steps > 0)
            if ending == "cancel":
                call.cancel()
            elif ending == "abort":
                assert (await w.stub.Abort(pb.AbortRequest(request_id=started.request_id))).found
                assert not (await w.stub.Abort(pb.AbortRequest(request_id=started.request_id))).found
                error = await failing(call)
                assert error.code() is grpc.StatusCode.CANCELLED and reason(error) == "ABORTED"
            else:
                assert (await failing(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: w.engine.stats().requests_aborted == N)
            gate.set()
            assert tokens(await rest(w.stub.Generate(request(3)))) == oracle(PROMPT, seeded(3))
            await w.at_rest()
            assert (toy.corrupt_reads, toy.limbo_violations) == (0, 0)

    run(test())


def test_all_choices_are_refused_at_once_and_leave_nothing() -> None:
    async def test() -> None:
        core = CoreConfig(max_queued_requests=3)
        async with serving(ToyExecutor(toy_info(max_num_seqs=1))) as served, whole(served.address, core=core) as w:
            error = await failing(w.stub.Generate(request(1, n=N)))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and violated_field(error) == "n"
            await until(lambda: w.worker.num_streams == 0)
            assert tokens(await rest(w.stub.Generate(request(1, n=1)))) == wanted(1, 0)
            stats = w.engine.stats()
            assert (stats.requests_refused, stats.requests_accepted, stats.requests_aborted) == (N, 1, 0)
            await w.at_rest()

    run(test())


def test_a_stalled_reader_gives_all_its_rows_back() -> None:
    async def test() -> None:
        options = ApiOptions(listen=ANYWHERE, max_buffered_bytes=40_000)
        small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)]
        async with (
            serving(ToyExecutor()) as served,
            whole(served.address, options, channel_args=small_window) as w,
        ):
            stop = pb.StopConditions(max_tokens=200)
            stalled = w.stub.Generate(request(1, n=3, stop=stop, output=pb.OutputOptions(raw_logits=True)))
            await stalled.read()
            await until(lambda: w.engine.stats().requests_aborted == 3)
            error = await failing(stalled)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and reason(error) == "SLOW_READER"
            await w.at_rest()

    run(test())


@pytest.mark.parametrize("number", [0, 65])
def test_a_number_of_choices_out_of_range_names_the_field(number: int) -> None:
    async def test() -> None:
        async with scene(forever) as s:
            error = await failing(s.inference.Generate(pb.GenerateRequest(text="hi", n=number)))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and violated_field(error) == "n"
            assert s.core.sent == []

    run_scene(test)


def test_the_cache_is_reset_while_requests_run() -> None:
    async def test() -> None:
        toy = ToyExecutor()
        async with serving(toy) as served, whole(served.address) as w:
            first = await rest(w.stub.Generate(request(1)))
            again = await rest(w.stub.Generate(request(1)))
            assert again[-1].finished.usage.cached_tokens > 0
            admin: Any = admin_pb2_grpc.AdminStub(w.channel)
            running = w.stub.Generate(request(5, stop=pb.StopConditions(max_tokens=200)))
            await running.read()
            await until(lambda: w.engine.stats().running == 1)
            answer = await admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
            assert answer.dropped_blocks + answer.forgotten_blocks > 0
            assert w.executor().cached_blocks == 0
            fresh = await rest(w.stub.Generate(request(1)))
            assert fresh[-1].finished.usage.cached_tokens == 0
            assert tokens(fresh) == tokens(first)
            assert tokens(await rest(running)) == oracle(PROMPT, seeded(5, 200))
            stats = await admin.GetStats(admin_pb2.GetStatsRequest())
            assert stats.cache_queried_tokens == stats.prompt_tokens == 4 * len(PROMPT)
            assert stats.cache_hit_tokens == stats.cached_tokens > 0 == stats.forked_tokens
            await w.at_rest()
            assert (toy.corrupt_reads, toy.limbo_violations) == (0, 0)

    run(test())


def check(answers: Sequence[Completion]) -> None:
    assert [answer.index for answer in answers] == [0, 1, 2]
    assert [answer.text for answer in answers] == ["ok"] * 3
    assert [answer.seed for answer in answers] == [choice_seed(answers[0].seed, i) for i in range(3)]


def test_clients_read_choices() -> None:
    async def test() -> None:
        async with scene(say("ok")) as s:
            address = f"127.0.0.1:{s.server.port}"
            async with AsyncClient(address) as client:
                check(await client.completions("hi", n=3, max_tokens=9))
                async with client.generate("hi", n=3) as stream:
                    events = [event async for event in stream]
                assert sorted(e.index for e in events if isinstance(e, Started)) == [0, 1, 2]
                assert sorted(e.index for e in events if isinstance(e, Finished)) == [0, 1, 2]
                with pytest.raises(ValueError, match="completions"):
                    await client.complete("hi", n=3, max_tokens=9)
                assert (await client.reset_prefix_cache()).dropped_blocks == 5

            def blocking() -> None:
                with Client(address) as client:
                    check(client.completions("hi", n=3, max_tokens=9))
                    assert client.reset_prefix_cache().forgotten_blocks == 2

            await asyncio.to_thread(blocking)

    run_scene(test)
