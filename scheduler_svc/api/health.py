"""grpc.health.v1, with readiness and liveness apart.

`""`, `stepwire.v1.Inference` and `vllm.grpc.engine.VllmEngine` mean readiness: an executor is connected, nothing
drains, and steps finish while there is work. `stepwire.liveness` means that the core answers; only it may restart a
scheduler. (A stuck event loop answers no health check at all.)
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from common.errors import StepwireError
from scheduler_svc.api.calls import Context, on_done
from scheduler_svc.api.worker import ApiWorker
from scheduler_svc.messages import CoreState, Stats

READINESS: Final = ("", "stepwire.v1.Inference", "stepwire.v1.Admin", "vllm.grpc.engine.VllmEngine")
LIVENESS: Final = "stepwire.liveness"


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Check and Watch over statuses that HealthMonitor sets. Owned by the event loop."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = dict.fromkeys(READINESS, False) | {LIVENESS: True}
        self._watches: set[asyncio.Event] = set()

    def set(self, ready: bool, alive: bool) -> None:
        serving = dict.fromkeys(READINESS, ready) | {LIVENESS: alive}
        if serving != self._serving:
            self._serving = serving
            for changed in self._watches:
                changed.set()

    def is_serving(self, service: str) -> bool | None:
        """None: no such service."""
        return self._serving.get(service)

    async def Check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service named {request.service[:128]!r}")
        return pb.HealthCheckResponse(status=self._status(request.service))

    async def Watch(self, request: pb.HealthCheckRequest, context: Context) -> AsyncIterator[pb.HealthCheckResponse]:
        changed = asyncio.Event()
        self._watches.add(changed)
        on_done(context, lambda: self._watches.discard(changed))
        last = None
        while True:
            changed.clear()
            status = self._status(request.service)
            if status != last:
                last = status
                yield pb.HealthCheckResponse(status=status)
            await changed.wait()

    def _status(self, service: str) -> int:
        serving = self._serving.get(service)
        if serving is None:
            return int(pb.HealthCheckResponse.SERVICE_UNKNOWN)
        return int(pb.HealthCheckResponse.SERVING if serving else pb.HealthCheckResponse.NOT_SERVING)


class HealthMonitor:
    """Decides readiness and liveness from CoreStates and from GetStats asked every few seconds.

    Alive: `is_alive` says so and the core answered within the last `liveness_timeout_s`. Stalled: an executor is
    connected and requests wait or run, but no step finished for `stall_timeout_s`. Owned by the event loop.
    """

    def __init__(
        self,
        worker: ApiWorker,
        health: HealthServicer,
        liveness_timeout_s: float = 30.0,
        stall_timeout_s: float = 60.0,
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self._worker = worker
        self._health = health
        self._is_alive = is_alive
        self._liveness_timeout_ns = int(liveness_timeout_s * 1e9)
        self._stall_timeout_ns = int(stall_timeout_s * 1e9)
        now_ns = worker.clock.monotonic_ns()
        self._answered_ns = now_ns
        self._progress_ns = now_ns
        self._steps = -1
        self._stopping = False
        worker.on_state(self._on_state)
        self.refresh()

    def stop(self) -> None:
        """The server goes down: not ready from now on."""
        self._stopping = True
        self.refresh()

    async def probe(self) -> None:
        """Asks the core how it is; call it every few seconds."""
        try:
            stats = await self._worker.stats()
        except StepwireError:
            stats = None
        self.observe(stats)

    def observe(self, stats: Stats | None) -> None:
        """`stats` None: the core did not answer."""
        now_ns = self._worker.clock.monotonic_ns()
        if stats is not None:
            self._answered_ns = now_ns
            steps = sum(executor.steps for executor in stats.executors)
            connected = any(executor.connected for executor in stats.executors)
            if steps != self._steps or not connected or not (stats.waiting or stats.running):
                self._progress_ns = now_ns
                self._steps = steps
        self.refresh()

    def _on_state(self, state: CoreState) -> None:
        self.refresh()

    def refresh(self) -> None:
        """Decides again; time alone may have changed the answer."""
        now_ns = self._worker.clock.monotonic_ns()
        alive = now_ns - self._answered_ns < self._liveness_timeout_ns and self._is_alive()
        stalled = now_ns - self._progress_ns >= self._stall_timeout_ns
        state = self._worker.state
        ready = state.ready and not state.draining and alive and not stalled and not self._stopping
        self._health.set(ready, alive)
