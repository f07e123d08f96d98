"""stepwire.v1.Admin: for operators."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import fields
from typing import Final

from common.errors import StepwireError
from scheduler_svc.api.calls import Context, answered, on_done
from scheduler_svc.api.status import abort, only_stepwire_errors
from scheduler_svc.api.worker import ApiWorker
from scheduler_svc.messages import ExecutorStats, Stats, StepSeen, TenantStats
from stepwire.v1 import admin_pb2 as pb
from stepwire.v1 import admin_pb2_grpc

# A watcher's backlog must hold what comes in this time.
MAX_INTERVAL_MS: Final = 250


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """`drain_ms`: the deadline of a Drain that names none. `spans_dropped`: traced but lost here, beside the core's."""

    def __init__(self, worker: ApiWorker, drain_ms: int, spans_dropped: Callable[[], int] = lambda: 0) -> None:
        self._worker = worker
        self._drain_ms = drain_ms
        self._spans_dropped = spans_dropped

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        message = stats_message(await answered(context, self._worker.stats()))
        message.spans_dropped += self._spans_dropped()
        return message

    async def WatchSteps(self, request: pb.WatchStepsRequest, context: Context) -> AsyncIterator[pb.WatchStepsResponse]:
        watch = None
        try:
            with only_stepwire_errors():
                watch = opened = self._worker.open_watch()
                on_done(context, lambda: self._worker.close_watch(opened))
                interval_s = min(request.interval_ms, MAX_INTERVAL_MS) / 1000
                left = request.max_steps or sys.maxsize
                while left > 0:
                    steps = await opened.next(left if interval_s else 1)
                    left -= len(steps)
                    *earlier, last = map(_step_message, steps)
                    last.earlier.extend(earlier)
                    yield last
                    if interval_s and left > 0:
                        await asyncio.sleep(interval_s)  # what comes meanwhile goes with the next
        except StepwireError as error:
            await abort(context, error)
        finally:
            if watch is not None:
                self._worker.close_watch(watch)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        unfinished = await answered(context, self._worker.drain(request.deadline_ms or self._drain_ms))
        return pb.DrainResponse(unfinished=unfinished)

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: Context
    ) -> pb.ResetPrefixCacheResponse:
        answer = await answered(context, self._worker.reset_prefix_cache())
        return pb.ResetPrefixCacheResponse(dropped_blocks=answer.dropped, forgotten_blocks=answer.forgotten)


def _step_message(seen: tuple[int, StepSeen]) -> pb.WatchStepsResponse:
    skipped, step = seen
    values = {field.name: getattr(step, field.name) for field in fields(step)}
    return pb.WatchStepsResponse(skipped=skipped, **values)


def stats_message(stats: Stats) -> pb.GetStatsResponse:
    nested = ("executors", "tenants")
    values = {field.name: getattr(stats, field.name) for field in fields(stats) if field.name not in nested}
    return pb.GetStatsResponse(
        **values,
        executors=[_executor_message(executor) for executor in stats.executors],
        tenants=[_tenant_message(tenant) for tenant in stats.tenants],
    )


def _tenant_message(tenant: TenantStats) -> pb.TenantStats:
    return pb.TenantStats(**{field.name: getattr(tenant, field.name) for field in fields(tenant)})


def _executor_message(executor: ExecutorStats) -> pb.ExecutorStats:
    return pb.ExecutorStats(**{field.name: getattr(executor, field.name) for field in fields(executor)})
