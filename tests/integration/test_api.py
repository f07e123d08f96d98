"""Generate and its siblings over real sockets: good requests, bad requests, requests whose caller goes away."""

import asyncio
import sys
import time
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from common.errors import Overloaded
from scheduler_svc.api.server import ApiOptions
from scheduler_svc.messages import Cancel, CoreState, Finish, FinishReason, Submit
from stepwire.v1 import inference_pb2 as pb
from tests.integration.api_scene import ANYWHERE, failing, joined_text, reason, rest, run, scene, until, violated_field
from tests.unit.api.fakes import BOS, EOS, READY, VOCAB, forever, say

HI = pb.GenerateRequest(text="hi")


def test_text_streams_in_order() -> None:
    async def test() -> None:
        async with scene(say("Grüße, 世界 🎉")) as s:
            messages = await s.generate(HI)
            assert messages[0].HasField("started") and not messages[0].HasField("delta")
            assert messages[0].started.prompt_tokens == 3
            assert joined_text(messages) == "Grüße, 世界 🎉"
            assert [message.HasField("finished") for message in messages].count(True) == 1
            finished = messages[-1].finished
            assert finished.reason == pb.FINISH_REASON_EOS and finished.stop_token_id == EOS
            assert not finished.HasField("stop_string")
            assert finished.usage.completion_tokens == sum(len(m.delta.token_ids) for m in messages)
            assert s.core.of(Cancel) == [] and s.core.of(Finish) == [] and s.core.worker.num_streams == 0

    run(test)


def test_without_stream_one_message_has_everything() -> None:
    async def test() -> None:
        async with scene(say("whole")) as s:
            limited = pb.StopConditions(max_tokens=9)
            (message,) = await s.generate(pb.GenerateRequest(text="hi", stream=False, stop=limited, request_id="me"))
            assert message.started.request_id == "me" and message.delta.text == "whole"
            assert message.finished.usage.completion_tokens == 6
            submit = s.core.sent[0]
            assert isinstance(submit, Submit) and submit.sampling.seed == message.started.seed

    run(test)


def test_a_stop_string_across_tokens_ends_the_work() -> None:
    async def test() -> None:
        async with scene(say("go on. STOP here")) as s:
            messages = await s.generate(pb.GenerateRequest(text="hi", stop=pb.StopConditions(stop_strings=["STOP"])))
            assert joined_text(messages) == "go on. "
            finished = messages[-1].finished
            assert finished.reason == pb.FINISH_REASON_STOP_STRING and finished.stop_string == "STOP"
            assert finished.usage.completion_tokens == 11
            (finish,) = s.core.of(Finish)
            assert isinstance(finish, Finish)
            assert (finish.token_count, finish.reason) == (11, FinishReason.STOP_STRING)
            assert s.core.live == {} and s.core.of(Cancel) == []

    run(test)


def test_chat_and_token_ids() -> None:
    async def test() -> None:
        async with scene(say("ok")) as s:
            chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="hi")])
            assert joined_text(await s.generate(pb.GenerateRequest(chat=chat))) == "ok"
            ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]), output=pb.OutputOptions(detokenize=False))
            messages = await s.generate(ids)
            assert joined_text(messages) == ""
            assert [i for m in messages for i in m.delta.token_ids] == [*b"ok", EOS]
            prompts = [submit.prompt.tolist() for submit in s.core.sent if isinstance(submit, Submit)]
            assert prompts == [list(b"user:hi\nassistant:"), [1, 2]]

    run(test)


def test_without_a_tokenizer_token_ids_are_served() -> None:
    async def test() -> None:
        async with scene(say("ok"), tokenizer=None) as s:
            messages = await s.generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1])))
            assert [i for m in messages for i in m.delta.token_ids] == [*b"ok", EOS]
            info = await s.inference.GetModelInfo(pb.GetModelInfoRequest())
            assert not info.has_tokenizer and not info.has_chat_template
            calls: list[Any] = [
                s.inference.Generate(HI),
                s.inference.Tokenize(pb.TokenizeRequest(text="hi")),
                s.inference.Detokenize(pb.DetokenizeRequest(ids=[1])),
                s.inference.ApplyChatTemplate(
                    pb.ApplyChatTemplateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="user")]))
                ),
            ]
            for call in calls:
                error = await failing(call)
                assert error.code() is grpc.StatusCode.UNIMPLEMENTED and reason(error) == "NOT_SUPPORTED"

    run(test)


BAD: list[tuple[pb.GenerateRequest, grpc.StatusCode, str, str]] = [
    (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_INPUT", "input"),
    (
        pb.GenerateRequest(token_ids=pb.TokenIds()),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_INPUT",
        "token_ids.ids",
    ),
    (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[VOCAB])),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_INPUT",
        "token_ids.ids[0]",
    ),
    (
        pb.GenerateRequest(text="x" * 1001),
        grpc.StatusCode.INVALID_ARGUMENT,
        "TOO_LARGE",
        "text",
    ),
    (
        pb.GenerateRequest(text="x", sampling=pb.SamplingParams(temperature=float("nan"))),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_INPUT",
        "sampling.temperature",
    ),
    (pb.GenerateRequest(text="x", model="other"), grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL", ""),
]


