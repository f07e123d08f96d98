"""The virtual clock: what happens when, worked out by hand where that is possible."""

import dataclasses

import numpy as np
import pytest

from common.errors import ConfigError
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.simulate.lengths import Lengths
from scheduler_svc.simulate.simulation import Setup
from scheduler_svc.simulate.step_model import Cost
from scheduler_svc.simulate.trace import Trace
from tests.unit.simulate.scenes import IDEAL, MODEL, drawn, simulated

ONE_MS = MODEL.model_copy(update={"costs": (Cost(base_us=1000.0),)})


def arrivals(*at_ms: float, prompt: int = 10, output: int = 4, deadline_ms: float = 0.0) -> Trace:
    n = len(at_ms)
    return Trace(
        arrival_ns=np.array([int(ms * 1e6) for ms in at_ms]),
        prompt_tokens=np.full(n, prompt),
        output_tokens=np.full(n, output),
        prefix=np.full(n, -1),
        prefix_tokens=np.zeros(n, dtype=np.int64),
        tenant=np.zeros(n, dtype=np.int64),
        priority=np.zeros(n, dtype=np.int64),
        deadline_ns=np.full(n, int(deadline_ms * 1e6)),
    )


def test_times_of_one_request_by_hand() -> None:
    """A prefill and three decodes of 1 ms; the network shows once at each end, for plans wait at the executor."""
    setup = Setup(network_us=100.0, loop_us=0.0)
    simulation, results = simulated(arrivals(5.0), setup=setup, model=ONE_MS)
    m = simulation.measures
    assert int(m.first[0]) == 6_200_000
    assert int(m.end[0]) == 9_200_000
    assert results.numbers["p50_itl_ms"] == pytest.approx(1.0, rel=0.005)
    steps = m.steps.rows()
    assert steps["start_ns"][:4].tolist() == [5_100_000, 6_100_000, 7_100_000, 8_100_000]
    assert steps["planned_ns"][:3].tolist() == [5_000_000, 5_000_000, 6_200_000]


def test_without_a_pipeline_the_network_shows_in_every_step() -> None:
    setup = Setup(network_us=100.0, loop_us=0.0)
    simulation, _ = simulated(arrivals(0.0), CoreConfig(pipeline_depth=1), setup, ONE_MS)
    assert int(simulation.measures.end[0]) == 4 * 1_200_000


def test_the_depth_follows_the_way_as_in_the_service() -> None:
    """A way of 1.6 ms shows behind one step of 1 ms, and not behind two."""
    setup = Setup(network_us=800.0, loop_us=0.0)
    trace = arrivals(0.0, output=60)
    _, two = simulated(trace, CoreConfig(pipeline_depth=2), setup, ONE_MS)
    _, adapted = simulated(trace, CoreConfig(pipeline_depth=3, adapt_pipeline_depth=True), setup, ONE_MS)
    assert two.numbers["mean_itl_ms"] == pytest.approx(1.3, rel=0.02)
    assert adapted.numbers["p50_itl_ms"] == pytest.approx(1.0, rel=0.01)


def test_the_scheduler_does_one_thing_at_a_time() -> None:
    """2 plans before the first step, 0.4 ms each; with 64 executors it is the scheduler that limits."""
    slow = Setup(network_us=0.0, loop_us=400.0)
    simulation, _ = simulated(arrivals(0.0), setup=slow, model=ONE_MS)
    assert simulation.measures.steps.rows()["start_ns"][:2].tolist() == [400_000, 1_400_000]
    simulation, _ = simulated(arrivals(0.0), CoreConfig(pipeline_depth=1), slow, ONE_MS)
    starts = simulation.measures.steps.rows()["start_ns"][:3].tolist()
    assert starts == [400_000, 2_200_000, 4_000_000], "a step, its result booked, the next plan made"
    trace = drawn(requests=400, rate=1e6, output=Lengths("fixed", 20))
    wide = dataclasses.replace(slow, num_executors=64)
    config = CoreConfig(max_queued_requests=10_000)
    _, limited = simulated(trace, config, wide)
    _, free = simulated(trace, config, dataclasses.replace(wide, loop_us=0.0))
    assert limited.numbers["duration_s"] > 3 * free.numbers["duration_s"]


def test_arrivals_at_one_time_enter_one_step() -> None:
    simulation, _ = simulated(arrivals(1.0, 1.0, 1.0), setup=IDEAL, model=ONE_MS)
    first = simulation.measures.steps.rows()[0]
    assert (first["num_sequences"], first["prefill_tokens"]) == (3, 30)


