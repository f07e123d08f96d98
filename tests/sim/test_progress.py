"""No configuration and no pattern of arrivals stands still or starves: the same promises under every policy."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.policies.registry import POLICIES
from tests.fakes.toy_executor import toy_info
from tests.sim.harness import Sim

CONFIGS = st.builds(
    CoreConfig,
    policy=st.sampled_from(sorted(POLICIES)),
    pipeline_depth=st.integers(1, 4),
    max_num_seqs=st.sampled_from([1, 3, 8]),
    max_num_batched_tokens=st.sampled_from([8, 24, 64]),
    max_prefill_chunk=st.sampled_from([0, 5]),
    long_prefill_token_threshold=st.sampled_from([6, 20]),
    max_partial_prefills=st.sampled_from([0, 1, 2]),
    max_long_partial_prefills=st.sampled_from([0, 1]),
    target_itl_ms=st.sampled_from([0.0, 0.001, 5.0]),
    priority_aging_ms=st.sampled_from([0, 20]),
    max_preemptions=st.sampled_from([0, 1, 4]),
    enable_prefix_cache=st.booleans(),
)


@settings(max_examples=30, deadline=None)
@given(config=CONFIGS, blocks=st.sampled_from([18, 30, 200]), seed=st.integers(0, 1 << 20))
def test_something_moves_in_every_step_and_everyone_ends(config: CoreConfig, blocks: int, seed: int) -> None:
    """vllm#45414: nothing runs, many wait, and the cache is empty. Here each step computes something as long as anyone
    is there, whoever comes, leaves or was preempted; preemptions are bounded for each request (vllm#18115)."""
    sim, draw = Sim(config, toy_info(num_blocks=blocks)), random.Random(seed)
    for i in range(30):
        length = draw.choice([1, 4, 12, 40, 60])
        sim.submit(
            range(5 + i, 5 + i + length),
            draw.randint(1, 25),
            ignore_eos=True,
            priority=draw.randint(0, 3),
            tenant=draw.choice("abc"),
        )
        for _ in range(draw.randint(0, 4)):
            sim.fill()
            sim.deliver()
        if draw.random() < 0.1:
            sim.cancel(draw.choice([s.key for s in sim.scheduler.live_sequences()] or [1]))
        sim.pass_time(draw.choice([0, 3]))
    idle = 0
    while sim.scheduler.num_live:
        planned = len(sim.records)
        sim.fill()
        idle = 0 if any(record.plan.num_tokens for record in sim.records[planned:]) else idle + 1
        assert idle <= 2 * sim.depth, "nothing moves"
        assert sim.pending, "nothing is under way and nothing can be planned"
        sim.deliver()
        for sequence in sim.scheduler.live_sequences():
            assert sequence.preemptions <= config.max_preemptions
    sim.run()
    sim.assert_tokens()
    sim.assert_all_free()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_decodes_keep_their_pace_under_every_kind_of_arrival(policy: str) -> None:
    """sglang#32549: decodes starve under a stream of prefills. A sequence that decodes and is not preempted is in every
    step, whatever arrives beside it."""
    config = CoreConfig(policy=policy, max_num_batched_tokens=24, long_prefill_token_threshold=8, max_num_seqs=6)
    sim, draw = Sim(config, toy_info(num_blocks=1000)), random.Random(5)
    decoding = [sim.submit([5 + i, 6, 7], 60, ignore_eos=True, priority=9, tenant="d") for i in range(3)]
    while any(not sim.clients[key].tokens for key in decoding):
        sim.fill()
        sim.deliver()
    while all(len(sim.clients[key].tokens) + sim.depth < 60 for key in decoding):
        if sim.scheduler.num_waiting < 6:
            sim.submit(range(9, 9 + draw.choice([1, 20, 90])), 3, priority=draw.randint(0, 3), tenant="p")
        record = sim.plan()
        if record is None:
            sim.deliver()
        else:
            assert set(decoding) <= set(record.decode_keys.tolist())
    sim.run()
    sim.assert_tokens()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_who_was_preempted_runs_again_within_bounds(policy: str) -> None:
    """vllm#41951: a preempted request loses its place for ever. Here newcomers of no higher standing never pass it, so
    only those that already run can be before it."""
    sim = Sim(CoreConfig(policy=policy, max_num_seqs=4), toy_info(num_blocks=24, num_rows=68))
    came = 0
    waited: dict[int, int] = {}
    while came < 60 or sim.scheduler.num_live:
        if came < 60 and sim.scheduler.num_waiting < 5:
            sim.submit(range(5 + came, 17 + came), 20, ignore_eos=True, tenant="ab"[came % 2])
            came += 1
        sim.fill()
        sim.deliver()
        for sequence in sim.scheduler.live_sequences():
            gone = sequence.preemptions > 0 and sequence.row < 0
            waited[sequence.key] = waited.get(sequence.key, 0) + 1 if gone else 0
            assert waited[sequence.key] <= 90, "three others at most finish before it: 4 × 20 tokens and some steps"
    assert sim.scheduler.stats().preemptions > 0
    sim.run()
    sim.assert_tokens()


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("how", ["result", "lost", "cancel", "deadline"])
def test_parked_requests_hold_nobody_up_for_ever(policy: str, how: str) -> None:
    """vllm#53130: parked requests hold admission for ever. Here a parked one waits for results in flight and nothing
    else, and whatever happens to those, others enter."""
    sim = Sim(CoreConfig(policy=policy, max_num_seqs=2))
    deadline_ns = sim.now_ns + 50_000_000
    parked = sim.submit([5, 6, 7], 30, ignore_eos=True, deadline_ns=deadline_ns if how == "deadline" else 0)
    sim.fill()
    sim.deliver()
    sim.fill()
    sim.scheduler._planner.preempt(sim.scheduler.executors[0], sim.scheduler.live_sequences()[0].row)
    assert sim.scheduler.executors[0].num_parked == 1
    other = sim.submit([8, 6, 7], 5, ignore_eos=True)
    if how == "lost":
        sim.disconnect()
        sim.connect()
    elif how == "cancel":
        sim.cancel(parked)
    elif how == "deadline":
        sim.pass_time(60)
        assert sim.clients[parked].ends
    sim.run()
    assert sim.clients[other].reason is not None
    assert bool(sim.clients[parked].reason) == (how in ("result", "lost"))
    sim.assert_tokens()
    sim.assert_all_free()