@pytest.mark.parametrize(("request_", "code", "why", "field"), BAD)
def test_bad_requests_never_reach_the_core(
    request_: pb.GenerateRequest, code: grpc.StatusCode, why: str, field: str
) -> None:
    async def test() -> None:
        async with scene(say("ok")) as s:
            error = await failing(s.inference.Generate(request_))
            assert error.code() is code and reason(error) == why
            if field:
                assert violated_field(error) == field
            assert s.core.sent == []
            assert joined_text(await s.generate(HI)) == "ok", "others are served"

    run(test)


def test_before_any_executor_and_while_draining_requests_are_unavailable() -> None:
    async def test() -> None:
        nothing = CoreState(ready=False, draining=False, info=None)
        for state, why in ((nothing, "UNAVAILABLE"), (replace(READY, draining=True, ready=False), "DRAINING")):
            async with scene(state=state) as s:
                error = await failing(s.inference.Generate(HI))
                assert error.code() is grpc.StatusCode.UNAVAILABLE and reason(error) == why

    run(test)


def test_a_live_id_is_refused_and_the_first_is_unharmed() -> None:
    async def test() -> None:
        async with scene() as s:
            request = pb.GenerateRequest(text="hi", request_id="same")
            first = s.inference.Generate(request)
            await first.read()
            error = await failing(s.inference.Generate(request))
            assert error.code() is grpc.StatusCode.ALREADY_EXISTS and reason(error) == "DUPLICATE_REQUEST"
            (key,) = s.core.live
            s.core.emit(key, b"fine", FinishReason.MAX_TOKENS)
            assert joined_text(await rest(first)) == "fine"
            again = s.inference.Generate(request)
            await again.read()
            again.cancel()
            await until(lambda: s.core.live == {})

    run(test)


def test_a_full_queue_says_when_to_come_back() -> None:
    async def test() -> None:
        async with scene() as s:
            s.core.full = Overloaded("full", retry_after_ms=500)
            error = await failing(s.inference.Generate(HI))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and reason(error) == "OVERLOADED"
            assert s.core.worker.num_streams == 0

    run(test)


def test_cancelling_ends_the_work_at_once() -> None:
    async def test() -> None:
        async with scene(forever) as s:
            for _ in range(3):
                call = s.inference.Generate(HI)
                await call.read()
                await call.read()
                call.cancel()
                await until(lambda: s.core.live == {})
            assert len(s.core.of(Cancel)) == 3 and s.core.worker.num_streams == 0

    run(test)


def test_cancelling_before_the_core_answered_ends_the_work_too() -> None:
    async def test() -> None:
        async with scene() as s:
            s.core.mute = True
            call = s.inference.Generate(HI)
            await until(lambda: len(s.core.of(Submit)) == 1)
            call.cancel()
            await until(lambda: len(s.core.of(Cancel)) == 1)
            assert s.core.worker.num_streams == 0

    run(test)


VANISHING = """
import sys, grpc
from stepwire.v1 import inference_pb2, inference_pb2_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    for message in inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(text="hi")):
        print(flush=True)
"""


def test_a_client_killed_mid_stream_ends_the_work() -> None:
    async def test() -> None:
        async with scene(forever) as s:
            client = await asyncio.create_subprocess_exec(
                sys.executable, "-c", VANISHING, f"127.0.0.1:{s.server.port}", stdout=asyncio.subprocess.PIPE
            )
            assert client.stdout is not None
            await client.stdout.readline()
            assert len(s.core.live) == 1
            client.kill()
            await client.communicate()
            await until(lambda: s.core.live == {} and s.core.worker.num_streams == 0)
            assert len(s.core.of(Cancel)) == 1

    run(test)


def test_a_deadline_ends_the_work_and_travels_to_the_core() -> None:
    async def test() -> None:
        async with scene(forever) as s:
            error = await failing(s.inference.Generate(HI, timeout=0.3))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: s.core.live == {} and s.core.worker.num_streams == 0)
            (submit,) = s.core.of(Submit)
            assert isinstance(submit, Submit)
            assert submit.arrival_ns < submit.deadline_ns < time.monotonic_ns() + 300_000_000, "it is this call's"
            await s.generate(pb.GenerateRequest(text="hi", stop=pb.StopConditions(stop_strings=["aa"])))
            other = s.core.of(Submit)[-1]
            assert isinstance(other, Submit) and other.deadline_ns == 0

    run(test)


def test_abort_ends_the_stream_with_cancelled_and_is_idempotent() -> None:
    async def test() -> None:
        async with scene() as s:
            call = s.inference.Generate(pb.GenerateRequest(text="hi", request_id="mine"))
            await call.read()
            (key,) = s.core.live
            s.core.emit(key, b"part")
            assert (await call.read()).delta.text == "part"
            answers = [await s.inference.Abort(pb.AbortRequest(request_id=i)) for i in ("min", "mine", "mine", "other")]
            assert [answer.found for answer in answers] == [False, True, False, False]
            error = await failing(call)
            assert error.code() is grpc.StatusCode.CANCELLED and reason(error) == "ABORTED"
            assert s.core.of(Cancel) == [] and s.core.worker.num_streams == 0
            error = await failing(s.inference.Abort(pb.AbortRequest()))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and violated_field(error) == "request_id"

    run(test)


