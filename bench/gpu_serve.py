"""One model under load through the public API: the table, depths, idle gaps, and the executor alone beside it."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

import grpc
import numpy as np
from numpy.typing import NDArray

from bench.gpu_executor import Replay
from bench.gpu_load import Clients, Load, Outcome, percentiles
from bench.gpu_services import Executor, Scheduler, Setup, device_memory, executor, scheduler
from bench.gpu_shapes import GOALS, IDLE_GOAL_US, SPLIT_GOAL_PERCENT

# Edges of the histogram of idle gaps, µs.
EDGES: Final = (2, 5, 10, 20, 50, 100, 200, 500, 1000)

Row = dict[str, Any]
Emit = Callable[[Row], None]


@dataclass(frozen=True)
class Plan:
    """What is measured of one model. `repeats`: of each workload, the median counts; times are limits, seconds.

    depth: the pipeline's in the table; depths: compared by the workloads of `compared`; `watched`: those whose steps
    are looked at; `alone`: those that the executor replays without a scheduler.
    """

    shape: str
    vocab: int
    workloads: dict[str, Load]
    repeats: dict[str, int]
    depth: int = 2
    depths: tuple[int, ...] = (1, 2, 4)
    compared: tuple[str, ...] = ("G1", "G2")
    compared_repeats: int = 2
    watched: tuple[str, ...] = ("G2", "G3")
    alone: tuple[str, ...] = ("G1", "G2", "G3")
    alone_repeats: int = 3
    clients: int = 4
    start_s: float = 90.0
    load_s: float = 60.0


def run(setup: Setup, plan: Plan, emit: Emit) -> None:
    """Emits a row for each thing measured, as soon as it is."""
    replays = [
        Replay(name, plan.workloads[name], plan.depth, setup.max_prefill_chunk, plan.alone_repeats)
        for name in plan.alone
    ]
    with Clients(plan.clients) as clients, executor(setup, replays, plan.start_s) as served:
        emit({"what": "start-up", "model": plan.shape, "seconds": served.startup(), "log": served.facts()})
        emit({"what": "memory", "model": plan.shape, "device": device_memory()})
        for row in served.alone:
            emit({"what": "alone", "model": plan.shape, **row})
        for depth in sorted(plan.depths, key=lambda depth: depth != plan.depth):
            with scheduler(setup, served, depth, plan.start_s) as beside:
                service = _Service(beside, served, clients, plan)
                service.warm_up()
                if depth == plan.depth:
                    _table(service, plan, {row["workload"]: row for row in served.alone}, emit)
                else:
                    _compare(service, plan, depth, emit)


@dataclass(frozen=True)
class _Service:
    """The two services, and who loads them."""

    scheduler: Scheduler
    executor: Executor
    clients: Clients
    plan: Plan

    def load(self, load: Load) -> Outcome:
        return self.clients.run(self.scheduler.targets, load, vocab=self.plan.vocab, limit_s=self.plan.load_s)

    def measure(self, name: str, repeats: int) -> tuple[Outcome, Row]:
        """The run in the middle; the walls of all, and the CPU that a token of them cost."""
        load = self.plan.workloads[name]
        before = self.scheduler.spent(self.executor)
        runs = [self.load(load) for _ in range(repeats)]
        after, count = self.scheduler.spent(self.executor), repeats * load.requests * load.output
        cost = {who: round((after[who] - before[who]) / count * 1e6, 2) for who in before}
        middle = sorted(runs, key=lambda run: run.wall_s)[(len(runs) - 1) // 2]
        return middle, {"runs": [run.wall_s for run in runs], "cpu_us_per_token": cost}

    def warm_up(self) -> None:
        """A few prompts of each length, and a few tokens."""
        for load in self.plan.workloads.values():
            few = min(load.at_once, 16)
            self.load(Load(few, few, load.prompt, 4))


def _table(service: _Service, plan: Plan, alone: dict[str, Row], emit: Emit) -> None:
    for name in plan.workloads:
        outcome, more = service.measure(name, plan.repeats.get(name, 3))
        row = {"what": "table", "model": plan.shape, "workload": name, "pipeline_depth": plan.depth, **more}
        emit(row | asdict(outcome) | held_against(plan.shape, name, outcome, alone.get(name)))
    for name in plan.watched:
        seen = watch(service.scheduler.targets[0], lambda name=name: service.load(plan.workloads[name]))  # type: ignore[misc]
        row = {"what": "steps", "model": plan.shape, "workload": name, "pipeline_depth": plan.depth, **gaps(seen)}
        emit(row | service.scheduler.told())


def _compare(service: _Service, plan: Plan, depth: int, emit: Emit) -> None:
    for name in plan.compared:
        outcome, more = service.measure(name, plan.compared_repeats)
        row = {"what": "depth", "model": plan.shape, "workload": name, "pipeline_depth": depth, **more}
        emit(row | asdict(outcome))


def held_against(shape: str, name: str, outcome: Outcome, alone: Row | None) -> Row:
    """Value, ratios to what the goals name, and what the split costs: the executor's own pace without any of it."""
    row: Row = {}
    goal = GOALS.get((shape, name))
    if goal is not None:
        value = outcome.output_tokens_per_s if goal.rising else outcome.ms_per_token

        def better(other: float) -> float:
            return value / other if goal.rising else other / value

        row = {
            "value": value, "unit": goal.unit, "vllm": goal.vllm, "floor": goal.floor, "goal": goal.goal,
            "of_vllm": round(better(goal.vllm), 3), "of_floor": round(better(goal.floor), 3),
            "reached": better(goal.goal) >= 1.0,
        }  # fmt: skip
    if alone is not None:
        lost = 1.0 - outcome.output_tokens_per_s / alone["output_tokens_per_s"]
        row |= {"alone_tokens_per_s": alone["output_tokens_per_s"], "split_cost_percent": round(100 * lost, 2)}
        row["split_reached"] = row["split_cost_percent"] <= SPLIT_GOAL_PERCENT
    return row


