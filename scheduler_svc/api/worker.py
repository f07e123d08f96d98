"""The api worker: everything the servicers know of the core, and the fan-out of what the core's steps bring."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from common.clock import Clock
from common.errors import DeadlinePassed, Unavailable
from scheduler_svc.api.pacer import Pacer
from scheduler_svc.api.stream import Bell, RequestStream
from scheduler_svc.messages import (
    WORKER_SHIFT,
    Abort,
    AbortAnswer,
    Accepted,
    Cancel,
    CorePort,
    CoreState,
    Drain,
    DrainAnswer,
    Ended,
    Extras,
    Finish,
    FinishReason,
    FromCore,
    GetStats,
    Refused,
    ResetAnswer,
    ResetPrefixCache,
    Stats,
    StatsAnswer,
    StepSeen,
    Submit,
    TokenBatch,
    WatchSteps,
)
from scheduler_svc.token_stream import TOKEN_BYTES, TOP_BYTES, Action, TokenStream

MAX_WATCH_BACKLOG: Final = 1024
MAX_UNREAD_BYTES: Final = 256 * 1024 * 1024

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer", bool, int, Stats, ResetAnswer)


class StepWatch:
    """One WatchSteps reader: the steps it has not taken yet; those it was too slow for are counted."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, StepSeen]] = deque()
        self._skipped = 0
        self._arrived = asyncio.Event()

    async def next(self, limit: int) -> list[tuple[int, StepSeen]]:
        """What came since the last call, at least one and at most `limit`: (steps lost just before it, step)."""
        while not self._steps:
            self._arrived.clear()
            await self._arrived.wait()
        return [self._steps.popleft() for _ in range(min(limit, len(self._steps)))]

    def put(self, step: StepSeen) -> None:
        if len(self._steps) >= MAX_WATCH_BACKLOG:
            self._skipped += 1
            return
        self._steps.append((self._skipped, step))
        self._skipped = 0
        self._arrived.set()