def test_an_arrival_comes_before_a_result_of_the_same_time() -> None:
    simulation, _ = simulated(arrivals(0.0, 1.0), CoreConfig(pipeline_depth=1), IDEAL, ONE_MS)
    second = simulation.measures.steps.rows()[1]
    assert (int(second["planned_ns"]), second["decode_tokens"], second["prefill_tokens"]) == (1_000_000, 1, 10)


def test_more_executors_share_the_work() -> None:
    trace = drawn(requests=200, rate=1e6)
    config = CoreConfig(max_queued_requests=1000)
    one, four = (simulated(trace, config, dataclasses.replace(IDEAL, num_executors=n))[1] for n in (1, 4))
    assert 2.5 < one.numbers["duration_s"] / four.numbers["duration_s"] <= 4.5
    assert four.numbers["output_tokens"] == one.numbers["output_tokens"] == trace.output_tokens.sum()


def test_a_closed_loop_keeps_its_callers_busy() -> None:
    simulation, results = simulated(drawn(requests=50, concurrency=5))
    assert results.numbers["finished"] == 50
    m = simulation.measures
    assert int(simulation.measures.steps.rows()["running"].max()) == 5
    starts, ends = np.sort(m.arrival), np.sort(m.end)
    assert (starts[:5] == 0).all() and (starts[5:] >= ends[:45]).all()


def test_who_is_refused_is_counted_and_a_closed_loop_goes_on() -> None:
    config = CoreConfig(max_queued_requests=1, max_num_seqs=1)
    _, results = simulated(drawn(requests=40, rate=1e5), config)
    assert results.numbers["refused_overloaded"] + results.numbers["finished"] == 40
    assert not results.all_served
    _, closed = simulated(drawn(requests=40, concurrency=8), config)
    assert closed.numbers["refused_overloaded"] + closed.numbers["finished"] == 40
    _, too_large = simulated(arrivals(0.0, 0.0, prompt=600))
    assert too_large.numbers["refused_too_large"] == 2


def test_a_refused_caller_comes_back_when_it_was_told_to() -> None:
    """Eight come at once, one runs and one waits; the others are told a second, as nothing was measured yet."""
    config = CoreConfig(max_queued_requests=1, max_num_seqs=1)
    simulation, _ = simulated(drawn(requests=40, concurrency=8), config, IDEAL)
    arrival = simulation.measures.arrival
    assert (arrival == 0).sum() == 8 and (arrival == 1_000_000_000).sum() >= 6


def test_requests_that_come_alone_are_spread_as_the_service_spreads_them() -> None:
    setup = dataclasses.replace(IDEAL, num_executors=4)
    config = CoreConfig(pipeline_depth=8)  # none is ever full
    simulation, _ = simulated(arrivals(0.0, 1.0, 2.0, 3.0, output=5), config, setup, ONE_MS)
    steps = simulation.measures.steps.rows()
    assert [int(e) for e in steps[steps["prefill_tokens"] > 0]["executor"]] == [0, 1, 2, 3]


def test_callers_leave_at_their_deadline() -> None:
    simulation, results = simulated(arrivals(0.0, output=100, deadline_ms=10.0), setup=IDEAL, model=ONE_MS)
    assert results.numbers["ended_deadline_passed"] == 1 and results.numbers["finished"] == 0
    assert int(simulation.measures.tokens[0]) == 9
    assert simulation.stats.running == simulation.stats.waiting == 0


def test_who_waits_too_long_ends_though_nothing_else_happens() -> None:
    """The executor is busy for 100 ms with the first request's only step."""
    slow = MODEL.model_copy(update={"costs": (Cost(base_us=100_000.0),)})
    config = CoreConfig(max_num_seqs=1, max_queue_time_ms=20)
    _, results = simulated(arrivals(0.0, 5.0, output=2), config, IDEAL, slow)
    assert results.numbers["finished"] == 1
    assert sum(count for name, count in results.numbers.items() if name.startswith("ended_")) == 1


def test_the_policy_fair_serves_tenants_alike() -> None:
    trace = drawn(requests=400, rate=5000.0, tenants=(("a", 4.0), ("b", 1.0)))
    _, fcfs = simulated(trace)
    _, fair = simulated(trace, CoreConfig(policy="fair"))
    _, weighted = simulated(trace, CoreConfig(policy="fair", tenant_weights={"a": 3.0}))
    assert fcfs.tenants["a"]["contended_share"] > 0.7
    assert fair.tenants["a"]["contended_share"] == pytest.approx(0.5, abs=0.06)
    assert fair.numbers["fairness"] > 0.98 > fcfs.numbers["fairness"]
    assert weighted.tenants["a"]["contended_share"] == pytest.approx(0.75, abs=0.06)