def watch(target: str, work: Callable[[], object]) -> list[Any]:
    """The steps that the service tells of while `work` runs."""
    from stepwire.v1 import admin_pb2, admin_pb2_grpc

    seen: list[Any] = []
    with grpc.insecure_channel(target) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        call = stub.WatchSteps(admin_pb2.WatchStepsRequest(interval_ms=50))

        def read() -> None:
            try:
                for message in call:
                    seen.extend((*message.earlier, message))
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.CANCELLED:
                    raise

        reader = threading.Thread(target=read)
        reader.start()
        try:
            work()
        finally:
            threading.Event().wait(0.2)  # the last ones are on their way
            call.cancel()
            reader.join()
    return seen


def gaps(seen: Sequence[Any]) -> Row:
    """Of steps that only decode, after one that did too: device idle before, and device time."""
    steady = [
        (step.device_idle_ns / 1e3, step.device_ns / 1e3)
        for before, step in pairwise(seen)
        if step.step_id == before.step_id + 1 and step.epoch == before.epoch and not step.skipped
        and step.decode_tokens and not step.prefill_tokens and not before.prefill_tokens and before.decode_tokens
    ]  # fmt: skip
    idle: NDArray[np.float64] = np.array([value for value, _ in steady])
    device: NDArray[np.float64] = np.array([value for _, value in steady])
    counts = np.bincount(np.searchsorted(EDGES, idle), minlength=len(EDGES) + 1)
    names = [*(f"<={edge}" for edge in EDGES), f">{EDGES[-1]}"]
    idle_us = percentiles(idle)
    return {
        "steps": len(seen),
        "steady_steps": len(steady),
        "idle_us": idle_us,
        "reached": all(idle_us[name] <= most for name, most in IDLE_GOAL_US.items()) if idle_us else None,
        "device_us": percentiles(device),
        "idle_share": round(float(idle.sum() / (idle.sum() + device.sum())), 4) if len(idle) else None,
        "histogram_us": dict(zip(names, counts.tolist(), strict=True)),
        "graph_steps": sum(step.bucket > 0 for step in seen),
        "lost": sum(step.skipped for step in seen),
    }
