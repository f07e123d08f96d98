"""The round trip disappears behind the device's work: plans overlap results."""

import pickle
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from common.messages import ExecutorInfo, StepPlan, StepResult, Timings
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.pipeline_depth import PipelineDepth
from scheduler_svc.core.sequence import Sequence
from tests.fakes.toy_executor import toy_info
from tests.sim.harness import Sim

MS = 1_000_000
DEVICE_MS, WIRE_MS = 20, 10  # a step on the device; one way between the services


def _serve(
    depth: int, *, adapts: bool = False, device_ms: int = DEVICE_MS, wire_ms: int = WIRE_MS
) -> tuple[Sim, float, list[tuple[str, int]]]:
    """Runs eight requests on a device that computes device_ms per step, wire_ms of wire each way. Manual time.

    Returns the simulation, tokens per second and the order of events.
    """
    sim = Sim(CoreConfig(pipeline_depth=depth, adapt_pipeline_depth=adapts), toy_info())
    keys = [sim.submit(range(10 + i, 20 + i), 40) for i in range(8)]
    started, events = sim.now_ns, list[tuple[str, int]]()
    arrivals: deque[tuple[int, StepResult]] = deque()
    device_free_ns = 0
    while sim.scheduler.num_live:
        while (record := sim.plan()) is not None:
            events.append(("plan", record.plan.step_id))
            _, step = sim.pending.pop()
            launched = sim.now_ns + wire_ms * MS
            begins = max(device_free_ns, launched)
            device_free_ns = begins + device_ms * MS
            result = replace(
                step.wait(),  # type: ignore[union-attr]
                timings=Timings(launched_ns=launched, device_start_ns=begins, device_end_ns=device_free_ns),
            )
            arrivals.append((device_free_ns + wire_ms * MS, result))
        at_ns, result = arrivals.popleft()
        sim.clock.advance_ns(at_ns - sim.now_ns)
        events.append(("result", result.step_id))
        sim.update(result)
    sim.assert_tokens()
    tokens = sum(len(sim.clients[key].tokens) for key in keys)
    return sim, tokens / ((sim.now_ns - started) / 1e9), events


def test_depth_two_hides_the_round_trip() -> None:
    throughput = {depth: _serve(depth)[1] for depth in (1, 2, 3)}
    assert throughput[2] >= 1.8 * throughput[1]
    assert throughput[3] >= throughput[2]


def test_plan_n_plus_1_is_sent_before_result_n() -> None:
    _, _, events = _serve(2)
    place = {event: i for i, event in enumerate(events)}
    steps = max(step for kind, step in events if kind == "result")
    assert all(place["plan", n + 1] < place["result", n] for n in range(1, steps) if ("plan", n + 1) in place)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_never_more_plans_in_flight_than_depth(depth: int) -> None:
    _, _, events = _serve(depth)
    in_flight = 0
    for kind, _ in events:
        in_flight += 1 if kind == "plan" else -1
        assert 0 <= in_flight <= depth


def test_depth_follows_the_way_against_the_step() -> None:
    """A device as quick as the way there and back wants three plans in flight, a slow one no more than two."""
    throughput = {depth: _serve(depth, device_ms=10)[1] for depth in (2, 3)}
    sim, adapted, _ = _serve(3, adapts=True, device_ms=10)
    assert sim.scheduler.executors[0].pipeline.now == 3
    assert adapted >= throughput[2] + 0.8 * (throughput[3] - throughput[2])
    sim, _, events = _serve(3, adapts=True, device_ms=50)
    assert sim.scheduler.executors[0].pipeline.now == 2
    assert [kind for kind, _ in events[:3]] == ["plan", "plan", "result"]


def test_executor_may_grant_less_depth() -> None:
    sim = Sim(CoreConfig(pipeline_depth=4))
    sim.scheduler.executors[0].pipeline = PipelineDepth(2, adapts=False)  # as a Welcome with depth 2 leaves it
    sim.submit([5, 6, 7], 20)
    assert sim.fill() == 2
    assert not sim.scheduler.can_schedule(sim.executor_id)


