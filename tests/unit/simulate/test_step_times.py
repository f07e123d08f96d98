"""bench.step_times: which steps of a running service count, and as what."""

from bench.executor_steps import steps_of
from bench.step_times import measured
from scheduler_svc.simulate.fit import MeasuredStep
from stepwire.v1.admin_pb2 import WatchStepsResponse
from tests.contract.executors import tiny_runner


def step(number: int, planned: int, result: int, **changes: int) -> WatchStepsResponse:
    values = {
        "epoch": 1, "step_id": number, "planned_ns": planned, "result_ns": result, "decode_tokens": 2,
        "num_sequences": 2, "free_blocks": 90, "device_ns": 5000, "device_idle_ns": 200, **changes,
    }  # fmt: skip
    return WatchStepsResponse(**values)  # type: ignore[arg-type]


def test_only_steps_that_found_the_pipeline_full_count() -> None:
    seen = [
        step(1, 0, 100),
        step(2, 50, 200),
        step(3, 300, 400),  # planned after the result of step 2: the executor waited
        step(4, 350, 500, prefill_tokens=7),
        step(6, 400, 600),  # step 5 was lost
        step(7, 550, 700, epoch=2),
        step(8, 650, 800, epoch=2, decode_tokens=0, num_sequences=0),  # computed nothing
        step(9, 750, 900, epoch=2, skipped=3),
    ]
    found = measured(seen, num_blocks=100, block_size=16)
    assert [MeasuredStep(**line).prefill_tokens for line in found] == [0, 7]  # type: ignore[arg-type]
    assert found[0] == {"decode_tokens": 2, "prefill_tokens": 0, "context_tokens": 144, "duration_us": 5.2}


def test_an_executor_alone() -> None:
    lines = [MeasuredStep(**line) for line in steps_of(tiny_runner(), (1, 3), 0.05, (20, 12))]  # type: ignore[arg-type]
    assert len(lines) > 10
    assert max(line.decode_tokens for line in lines) > 1
    assert all(line.context_tokens >= line.decode_tokens + line.prefill_tokens for line in lines)