class ApiWorker:
    """Implements WorkerPort. All methods run on one event loop, `deliver` too.

    Answers of the core are waited for `answer_timeout_s`, then the call gets Unavailable. `max_unread_bytes`: of the
    results all streams leave unread; over it those that leave the most end as slow readers. `pacer`: decides when
    tokens wait for the next ones, because the process can not write a message for each.
    """

    def __init__(
        self,
        clock: Clock,
        worker_id: int = 0,
        answer_timeout_s: float = 10.0,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
        pacer: Pacer | None = None,
    ) -> None:
        self._clock = clock
        self._worker_id = worker_id
        self._answer_timeout_s = answer_timeout_s
        self._max_unread_bytes = max_unread_bytes
        self._pacer = pacer or Pacer(0)
        self._held: dict[int, RequestStream] = {}  # not told yet what was fed to them
        self._fed_bytes = 0  # since unread results were last added up
        self._core: CorePort | None = None
        self._next_key = worker_id << WORKER_SHIFT
        self._next_call = 0
        self._streams: dict[int, RequestStream] = {}
        self._calls: dict[int, asyncio.Future[bool | int | Stats | ResetAnswer]] = {}
        self._watches: list[StepWatch] = []
        self._state_listeners: list[Callable[[CoreState], None]] = []
        self.state = CoreState(ready=False, draining=False, info=None)

    @property
    def worker_id(self) -> int:
        return self._worker_id

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def num_streams(self) -> int:
        """Requests some call still holds."""
        return len(self._streams)

    def connect(self, core: CorePort) -> None:
        """Gives the worker its way to the core; before the first call."""
        self._core = core

    def on_state(self, listener: Callable[[CoreState], None]) -> None:
        """`listener` is called on each CoreState from now on."""
        self._state_listeners.append(listener)

    # ------------------------------------------------------------------------------------------------ requests

    def next_key(self) -> int:
        """A key never used before, for a Submit."""
        self._next_key += 1
        return self._next_key

    def open(self, request: Submit, states: Sequence[TokenStream]) -> list[RequestStream]:
        """Sends the request without waiting for the core's answer. Raises Overloaded when the core is too far behind.

        `states`: one for each choice, as the streams returned, each of which must come to `close`, whatever happens.
        """
        self._port.send(request)
        bell = Bell()
        pairs = zip(request.keys, states, strict=True)
        streams = [RequestStream(key, state, request.deadline_ns, bell) for key, state in pairs]
        self._streams.update((stream.key, stream) for stream in streams)
        return streams

    async def wait_accepted(self, streams: Sequence[RequestStream]) -> None:
        """Returns when the core accepted what `open` sent. Raises the error it refused with."""
        first = streams[0]  # the answer is for all
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                await first.wait_accepted()
        except TimeoutError:
            raise Unavailable("the scheduler's core does not answer") from None
        finally:
            if first.core_done and not first.accepted:  # refused: there is nothing to cancel
                for stream in streams:
                    stream.core_done = True

    def close(self, stream: RequestStream) -> None:
        """Ends the work if it is not over. Idempotent; every opened stream must come here."""
        if self._streams.pop(stream.key, None) is not None:
            self._cancel(stream)

    def _cancel(self, stream: RequestStream) -> None:
        if not stream.core_done:
            stream.core_done = True
            self._port.send(Cancel(stream.key))

    # ------------------------------------------------------------------------------------------------ calls

    async def abort(self, request_id: str) -> bool:
        """Whether a live request had this id. Idempotent."""
        return await self._call(lambda call: Abort(call, self._worker_id, request_id), bool)

    async def stats(self, timeout_s: float | None = None) -> Stats:
        return await self._call(lambda call: GetStats(call, self._worker_id), Stats, timeout_s)

    async def reset_prefix_cache(self) -> ResetAnswer:
        return await self._call(lambda call: ResetPrefixCache(call, self._worker_id), ResetAnswer)

    async def drain(self, deadline_ms: int) -> int:
        """Returns, when all is drained, how many requests the deadline ended."""
        timeout_s = deadline_ms / 1000 + self._answer_timeout_s
        return await self._call(lambda call: Drain(call, self._worker_id, deadline_ms), int, timeout_s)

    async def _call(
        self,
        message: Callable[[int], Abort | GetStats | Drain | ResetPrefixCache],
        kind: type[Answer],
        timeout_s: float | None = None,
    ) -> Answer:
        self._next_call += 1
        call = self._next_call
        future: asyncio.Future[bool | int | Stats | ResetAnswer] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        try:
            self._port.send(message(call))
            async with asyncio.timeout(self._answer_timeout_s if timeout_s is None else timeout_s):
                answer = await future
        except TimeoutError:
            raise Unavailable("the scheduler's core does not answer") from None
        finally:
            del self._calls[call]
        assert isinstance(answer, kind)
        return answer

    def open_watch(self) -> StepWatch:
        """Each finished step from now on, until `close_watch`."""
        if not self._watches:
            self._port.send(WatchSteps(self._worker_id, True))
        watch = StepWatch()
        self._watches.append(watch)
        return watch

    def close_watch(self, watch: StepWatch) -> None:
        """Idempotent. The core stops telling steps when nobody watches."""
        if watch in self._watches:
            self._watches.remove(watch)
            if not self._watches:
                self._port.send(WatchSteps(self._worker_id, False))

    # ------------------------------------------------------------------------------------------------ from the core

    def core_lost(self) -> None:
        """The core's process is gone: every stream and call ends with Unavailable."""
        self.deliver(replace(self.state, ready=False))
        gone = Unavailable("the scheduler's core is gone", retry_after_ms=1000)
        for stream in self._streams.values():
            stream.core_done = True
            stream.fail(gone)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(gone)

    def deliver(self, message: FromCore) -> None:
        """See WorkerPort. Cost of a TokenBatch: one clock reading and a few list operations per entry."""
        match message:
            case TokenBatch():
                self._deliver_tokens(message)
            case Accepted():
                if (stream := self._streams.get(message.key)) is not None:
                    stream.accepted = True
                    stream.wake()
            case Refused() | Ended():
                if (stream := self._streams.get(message.key)) is not None:
                    stream.core_done = True
                    stream.fail(message.error)
            case AbortAnswer():
                self._answer(message.call, message.found)
            case DrainAnswer():
                self._answer(message.call, message.unfinished)
            case ResetAnswer():
                self._answer(message.call, message)
            case StatsAnswer():
                self._answer(message.call, message.stats)
            case StepSeen():
                self._deliver_step(message)
            case CoreState():
                self.state = message
                for listener in self._state_listeners:
                    listener(message)

    def check_streams(self) -> None:
        """Ends streams nobody reads, also those whose generation is over, and those whose deadline passed. Called every
        second or so. (A caller's deadline also cancels its call, at once, but only while its connection is alive.)"""
        now_ns = self._clock.monotonic_ns()
        for stream in self._streams.values():
            if stream.state.check_reader(now_ns):
                self._cancel(stream)
                stream.wake()
            elif stream.deadline_ns and now_ns >= stream.deadline_ns and not stream.state.ended:
                self._cancel(stream)
                stream.fail(DeadlinePassed("the request's deadline passed"))
        self._bound_unread(now_ns + 1)

    def _bound_unread(self, before_ns: int) -> None:
        """Adds up what lies unread: every second or so, and whenever another eighth of the limit has come in. Who left
        nothing unread from `before_ns` is not slow, however much one step brings."""
        self._fed_bytes = 0
        streams = list(self._streams.values())
        over = sum(stream.state.buffered_bytes for stream in streams) - self._max_unread_bytes
        if over <= 0:
            return
        streams = [stream for stream in streams if stream.state.is_unread_since(before_ns)]
        streams.sort(key=lambda stream: stream.state.buffered_bytes)
        while over > 0 and streams:
            stream = streams.pop()
            over -= stream.state.buffered_bytes
            stream.state.crowd_out(self._max_unread_bytes)
            self._cancel(stream)
            stream.wake()

    def _deliver_tokens(self, batch: TokenBatch) -> None:
        now_ns = self._clock.monotonic_ns()
        held = self._pacer.on_step(now_ns, len(batch.keys))
        num_woken = len(batch.keys)
        tokens = batch.tokens.tolist()
        end = 0
        streams, extras = self._streams, batch.extras
        columns = zip(
            batch.keys.tolist(), batch.counts.tolist(), batch.reasons.tolist(), batch.cached.tolist(), strict=True
        )
        for index, (key, count, reason, cached) in enumerate(columns):
            start, end = end, end + count
            stream = streams.get(key)
            if stream is None:
                continue
            if count == 1 and not (reason or extras or held) and stream.offer(tokens[start], now_ns):
                continue
            if reason:
                stream.core_done = True
            action = stream.state.feed(tokens[start:end], reason, cached, extras.get(index), now_ns)
            if action is Action.CANCEL:
                self._cancel(stream)
            elif action is Action.FINISH:
                stream.core_done = True
                self._port.send(Finish(key, stream.state.num_tokens, FinishReason.STOP_STRING))
            if held and action is Action.NONE and not reason and stream.state.num_tokens > count:
                num_woken -= 1
                self._hold(stream)
            else:  # a first token or an end never waits
                stream.wake()
        # The readers woken above have their turns before this.
        asyncio.get_running_loop().call_soon(self._written, now_ns, num_woken)
        self._fed_bytes += len(tokens) * TOKEN_BYTES + sum(map(_extra_bytes, batch.extras.values()))
        if self._fed_bytes > self._max_unread_bytes // 8:
            self._bound_unread(now_ns)

    def _written(self, started_ns: int, num_messages: int) -> None:
        self._pacer.on_written(self._clock.monotonic_ns() - started_ns, num_messages)

    def _hold(self, stream: RequestStream) -> None:
        if not self._held:
            asyncio.get_running_loop().call_later(self._pacer.interval_ns / 1e9, self._release_held)
        self._held[stream.key] = stream

    def _release_held(self) -> None:
        now_ns, streams = self._clock.monotonic_ns(), self._held
        self._held = {}
        for stream in streams.values():
            stream.wake()
        asyncio.get_running_loop().call_soon(self._written, now_ns, len(streams))

    def _deliver_step(self, step: StepSeen) -> None:
        for watch in self._watches:
            watch.put(step)

    def _answer(self, call: int, answer: bool | int | Stats | ResetAnswer) -> None:
        future = self._calls.get(call)
        if future is not None and not future.done():
            future.set_result(answer)

    @property
    def _port(self) -> CorePort:
        assert self._core is not None, "connect() comes first"
        return self._core


def _extra_bytes(extras: Extras) -> int:
    logprobs = sum(1 + len(top.ids) for top in extras.logprobs) * TOP_BYTES
    return logprobs + sum(len(output.data) for output in extras.outputs)