def test_a_decode_is_planned_on_a_token_nobody_knows_yet() -> None:
    sim = Sim(CoreConfig(pipeline_depth=2))
    sim.submit([5, 6, 7], 20)
    first, second = sim.plan(), sim.plan()
    assert first is not None and second is not None
    assert first.plan.prefill_counts.tolist() == [3]
    assert second.plan.decode_rows.tolist() == first.plan.prefill_rows.tolist()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_planned_output_never_passes_max_tokens(depth: int, max_tokens: int) -> None:
    sim = Sim(CoreConfig(pipeline_depth=depth))
    sim.submit([5, 6, 7], max_tokens)
    sim.run()
    planned = sum(r.decode_tokens for r in sim.records) + 1
    assert planned == max_tokens
    sim.assert_tokens()


def test_tokens_after_the_end_are_dropped_and_not_counted() -> None:
    sim = Sim(CoreConfig(pipeline_depth=4))
    stop = sim.expected(sim.submit([5, 6, 7], 20, temperature=0.0))[4]
    sim.run()
    key = sim.submit([5, 6, 7], 20, temperature=0.0, stop_ids=(stop,))
    before = sim.scheduler.stats().generated_tokens
    sim.run()
    planned = [r for r in sim.records if key in r.decode_keys.tolist()]
    assert len(planned) > 4, "steps beyond the stop token were planned"
    assert len(sim.clients[key].tokens) == 5
    assert sim.scheduler.stats().generated_tokens - before == 5
    sim.assert_tokens()
    sim.assert_all_free()


def test_a_finished_sequence_is_absent_from_the_next_plan_made() -> None:
    sim = Sim(CoreConfig(pipeline_depth=2))
    key = sim.submit([5, 6, 7], 50)
    other = sim.submit([8, 9, 10], 50)
    for _ in range(4):
        sim.fill()
        sim.deliver()
    row = next(s.row for s in sim.scheduler.live_sequences() if s.key == key)
    assert sim.finish(key, 2)
    record = sim.plan()
    assert record is not None
    assert key not in record.decode_keys.tolist() and other in record.decode_keys.tolist()
    assert record.plan.release.tolist() == [row]


def test_row_and_blocks_rest_until_the_last_result_naming_them() -> None:
    sim = Sim(CoreConfig(pipeline_depth=3), toy_info(num_rows=2, max_num_seqs=2))
    key = sim.submit([5, 6, 7], 50)
    sim.fill()
    sim.cancel(key)
    executor = sim.scheduler.executors[0]
    sim.submit([8, 9, 10], 50)
    sim.submit([11, 12, 13], 50)
    for remaining in (2, 1, 0):
        sim.deliver()
        assert bool(executor.limbo) == (remaining > 0)
        assert len(executor.free_rows) == (1 if remaining else 2)
        sim.scheduler.stats()
    sim.run()
    sim.assert_tokens()
    sim.assert_all_free()


def _until_one_ended(info: ExecutorInfo, depth: int = 2) -> Sim:
    """Two ran, the shorter has just ended and nothing in flight names it; the other's next step is in flight if the
    depth allows, and a third waits."""
    sim = Sim(CoreConfig(pipeline_depth=depth, enable_prefix_cache=False), info)
    sim.looks_ahead = lambda _: False
    sim.submit([5, 6, 7], 3)
    sim.submit([8, 9, 10], 12)
    sim.fill()
    sim.submit([11, 12, 13], 12)
    while sim.scheduler.num_live == 3:
        sim.deliver()
        if sim.scheduler.num_live == 3:
            sim.fill()
    assert not sim.executor.limbo
    return sim


@pytest.mark.parametrize("looks", [True, False])
def test_who_ended_gives_its_row_and_blocks_back_once_the_next_plan_is_made(looks: bool) -> None:
    sim = _until_one_ended(toy_info())
    executor = sim.executor
    (row,) = executor.leaving
    assert row not in executor.free_rows and executor.num_limbo_blocks == len(executor.rows.blocks(row)) > 0
    sim.fill()
    assert executor.leaving == [row], "the plan had others to give"
    if looks:
        sim.scheduler.look_ahead(sim.executor_id)
    else:
        sim.deliver()
    assert not executor.leaving and row in executor.free_rows and not executor.num_limbo_blocks
    sim.run()
    sim.assert_tokens()
    sim.assert_all_free()