def test_a_reader_that_stalls_frees_its_work_and_is_told_why() -> None:
    async def test() -> None:
        def bursts(_: Submit) -> list[tuple[list[int], int]]:
            return [([ord("a")] * 200, 0)] * 10_000

        options = ApiOptions(listen=ANYWHERE, max_buffered_bytes=100_000)
        # The transport's own window fills first; probing for how much it takes would widen it, to megabytes.
        small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)]
        async with scene(bursts, options=options, channel_args=small_window) as s:
            call = s.inference.Generate(HI)
            await call.read()
            await until(lambda: len(s.core.of(Cancel)) == 1)
            assert s.core.live == {}
            other = await s.generate(pb.GenerateRequest(text="hi", stop=pb.StopConditions(stop_strings=["aa"])))
            assert joined_text(other) == "", "others are served meanwhile"
            error = await failing(call)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and reason(error) == "SLOW_READER"
            assert s.core.worker.num_streams == 0

    run(test)


def test_an_oversized_message_is_refused_and_the_connection_lives() -> None:
    async def test() -> None:
        options = ApiOptions(listen=ANYWHERE, max_message_bytes=100_000)
        async with scene(say("ok"), options=options) as s:
            error = await failing(s.inference.Generate(pb.GenerateRequest(text="x" * 200_000)))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert joined_text(await s.generate(HI)) == "ok"

    run(test)


def test_tokenising_and_back() -> None:
    async def test() -> None:
        async with scene() as s:
            answer = await s.inference.Tokenize(pb.TokenizeRequest(text="hé"))
            assert list(answer.ids) == [BOS, *"hé".encode()] and len(answer.tokens) == 4
            plain = await s.inference.Tokenize(pb.TokenizeRequest(text="h", add_special_tokens=False))
            assert list(plain.ids) == [ord("h")]
            back = await s.inference.Detokenize(pb.DetokenizeRequest(ids=answer.ids))
            assert back.text == "hé"
            error = await failing(s.inference.Detokenize(pb.DetokenizeRequest(ids=[VOCAB])))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and violated_field(error) == "ids[0]"
            chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="hi")])
            applied = await s.inference.ApplyChatTemplate(pb.ApplyChatTemplateRequest(chat=chat))
            assert applied.text == "user:hi\nassistant:" and bytes(applied.ids) == applied.text.encode()
            for call in (
                s.inference.Tokenize(pb.TokenizeRequest(model="other")),
                s.inference.GetModelInfo(pb.GetModelInfoRequest(model="other")),
            ):
                assert (await failing(call)).code() is grpc.StatusCode.NOT_FOUND

    run(test)


def test_model_info() -> None:
    async def test() -> None:
        async with scene() as s:
            info = await s.inference.GetModelInfo(pb.GetModelInfoRequest(model="bytes"))
            assert (info.model, info.vocab_size, info.max_context, info.max_prompt_tokens) == (
                "bytes",
                VOCAB,
                1024,
                1000,
            )
            assert list(info.eos_token_ids) == [EOS] and info.bos_token_id == BOS and info.has_chat_template
            assert info.default_sampling.temperature == 1.0 and info.default_sampling.top_p == 1.0
            assert "raw_logits" in info.features and info.model_hash == "hash"

    run(test)


def test_the_trace_context_goes_in_and_comes_back() -> None:
    async def test() -> None:
        async with scene(say("ok")) as s:
            trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
            for flags, packed in (("01", bytes.fromhex(trace + span + "01")), ("00", b"")):
                parent = f"00-{trace}-{span}-{flags}"
                call = s.inference.Generate(HI, metadata=(("traceparent", parent),))
                async for _ in call:
                    pass
                submit = s.core.of(Submit)[-1]
                assert isinstance(submit, Submit) and submit.trace_context == packed
                assert dict(await call.trailing_metadata() or ())["traceparent"] == parent
            bad = s.inference.Generate(pb.GenerateRequest(), metadata=(("traceparent", f"00-{trace}-{span}-01"),))
            error = await failing(bad)
            assert ("traceparent", f"00-{trace}-{span}-01") in tuple(error.trailing_metadata() or ())
            assert reason(error) == "INVALID_INPUT"

    run(test)


def test_many_at_once_get_their_own_text() -> None:
    async def test() -> None:
        def script(request: Submit) -> list[tuple[list[int], int]]:
            return [([int(byte)], 0) for byte in request.prompt[1:]] + [([EOS], int(FinishReason.EOS))]

        async with scene(script) as s:
            texts = [f"text {i} " * (i % 5 + 1) for i in range(64)]
            answers = await asyncio.gather(*[s.generate(pb.GenerateRequest(text=text)) for text in texts])
            assert [joined_text(answer) for answer in answers] == texts
            assert s.core.worker.num_streams == 0

    run(test)