def test_shared_prefixes_are_found_and_nothing_else_is() -> None:
    _, plain = simulated(drawn(requests=100))
    assert plain.numbers["hit_rate"] == 0
    trace = drawn(requests=100, prompt=Lengths("fixed", 32), prefixes=2, prefix_tokens=96)
    _, shared = simulated(trace)
    assert 0.5 < shared.numbers["hit_rate"] <= 0.75
    _, off = simulated(trace, CoreConfig(enable_prefix_cache=False))
    assert off.numbers["hit_rate"] == 0


@pytest.mark.parametrize("target_ms", [2.2, 4.0])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_target_for_the_time_between_tokens_is_kept_and_prompts_get_what_it_leaves(
    target_ms: float, depth: int
) -> None:
    """Prompts of up to 2,400 tokens on a device whose step of 16 decodes takes 1.2 to 1.5 ms, 5 µs a prompt token."""
    shape = MODEL.executor.model_copy(update={"max_tokens_per_step": 2048, "max_context": 4096, "num_blocks": 4000})
    model = MODEL.model_copy(update={"executor": shape})
    trace = drawn(requests=150, rate=40.0, prompt=Lengths("uniform", 100, 2400), output=Lengths("uniform", 20, 80))
    config = CoreConfig(pipeline_depth=depth)
    free, _ = simulated(trace, config, IDEAL, model)
    steered, results = simulated(trace, dataclasses.replace(config, target_itl_ms=target_ms), IDEAL, model)
    assert free.measures.gaps.percentile_ns(99) > 2 * target_ms * 1e6
    assert results.numbers["p99_itl_ms"] <= target_ms and results.all_served
    steps = steered.measures.steps.rows()
    mixed = steps[(steps["decode_tokens"] > 0) & (steps["prefill_tokens"] > 0)][50:]
    full = (mixed["end_ns"] - mixed["start_ns"]) / 1e6
    assert np.percentile(full, 75) >= 0.8 * target_ms, "steps with prompts take what the target allows"


def test_preemptions_do_not_change_what_is_generated() -> None:
    model = MODEL.model_copy(update={"executor": MODEL.executor.model_copy(update={"num_blocks": 40})})
    trace = drawn(requests=80, rate=500.0, prompt=Lengths("uniform", 1, 100), output=Lengths("uniform", 1, 200))
    simulation, results = simulated(trace, model=model)
    assert results.numbers["preemptions"] > 0
    assert (simulation.measures.tokens == trace.output_tokens).all()
    assert (simulation.measures.end >= simulation.measures.first).all()


def test_the_same_seed_gives_the_same_report() -> None:
    def once() -> tuple[bytes, dict[str, object]]:
        trace = drawn(prefixes=2, prefix_tokens=20, tenants=(("a", 2.0), ("b", 1.0)))
        simulation, results = simulated(trace, CoreConfig(max_prefill_chunk=64))
        return simulation.measures.steps.rows().tobytes(), results.as_json()

    assert once() == once()


def test_the_work_of_a_step_is_what_its_plan_says() -> None:
    trace = drawn(requests=100)
    simulation, results = simulated(trace)
    steps = simulation.measures.steps.rows()
    assert results.numbers["preemptions"] == 0
    assert steps["prefill_tokens"].sum() == trace.prompt_tokens.sum()
    # The last prefill chunk of each request samples its first token.
    assert steps["decode_tokens"].sum() == trace.output_tokens.sum() - len(trace)
    assert (steps["end_ns"] >= steps["start_ns"]).all() and (np.diff(steps["start_ns"]) >= 0).all()
    cost = MODEL.costs[0]
    busy = steps["num_sequences"] > 0
    expected = (
        cost.base_us
        + cost.decode_row_us * steps["decode_tokens"]
        + cost.prefill_token_us * steps["prefill_tokens"]
        + cost.context_token_us * steps["context_tokens"]
    )
    assert ((steps["end_ns"] - steps["start_ns"])[busy] / 1000) == pytest.approx(expected[busy], abs=0.002)


@pytest.mark.parametrize("changes", [{"num_executors": 0}, {"num_executors": 65}, {"network_us": -1}, {"loop_us": -1}])
def test_wrong_setups_name_the_field(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        Setup(**changes)  # type: ignore[arg-type]
