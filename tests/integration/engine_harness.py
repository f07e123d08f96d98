"""A real engine loop against real executor streams, with a worker that only collects."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from common.clock import Clock, SystemClock
from common.messages import Sampling, u32
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine_loop import EngineLoop, EngineOptions
from scheduler_svc.executor_client import StreamOptions
from scheduler_svc.executor_driver import DriverOptions
from scheduler_svc.messages import (
    Accepted,
    CorePort,
    CoreState,
    Ended,
    Extras,
    FinishReason,
    FromCore,
    Refused,
    Submit,
    TokenBatch,
)
from scheduler_svc.observer import StepObserver
from tests.fakes.toy_tokens import expected_tokens

QUICK_STREAM = StreamOptions(welcome_wait_s=10.0, ping_interval_s=0.05, max_missed_pongs=40)


class CollectingWorker:
    """A WorkerPort; `tokens`, `reasons`, `errors` by key."""

    worker_id = 0

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.errors: dict[int, Exception] = {}
        self.extras: dict[int, list[Extras]] = {}
        self.accepted: set[int] = set()
        self.states: list[CoreState] = []
        self.other: list[FromCore] = []
        self._port: CorePort | None = None
        self._changed = asyncio.Event()

    @property
    def port(self) -> CorePort:
        assert self._port is not None
        return self._port

    def connect(self, port: CorePort) -> None:
        self._port = port

    def deliver(self, message: FromCore) -> None:
        match message:
            case TokenBatch():
                self._take_batch(message)
            case Accepted(key):
                self.accepted.add(key)
            case Refused(key, error) | Ended(key, error):
                assert key not in self.reasons and key not in self.errors, "two ends"
                self.errors[key] = error
            case CoreState():
                self.states.append(message)
            case _:
                self.other.append(message)
        self._changed.set()

    def _take_batch(self, batch: TokenBatch) -> None:
        tokens, start = batch.tokens.tolist(), 0
        for i, (key, count, reason) in enumerate(
            zip(batch.keys.tolist(), batch.counts.tolist(), batch.reasons.tolist(), strict=True)
        ):
            assert key not in self.reasons and key not in self.errors, "tokens after the end"
            self.tokens.setdefault(key, []).extend(tokens[start : start + count])
            start += count
            if i in batch.extras:
                self.extras.setdefault(key, []).append(batch.extras[i])
            if reason:
                self.reasons[key] = FinishReason(reason)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Event-driven; the test's own deadline bounds it."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def has_tokens(self, key: int, count: int) -> Callable[[], bool]:
        return lambda: len(self.tokens.get(key, ())) >= count

    def any_has_tokens(self, count: int) -> Callable[[], bool]:
        return lambda: any(len(tokens) >= count for tokens in self.tokens.values())

    async def ready(self) -> None:
        await self.until(lambda: self.states[-1].ready)

    async def done(self, keys: Sequence[int]) -> None:
        await self.until(lambda: all(key in self.reasons or key in self.errors for key in keys))

    def submit(self, key: int, prompt: Sequence[int], sampling: Sampling, *, raw_logits: bool = False) -> None:
        self.port.send(
            Submit(
                key=key,
                request_id=f"request-{key}",
                prompt=u32(prompt),
                sampling=sampling,
                arrival_ns=0,
                raw_logits=raw_logits,
            )
        )


@asynccontextmanager
async def engine(
    *addresses: str,
    depth: int = 2,
    scheduler_id: bytes = b"s" * 16,
    core: Scheduler | None = None,
    clock: Clock | None = None,
    observer: StepObserver | None = None,
    stream: StreamOptions = QUICK_STREAM,
    expected_model_hash: str = "",
) -> AsyncIterator[tuple[EngineLoop, CollectingWorker]]:
    driver = DriverOptions(scheduler_id, depth, stream, first_backoff_s=0.02, max_backoff_s=0.1)
    loop = EngineLoop(
        core or Scheduler(CoreConfig(pipeline_depth=depth)),
        EngineOptions(addresses, driver, expected_model_hash),
        clock or SystemClock(),
        observer,
    )
    worker = CollectingWorker()
    worker.connect(loop.add_worker(worker))
    loop.start()
    try:
        yield loop, worker
    finally:
        await loop.stop()
        assert not loop.failed.done(), loop.failed.result()


def prompts(count: int, length: int = 12) -> list[list[int]]:
    return [[3 + (7 * i + 13 * j) % 990 for j in range(length + i % 5)] for i in range(count)]


def seeded(seed: int, max_tokens: int = 24) -> Sampling:
    return Sampling(seed=seed, max_tokens=max_tokens, temperature=1.0)


def oracle(prompt: Sequence[int], sampling: Sampling, count: int = 0) -> list[int]:
    """What the toy executor generates when nothing disturbs it."""
    wanted = replace(sampling, max_tokens=count) if count else sampling
    return expected_tokens(prompt, wanted, vocab_size=1000, eos_ids=(2,))


def assert_oracle(worker: CollectingWorker, count: int) -> None:
    for key, prompt in enumerate(prompts(count), 1):
        assert worker.errors.get(key) is None
        assert worker.tokens[key] == oracle(prompt, seeded(key)), key
        assert worker.reasons[key] is FinishReason.MAX_TOKENS


def submit_all(worker: CollectingWorker, count: int) -> list[int]:
    for key, prompt in enumerate(prompts(count), 1):
        worker.submit(key, prompt, seeded(key))
    return list(range(1, count + 1))


def submit_message(key: int, prompt: list[int]) -> Submit:
    return Submit(key=key, request_id=f"request-{key}", prompt=u32(prompt), sampling=seeded(key), arrival_ns=0)
