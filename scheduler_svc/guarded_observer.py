"""A watcher that breaks must not take the engine with it: it is told so in the log, once, and watches no more."""

import logging

from common.messages import StepResult
from scheduler_svc.messages import FinishReason, Submit
from scheduler_svc.observer import NoObserver, StepObserver, StepRecord

log = logging.getLogger(__name__)


class GuardedObserver:
    """A StepObserver around another; its methods never raise. Loop thread."""

    def __init__(self, inner: StepObserver) -> None:
        self._inner = inner

    def _give_up(self) -> None:
        log.exception("watching steps failed; steps and requests are not traced any more")
        self._inner = NoObserver()

    def on_submit(self, request: Submit, now_ns: int) -> None:
        try:
            self._inner.on_submit(request, now_ns)
        except Exception:  # noqa: BLE001 - see the module
            self._give_up()

    def trace_context(self, executor_id: int, now_ns: int) -> bytes:
        try:
            return self._inner.trace_context(executor_id, now_ns)
        except Exception:  # noqa: BLE001 - see the module
            self._give_up()
            return b""

    def on_plan(self, record: StepRecord, schedule_start_ns: int, sent_ns: int) -> None:
        try:
            self._inner.on_plan(record, schedule_start_ns, sent_ns)
        except Exception:  # noqa: BLE001 - see the module
            self._give_up()

    def on_result(
        self, record: StepRecord, result: StepResult, received_ns: int, updated_ns: int, clock_offset_ns: int
    ) -> None:
        try:
            self._inner.on_result(record, result, received_ns, updated_ns, clock_offset_ns)
        except Exception:  # noqa: BLE001 - see the module
            self._give_up()

    def on_tokens(self, key: int, count: int, now_ns: int) -> None:
        try:
            self._inner.on_tokens(key, count, now_ns)
        except Exception:  # noqa: BLE001 - see the module
            self._give_up()

    def on_end(self, key: int, reason: FinishReason | None, error: str, now_ns: int) -> None:
        try:
            self._inner.on_end(key, reason, error, now_ns)
        except Exception:  # noqa: BLE001 - see the module
            self._give_up()

    def on_executor(self, executor_id: int, event: str, detail: str, now_ns: int) -> None:
        try:
            self._inner.on_executor(executor_id, event, detail, now_ns)
        except Exception:  # noqa: BLE001 - see the module
            self._give_up()
