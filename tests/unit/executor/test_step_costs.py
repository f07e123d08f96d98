"""What a step costs is found by real steps, which leave nothing behind."""

import pytest

from common.messages import Hello, StepPlan
from executor_svc import step_costs
from executor_svc.step_costs import StepCosts, measure_costs
from tests.fakes.toy_executor import ToyExecutor, toy_info

LARGE = {"max_tokens_per_step": 256, "num_blocks": 4000, "num_rows": 128, "max_num_seqs": 64}


class Clock:
    """Time that steps take, and nothing else does."""

    def __init__(self, step_ns: int, row_ns: int, token_ns: int) -> None:
        self.now_ns = 0
        self._costs = (step_ns, row_ns, token_ns)

    def wait(self, plan: StepPlan) -> None:
        step, row, token = self._costs
        self.now_ns += step + row * len(plan.decode_rows) + token * int(plan.prefill_counts.sum())

    def perf_counter_ns(self) -> int:
        return self.now_ns


def test_the_costs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(6000, 500, 200)
    monkeypatch.setattr(step_costs, "perf_counter_ns", clock.perf_counter_ns)
    executor = ToyExecutor(toy_info(**LARGE), on_wait=clock.wait)
    assert measure_costs(executor) == StepCosts(step_ns=6000, row_ns=500, token_ns=200)
    assert executor.rows_in_use == 0
    assert not executor.begin_epoch(Hello(bytes(16), 1, 1, 0, 0, keep_kv=True, known_incarnation=executor.incarnation))


def test_times_that_tell_nothing_are_no_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0, 0, 0)
    monkeypatch.setattr(step_costs, "perf_counter_ns", clock.perf_counter_ns)
    assert measure_costs(ToyExecutor(toy_info(**LARGE), on_wait=clock.wait)) is None


@pytest.mark.parametrize(
    "small", [{"max_num_seqs": 1}, {"max_blocks_per_row": 20}, {"max_tokens_per_step": 64}, {"num_blocks": 100}]
)
def test_an_executor_too_small_for_it(small: dict[str, int]) -> None:
    def never(plan: StepPlan) -> None:
        raise AssertionError("no step was asked for")

    assert measure_costs(ToyExecutor(toy_info(**(LARGE | small)), on_wait=never)) is None
