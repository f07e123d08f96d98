"""An api worker, a core that does what the test says, and a clock turned by hand."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from common.clock import ManualClock
from common.messages import Sampling, u32
from scheduler_svc.api.stream import RequestStream
from scheduler_svc.api.worker import ApiWorker
from scheduler_svc.messages import Submit
from scheduler_svc.text_cursor import TextCursor
from scheduler_svc.token_stream import StreamLimits, StreamWants, TokenStream
from tests.unit.api.fakes import ByteDecoder, FakeCore

PROMPT = u32([1, 2, 3])
LIMITS = StreamLimits(slow_reader_ns=10_000_000_000)
MAX_UNREAD_BYTES = 8 * 4000


def run(test: Callable[[ApiWorker, FakeCore, ManualClock], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        clock = ManualClock()
        worker = ApiWorker(clock, worker_id=3, answer_timeout_s=0.05, max_unread_bytes=MAX_UNREAD_BYTES)
        async with asyncio.timeout(10):
            await test(worker, FakeCore(worker), clock)

    asyncio.run(limited())


def opened(
    worker: ApiWorker, request_id: str = "r", stops: tuple[str, ...] = (), deadline_ns: int = 0
) -> RequestStream:
    sampling = Sampling(seed=1, max_tokens=0)
    submit = Submit(worker.next_key(), request_id, PROMPT, sampling, 0, deadline_ns=deadline_ns)
    state = TokenStream(StreamWants(PROMPT, TextCursor(ByteDecoder(), stops), 258), LIMITS)
    (stream,) = worker.open(submit, [state])
    return stream
