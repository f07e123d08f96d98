"""The runner and waiter threads without any network."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from common.messages import Hello, PlanErrorCode, StepPlan, StepResult
from executor_svc.step_executor import PendingStep, PlanRefused, refused
from executor_svc.step_threads import Answer, EpochRun, StepThreads
from tests.fakes.toy_executor import toy_info

DEADLINE_S = 20.0


class Scripted:
    """A StepExecutor that does what `script` says for each step id: "refuse", "fail", "break", "break wait"."""

    def __init__(self, **script: str) -> None:
        self.info = toy_info()
        self.incarnation = 1
        self.script = {int(step.removeprefix("step_")): what for step, what in script.items()}
        self.executed: list[tuple[int, int]] = []
        self.waited: list[int] = []
        self.begun_with_pending: list[int] = []
        self.closed = False
        self.gate: threading.Event | None = None

    def begin_epoch(self, hello: Hello) -> bool:
        self.begun_with_pending.append(len(self.executed) - len(self.waited))
        return hello.keep_kv

    def execute(self, plan: StepPlan, received_ns: int) -> PendingStep:
        what = self.script.get(plan.step_id, "")
        if what == "refuse":
            raise refused(plan, PlanErrorCode.BLOCK_RANGE, "told to", field="grant_blocks[0]")
        if what == "break":
            raise ZeroDivisionError("an engine bug")
        self.executed.append((plan.epoch, plan.step_id))
        return ScriptedStep(self, plan, what)

    def close(self) -> None:
        self.closed = True


class ScriptedStep:
    def __init__(self, owner: Scripted, plan: StepPlan, what: str) -> None:
        self._owner, self._plan, self._what = owner, plan, what

    def wait(self) -> StepResult:
        if self._owner.gate is not None:
            assert self._owner.gate.wait(DEADLINE_S)
        self._owner.waited.append(self._plan.step_id)
        if self._what == "fail":
            raise refused(self._plan, PlanErrorCode.OUT_OF_MEMORY, "told to")
        if self._what == "break wait":
            raise ZeroDivisionError("an engine bug")
        return StepResult(self._plan.epoch, self._plan.step_id)


class Bench:
    """One StepThreads on the running loop, with what it answered."""

    def __init__(self, executor: Scripted, step_limit_s: float = 600.0) -> None:
        self.executor = executor
        self.fatal: list[str] = []
        self.answers: list[tuple[int, str]] = []
        self._came = asyncio.Event()
        self.threads = StepThreads(executor, asyncio.get_running_loop(), self._die, step_limit_s)
        self.threads.start()

    def _die(self, reason: str) -> None:
        self.fatal.append(reason)
        self._came.set()

    async def until_fatal(self) -> str:
        while not self.fatal:
            self._came.clear()
            await self._came.wait()
        return self.fatal[0]

    def epoch(self, number: int, *, keep_kv: bool = False) -> EpochRun:
        return EpochRun(Hello(b"s" * 16, number, 4, 0, 0, keep_kv=keep_kv), self._take)

    def _take(self, answer: Answer) -> None:
        kind = answer.message.WhichOneof("message")
        if kind == "plan_error":
            error = answer.message.plan_error
            self.answers.append((error.step_id, PlanErrorCode(error.code).name))
        else:
            self.answers.append((answer.message.result.step_id, "result"))
        self._came.set()

    async def until(self, count: int) -> list[tuple[int, str]]:
        while len(self.answers) < count:
            self._came.clear()
            await self._came.wait()
        return self.answers


def run(test: Callable[[], "asyncio.Future[None] | object"]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test()  # type: ignore[misc]

    asyncio.run(bounded())


@pytest.mark.parametrize(
    ("script", "expected", "fatal"),
    [
        ({}, ["result"] * 4, 0),
        ({"step_2": "refuse"}, ["result", "BLOCK_RANGE", "EPOCH_ENDED", "EPOCH_ENDED"], 0),
        ({"step_2": "break"}, ["result", "DEVICE_FAILED", "EPOCH_ENDED", "EPOCH_ENDED"], 1),
        ({"step_2": "fail"}, ["result", "OUT_OF_MEMORY", "EPOCH_ENDED", "EPOCH_ENDED"], 0),
        ({"step_2": "break wait"}, ["result", "DEVICE_FAILED", "EPOCH_ENDED", "EPOCH_ENDED"], 1),
        ({"step_3": "refuse", "step_1": "fail"}, ["OUT_OF_MEMORY", "EPOCH_ENDED", "*", "EPOCH_ENDED"], 0),
    ],
)
def test_one_answer_per_plan_in_order(script: dict[str, str], expected: list[str], fatal: int) -> None:
    async def main() -> None:
        bench = Bench(Scripted(**script))
        epoch = bench.epoch(1)
        await bench.threads.begin_epoch(epoch)
        for step in range(1, 5):
            bench.threads.step(epoch, StepPlan(1, step, 0, 0), 0)
        answers = await bench.until(4)
        assert [step for step, _ in answers] == [1, 2, 3, 4]
        # Whether step 3 was refused before or after step 1 was known to have failed is a race; the answer says so.
        assert all(want in ("*", got) for want, (_, got) in zip(expected, answers, strict=True)), answers
        assert await bench.threads.stop(DEADLINE_S)
        assert len(bench.fatal) == fatal and bench.executor.closed
        # Every step that was launched was waited for, whatever happened before it.
        assert bench.executor.waited == [step for _, step in bench.executor.executed]

    run(main)


def test_a_new_epoch_waits_for_the_old_ones_steps_and_old_plans_do_not_run() -> None:
    async def main() -> None:
        executor = Scripted()
        executor.gate = threading.Event()
        bench = Bench(executor)
        old, new = bench.epoch(1), bench.epoch(2, keep_kv=True)
        await bench.threads.begin_epoch(old)
        bench.threads.step(old, StepPlan(1, 1, 0, 0), 0)
        begun = bench.threads.begin_epoch(new)
        bench.threads.step(old, StepPlan(1, 2, 0, 0), 0)
        bench.threads.step(new, StepPlan(2, 1, 0, 0), 0)
        executor.gate.set()
        assert await begun is True
        assert await bench.until(3) == [(1, "result"), (2, "STALE_EPOCH"), (1, "result")]
        assert executor.executed == [(1, 1), (2, 1)]
        assert executor.begun_with_pending == [0, 0]
        assert await bench.threads.stop(DEADLINE_S)

    run(main)


def test_begin_epoch_that_breaks_is_told_and_fatal() -> None:
    class Broken(Scripted):
        def begin_epoch(self, hello: Hello) -> bool:
            raise ZeroDivisionError("an engine bug")

    async def main() -> None:
        bench = Bench(Broken())
        with pytest.raises(ZeroDivisionError):
            await bench.threads.begin_epoch(bench.epoch(1))
        assert await bench.threads.stop(DEADLINE_S)
        assert len(bench.fatal) == 1

    run(main)


def test_plan_refused_says_what_and_where() -> None:
    error = refused(StepPlan(3, 4, 0, 0), PlanErrorCode.BUDGET, "too much", field="num_tokens", limit=9)
    assert isinstance(error, PlanRefused)
    assert (error.error.epoch, error.error.step_id, error.error.limit) == (3, 4, 9)
    assert "BUDGET num_tokens: too much" in str(error)


@pytest.mark.parametrize("how", ["fail", "break wait"])
def test_a_plan_that_comes_after_a_failed_step_is_not_launched(how: str) -> None:
    async def test() -> None:
        executor = Scripted(step_1=how)
        bench = Bench(executor)
        epoch = bench.epoch(1)
        await bench.threads.begin_epoch(epoch)
        bench.threads.step(epoch, StepPlan(1, 1, 0, 0), 0)
        await bench.until(1)
        bench.threads.step(epoch, StepPlan(1, 2, 0, 0), 0)
        assert (await bench.until(2))[1] == (2, "EPOCH_ENDED")
        assert executor.executed == [(1, 1)]
        assert await bench.threads.stop(DEADLINE_S)

    run(test)


@pytest.mark.parametrize("where", ["begin_epoch", "execute", "wait"])
def test_a_device_that_hangs_is_fatal(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def hanging(call: Callable[..., object]) -> Callable[..., object]:
        def hangs(*args: object) -> object:
            assert gate.wait(DEADLINE_S)
            return call(*args)

        return hangs

    async def test() -> None:
        executor = Scripted()
        if where == "wait":
            executor.gate = gate
        else:
            monkeypatch.setattr(executor, where, hanging(getattr(executor, where)))
        bench = Bench(executor, step_limit_s=0.05)
        epoch = bench.epoch(1)
        begun = bench.threads.begin_epoch(epoch)
        bench.threads.step(epoch, StepPlan(1, 1, 0, 0), 0)
        assert "did not end" in await bench.until_fatal()
        gate.set()
        await begun
        await bench.until(1)
        assert await bench.threads.stop(DEADLINE_S)

    run(test)