@pytest.mark.parametrize(
    "info",
    [toy_info(num_rows=2, max_num_seqs=2), toy_info(num_blocks=7, max_num_seqs=2)],
    ids=["rows are short", "blocks are short"],
)
def test_a_plan_that_may_need_what_is_given_back_has_it(info: ExecutorInfo) -> None:
    sim = _until_one_ended(info)
    assert sim.executor.leaving
    record = sim.plan()
    assert record is not None and len(record.plan.admit) == 1 and not sim.executor.leaving
    sim.run()
    sim.assert_tokens()
    sim.assert_all_free()


def test_with_nothing_in_flight_all_is_given_back_at_once() -> None:
    sim = _until_one_ended(toy_info(), depth=1)
    assert not sim.executor.leaving and not sim.executor.num_limbo_blocks
    sim.run()
    sim.assert_all_free()


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
def test_nothing_that_was_handed_over_changes_afterwards(depth: int, cache: bool) -> None:
    """vllm#53217. Plans are on their way and batches wait for their workers while the core goes on."""
    config = CoreConfig(pipeline_depth=depth, max_prefill_chunk=8, enable_prefix_cache=cache)
    sim = Sim(config, toy_info(num_blocks=30, max_num_seqs=6, num_rows=70), eos_chance=0.03)
    for i in range(14):
        sim.submit(range(10 + i // 2, 30 + i), 30, worker=i % 2, n=1 + i % 2, num_logprobs=i % 3)
    told: list[tuple[object, bytes]] = []
    while sim.scheduler.num_live:
        planned = len(sim.records)
        sim.fill()
        told += [(record, pickle.dumps(record)) for record in sim.records[planned:]]
        if (outcome := sim.deliver()) is not None:
            told += [(batch, pickle.dumps(batch)) for batch in outcome.batches.values()]
    assert sim.scheduler.stats().preemptions > 0 and len(told) > 300
    assert all(pickle.dumps(message) == before for message, before in told)
    columns = [getattr(message, name) for message, _ in told for name in message.__dataclass_fields__]  # type: ignore[attr-defined]
    assert not any(isinstance(column, np.ndarray) and column.flags.writeable for column in columns)
    sim.assert_tokens()


class _Untouchable:
    """Stands where a sequence would: any use is an error."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"a steady step touched {name} of a sequence")


@pytest.mark.parametrize("waiting", [0, 500])
def test_a_steady_step_touches_no_sequence_waiting_or_running(waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    info = toy_info(block_size=128, max_blocks_per_row=2, num_blocks=32)
    sim = Sim(CoreConfig(pipeline_depth=2), info)
    for i in range(16):
        sim.submit(range(3 + i, 40 + i), 200, ignore_eos=True)
    for i in range(waiting):
        sim.submit(range(3 + i % 100, 23 + i % 100), 5)
    while sim.scheduler.executors[0].prefilling or sim.scheduler.num_running < 16:
        sim.fill()
        sim.deliver()
    results = [sim.pending.popleft()[1].wait() for _ in range(len(sim.pending))]  # type: ignore[union-attr]
    for result in results:
        sim.update(result)
    rows = sim.scheduler.executors[0].rows
    monkeypatch.setattr(rows, "seqs", _Untouchable())
    monkeypatch.setattr(Sequence, "length", property(lambda self: _Untouchable().length))
    monkeypatch.setattr(Sequence, "request", _Untouchable(), raising=False)
    for _ in range(3):
        record = sim.scheduler.schedule(sim.executor_id, 0)
        assert record is not None and record.decode_tokens == 16
        result = _answer(record.plan)
        outcome = sim.scheduler.update(sim.executor_id, result, 0)
        assert len(outcome.batches[0].keys) == 16


def _answer(plan: StepPlan) -> StepResult:
    tokens = np.full(len(plan.decode_rows), 7, dtype=np.uint32)
    return StepResult(plan.epoch, plan.step_id, emitted_rows=plan.decode_rows, tokens=tokens)
