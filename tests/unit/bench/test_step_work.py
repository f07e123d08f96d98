"""What a step must move and compute, against sums done by hand."""

from typing import Any

import numpy as np
import pytest

from bench.plans import greedy
from bench.step_batch import Batch, Lengths, causal_pairs, keys_read, pairs
from bench.step_work import NO_WORK, StepSize, Work, rates
from common.messages import Admit, StepPlan, u32
from tests.contract.executors import native_runner, tiny_runner
from tests.contract.plans import prefill


def plan(step_id: int, num_tokens: int, **fields: Any) -> StepPlan:
    return StepPlan(1, step_id, 0, num_tokens, **fields)


ADMITS = tuple(Admit(row, row + 1, u32([1] * n), n, n, 0, u32([row]), greedy(9)) for row, n in ((0, 4), (1, 7)))
# Row 0 computes its prompt and then decodes, row 1 takes three pieces for its own.
PLANS = (
    plan(1, 7, admit=ADMITS, **prefill((0, 0, 4), (1, 0, 3))),
    plan(2, 2, **prefill((1, 3, 2))),
    plan(3, 3, decode_rows=u32([0]), **prefill((1, 5, 2))),
    plan(4, 2, decode_rows=u32([0, 1])),
    plan(5, 0, release=u32([0])),
)


def batches() -> list[Batch]:
    lengths = Lengths(4)
    return [lengths.batch(plan) for plan in PLANS]


def test_a_batch_is_known_from_its_plan() -> None:
    found = batches()
    assert [batch.num_tokens for batch in found] == [7, 2, 3, 2, 0] == [plan.num_tokens for plan in PLANS]
    assert [batch.num_sampling for batch in found] == [1, 0, 2, 2, 0]
    assert [batch.decode_lengths.tolist() for batch in found] == [[], [], [5], [6, 8], []]
    assert [batch.context_tokens for batch in found] == [4 + 3, 5, 5 + 7, 6 + 8, 0]
    assert [pairs(batch, 0) for batch in found] == [10 + 6, 4 + 5, 5 + 6 + 7, 6 + 8, 0]


@pytest.mark.parametrize("window", [0, 1, 3, 8, 50])
def test_windows_bound_what_a_token_sees(window: int) -> None:
    for start, count in ((0, 1), (0, 9), (2, 4), (7, 5), (20, 3)):
        seen = [range(max(0, at + 1 - window) if window else 0, at + 1) for at in range(start, start + count)]
        assert causal_pairs(start, count, window) == sum(map(len, seen))
        piece = Batch(np.zeros(0, np.int64), np.array([start]), np.array([count]), 0)
        assert keys_read(piece, window) == len(set().union(*seen))
        decoding = Batch(np.array([start + 1]), np.zeros(0, np.int64), np.zeros(0, np.int64), 1)
        assert keys_read(decoding, window) == pairs(decoding, window) == len(seen[0])


def test_bytes_and_operations_of_a_model_in_torch() -> None:
    runner = tiny_runner(numerics="fast")
    size = StepSize.of(runner.model, runner.cache.shape)
    layer = 32 * 8 * (4 + 2 * 2) + 32 * 32 + 2 * 48 * 32 + 32 * 48  # qkv, output, gate and up, down
    head, key_and_value = 97 * 32, 2 * 2 * 8 * 4
    assert (size.layer_bytes, size.head_bytes, size.kv_token_bytes) == (2 * layer * 4, head * 4, key_and_value)
    found = [size.work(batch) for batch in batches()]
    assert found[1].weight_bytes == 2 * layer * 4, "nobody samples"
    attention = 2 * 4 * 4 * 8 * (5 + 6 + 7)  # two layers, four heads of eight, a product and a sum for keys and values
    assert found[2] == Work(
        tokens=3, outputs=2, weight_bytes=4 * (2 * layer + head), kv_read_bytes=2 * key_and_value * 12,
        kv_written_bytes=2 * key_and_value * 3, flops=2 * (3 * 2 * layer + 2 * head) + attention,
    )  # fmt: skip
    assert found[4] == NO_WORK
    runner.close()


def test_bytes_of_the_cpu_kernels_are_those_they_hold() -> None:
    runner = native_runner()
    size = StepSize.of(runner.model, runner.cache.shape)
    layer = 32 * 32 * (4 + 2 * 2) + 32 * 4 * 32 + 2 * 64 * 32 + 32 * 64
    assert size.layer_bytes == 2 * layer * 2
    assert size.head_bytes == 128 * 32 * 2, "97 columns in panels of 32"
    assert size.kv_token_bytes == 2 * 2 * 32 * 2
    runner.close()


def test_rates_are_of_all_the_time() -> None:
    works = [Work(1, 1, 1000, 200, 50, 4000), Work(5, 1, 1000, 300, 250, 8000)]
    found = rates([1_000_000, 3_000_000], works)
    assert (found["steps"], found["p50_ms"]) == (2, 2.0) and found["p50_ms"] <= found["p95_ms"] <= found["p99_ms"] <= 3
    assert found["output_tokens_per_s"] == 500.0 and found["computed_tokens_per_s"] == 1500.0
    assert (found["weights_mb"], found["kv_read_mb"], found["kv_written_mb"]) == (0.001, 0.0, 0.0)
    found = rates([1000, 3000], works)
    assert found["gb_s"] == round(2800 / 4000, 2) and found["gflop_s"] == 3.0
