"""A real engine loop against real executor streams, with a worker that only collects."""

import asyncio

from scheduler_svc.executor_client import StreamOptions
from scheduler_svc.messages import (
    Accepted,
    CorePort,
    CoreState,
    Ended,
    Extras,
    FinishReason,
    FromCore,
    Refused,
    TokenBatch,
)

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
