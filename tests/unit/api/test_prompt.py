"""From the caller's input to token ids: limits before work, long work off the loop."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from common.errors import InvalidInput, NotSupported, Overloaded, StepwireError, TooLarge
from scheduler_svc.api.prompt import INLINE_BYTES, PromptReader, TextWorkers
from scheduler_svc.api.validation import Limits
from stepwire.v1 import inference_pb2 as pb
from tests.unit.api.fakes import BOS, VOCAB, ByteTokenizer

LIMITS = Limits(VOCAB, 1024, 1000, frozenset(), True, 1 << 24)


def run(test: Callable[[TextWorkers], Coroutine[Any, Any, None]], workers: int = 1, max_pending: int = 2) -> None:
    async def limited() -> None:
        pool = TextWorkers(workers, max_pending)
        try:
            async with asyncio.timeout(10):
                await test(pool)
        finally:
            pool.close()

    asyncio.run(limited())


def read(request: pb.GenerateRequest, tokenizer: ByteTokenizer | None, max_bytes: int = 5000) -> list[int]:
    result: list[int] = []

    async def test(pool: TextWorkers) -> None:
        result.extend((await PromptReader(tokenizer, pool, max_bytes).read(request, LIMITS)).tolist())

    run(test)
    return result


def chat(*messages: tuple[str, str], **fields: Any) -> pb.GenerateRequest:
    turns = [pb.ChatMessage(role=role, content=content) for role, content in messages]
    return pb.GenerateRequest(chat=pb.ChatInput(messages=turns, **fields))


def ids(*values: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=values))


def test_each_kind_of_input() -> None:
    tokenizer = ByteTokenizer()
    assert read(pb.GenerateRequest(text="hi"), tokenizer) == [BOS, *b"hi"]
    assert read(chat(("user", "hi")), tokenizer) == list(b"user:hi\nassistant:"), "the template writes its own BOS"
    assert read(chat(("user", "hi"), add_generation_prompt=False), tokenizer) == list(b"user:hi\n")
    assert read(ids(0, 257), None) == [0, 257]


class NoTemplate(ByteTokenizer):
    has_chat_template = False


class Nothing(ByteTokenizer):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return []


BAD: list[tuple[pb.GenerateRequest, ByteTokenizer | None, type[StepwireError], str]] = [
    (pb.GenerateRequest(), ByteTokenizer(), InvalidInput, "input"),
    (pb.GenerateRequest(text=""), ByteTokenizer(), InvalidInput, "text"),
    (pb.GenerateRequest(text="x"), Nothing(), InvalidInput, "text"),
    (pb.GenerateRequest(text="x" * 5001), ByteTokenizer(), TooLarge, "text"),
    (pb.GenerateRequest(text="x" * 1000), ByteTokenizer(), TooLarge, "text"),
    (pb.GenerateRequest(text="x"), None, NotSupported, ""),
    (ids(), None, InvalidInput, "token_ids.ids"),
    (ids(1, 258), None, InvalidInput, "token_ids.ids[1]"),
    (ids(4_294_967_295), None, InvalidInput, "token_ids.ids[0]"),
    (ids(*[1] * 1001), None, TooLarge, "token_ids.ids"),
    (chat(), ByteTokenizer(), InvalidInput, "chat.messages"),
    (chat(("", "hi")), ByteTokenizer(), InvalidInput, "chat.messages[0].role"),
    (chat(("user", "x" * 5001)), ByteTokenizer(), TooLarge, "chat.messages[0].content"),
    (chat(("user", "x" * 3000), ("user", "x" * 3000)), ByteTokenizer(), TooLarge, "chat.messages"),
    (chat(*[("user", "")] * 4097), ByteTokenizer(), TooLarge, "chat.messages"),
    (chat(("user", "hi"), template="x" * 65537), ByteTokenizer(), TooLarge, "chat.template"),
    (chat(("user", "hi"), template="{{ messages }}"), ByteTokenizer(), NotSupported, "chat.template"),
    (chat(("x" * 5001, "hi")), ByteTokenizer(), TooLarge, "chat.messages[0].role"),
    (chat(("user", "hi")), NoTemplate(), NotSupported, "chat.template"),
    (chat(("user", "hi")), None, NotSupported, ""),
]


@pytest.mark.parametrize(("request_", "tokenizer", "kind", "field"), BAD)
def test_bad_prompts(
    request_: pb.GenerateRequest, tokenizer: ByteTokenizer | None, kind: type[StepwireError], field: str
) -> None:
    with pytest.raises(kind) as caught:
        read(request_, tokenizer)
    assert caught.value.field == field


def test_long_text_is_tokenised_off_the_loop_and_short_text_on_it() -> None:
    class Telling(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            threads.append(threading.current_thread())
            return super().encode(text, add_special_tokens)

    threads: list[threading.Thread] = []
    read(pb.GenerateRequest(text="short"), Telling())
    assert threads[-1] is threading.main_thread()
    with pytest.raises(TooLarge):
        read(pb.GenerateRequest(text="x" * (INLINE_BYTES + 1)), Telling())
    assert threads[-1] is not threading.main_thread()


def test_waiting_texts_are_bounded_and_counted_until_their_thread_is_done() -> None:
    async def test(pool: TextWorkers) -> None:
        gate = threading.Event()
        waiting = [asyncio.ensure_future(pool.run(gate.wait, INLINE_BYTES + 1)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await pool.run(gate.wait, INLINE_BYTES + 1)
        waiting[0].cancel()  # its thread works on
        await asyncio.wait([waiting[0]])
        with pytest.raises(Overloaded):
            await pool.run(gate.wait, INLINE_BYTES + 1)
        assert await pool.run(lambda: 7, 10) == 7, "short work never waits"
        gate.set()
        assert await waiting[1]
        while True:  # the counting down arrives on the loop; the test's deadline bounds the wait
            try:
                assert await pool.run(lambda: 8, INLINE_BYTES + 1) == 8
                break
            except Overloaded:
                await asyncio.sleep(0)

    run(test)


def test_an_error_of_the_tokenizer_reaches_the_caller_from_the_thread() -> None:
    def fail() -> None:
        raise InvalidInput("not text", field="text")

    async def test(pool: TextWorkers) -> None:
        with pytest.raises(InvalidInput):
            await pool.run(fail, INLINE_BYTES + 1)

    run(test)
