"""Plan N + 1 is on the wire before result N, and that hides the round trip. Time is turned by hand."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from common.messages import (
    ExecutorInfo,
    Hello,
    StepPlan,
    StepResult,
)
from executor_svc.step_executor import PendingStep
from tests.fakes.toy_executor import ToyExecutor
from tests.integration.engine_harness import engine, oracle, seeded
from tests.integration.protocol_harness import run, serving, until


class Delaying:
    """A StepExecutor whose every result comes 20 ms of manual time after its plan (`serial`: or after the result before
    it, if that is later, as on a busy device); the test turns the clock."""

    DELAY_NS = 20_000_000

    def __init__(self, serial: bool) -> None:
        self._serial = serial
        self._toy = ToyExecutor()
        self._turn = threading.Condition()
        self.now_ns = 0
        self._delaying = True
        self.busy_ns = 0  # until the last token
        self.due_ns: list[int] = []  # of the result of each plan launched
        self.log: list[tuple[str, int]] = []

    @property
    def info(self) -> ExecutorInfo:
        return self._toy.info

    @property
    def incarnation(self) -> int:
        return self._toy.incarnation

    def begin_epoch(self, hello: Hello) -> bool:
        return self._toy.begin_epoch(hello)

    def execute(self, plan: StepPlan, received_ns: int) -> PendingStep:
        pending = self._toy.execute(plan, received_ns)
        with self._turn:
            begin_ns = max(self.now_ns, self.due_ns[-1]) if self._serial and self.due_ns else self.now_ns
            self.due_ns.append(begin_ns + self.DELAY_NS)
            self.log.append(("plan", plan.step_id))
            return DelayedStep(self, pending, plan.step_id, self.due_ns[-1])

    def close(self) -> None:
        self._toy.close()

    def wait_until(self, due_ns: int, step_id: int) -> None:
        with self._turn:
            assert self._turn.wait_for(lambda: self.now_ns >= due_ns or not self._delaying, 20)
            self.log.append(("result", step_id))

    def has_launched(self, count: int) -> Callable[[], bool]:
        return lambda: len(self.due_ns) >= count

    def stop_delaying(self) -> None:
        with self._turn:
            self._delaying = False
            self._turn.notify_all()

    def turn_to(self, now_ns: int) -> None:
        with self._turn:
            self.now_ns = now_ns
            self._turn.notify_all()


@dataclass(frozen=True)
class DelayedStep:
    device: Delaying
    pending: PendingStep
    step_id: int
    due_ns: int

    def wait(self) -> StepResult:
        self.device.wait_until(self.due_ns, self.step_id)
        return self.pending.wait()


def run_delayed(depth: int, num_steps: int, *, serial: bool) -> Delaying:
    """One sequence of `num_steps` steps. Time moves only when all that can happen at the present moment has happened:
    the pipeline is full, or no more steps are wanted."""
    device = Delaying(serial)

    async def main() -> None:
        async with serving(device) as served, engine(served.address, depth=depth) as (_, worker):
            await worker.ready()
            worker.submit(1, [5, 6, 7], seeded(1, num_steps))
            for step in range(1, num_steps + 1):
                await until(device.has_launched(min(step - 1 + depth, num_steps)))
                device.turn_to(device.due_ns[step - 1])
                await worker.until(worker.has_tokens(1, step))
            assert worker.tokens[1] == oracle([5, 6, 7], seeded(1, num_steps))
            device.busy_ns = device.now_ns
            device.stop_delaying()  # the last plan only releases the row

    run(main())
    return device


def test_next_plan_is_on_the_wire_before_the_result() -> None:
    device = run_delayed(2, 20, serial=True)
    for step in range(1, 20):
        assert device.log.index(("plan", step + 1)) < device.log.index(("result", step))


def test_depth_2_has_at_least_1_8_times_the_throughput_of_depth_1() -> None:
    steps = 40
    one, two = run_delayed(1, steps, serial=False), run_delayed(2, steps, serial=False)
    assert one.busy_ns == steps * Delaying.DELAY_NS
    assert one.busy_ns / two.busy_ns >= 1.8
