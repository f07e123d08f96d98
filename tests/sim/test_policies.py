"""Who goes first, and instead of whom: priority, deadline, long and short prompts."""

import pytest

from common.errors import DeadlinePassed
from common.messages import StepPlan
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.policies.base import Policy
from scheduler_svc.core.policies.registry import POLICIES
from scheduler_svc.messages import FinishReason, Submit
from tests.fakes.toy_executor import toy_info
from tests.sim.harness import Sim


def _steps_until_token(sim: Sim, key: int) -> int:
    """Rounds of a full pipeline and one result until the request's first token."""
    steps = 0
    while not sim.clients[key].tokens:
        sim.fill()
        sim.deliver()
        steps += 1
        assert steps < 500
    return steps


def test_a_new_policy_is_a_class_and_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class LastFirst(Policy):
        def rank(self, request: Submit, order: int) -> int:
            return -order

    monkeypatch.setitem(POLICIES, "last-first", LastFirst)
    sim = Sim(CoreConfig(policy="last-first", max_num_seqs=1))
    keys = [sim.submit([5 + i, 6, 7], 3) for i in range(4)]
    sim.run()
    order = [int(r.prefill_keys[0]) for r in sim.records if len(r.prefill_keys)]
    assert order == keys[::-1]
    sim.assert_tokens()


# ------------------------------------------------------------------------------------------------------------ priority


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_high_priority_does_not_wait_behind_a_full_batch(depth: int) -> None:
    """vllm#40004."""
    sim = Sim(CoreConfig(policy="priority", max_num_seqs=3, pipeline_depth=depth))
    low = [sim.submit([5 + i, 6, 7], 100, ignore_eos=True) for i in range(3)]
    for _ in range(5):
        sim.fill()
        sim.deliver()
    high = sim.submit(range(20, 40), 10, priority=1, ignore_eos=True)
    assert _steps_until_token(sim, high) <= depth + 2
    stats = sim.scheduler.stats()
    assert stats.preemptions == 1, "one place was needed, one was made"
    victim = [s.key for s in sim.scheduler.live_sequences() if s.preemptions]
    assert victim == [low[-1]], "the last arrived of the lowest"
    sim.run()
    sim.assert_tokens()
    sim.assert_all_free()


def test_high_priority_gets_the_blocks_of_lower_ones() -> None:
    sim = Sim(CoreConfig(policy="priority"), toy_info(num_blocks=20))
    low = [sim.submit(range(5 + i, 25 + i), 12, ignore_eos=True) for i in range(3)]  # 15 blocks, 24 in the end
    for _ in range(3):
        sim.fill()
        sim.deliver()
    high = sim.submit(range(30, 62), 5, priority=3, ignore_eos=True)  # nine blocks
    assert _steps_until_token(sim, high) <= 8
    sim.run()
    assert all(sim.clients[key].reason for key in (*low, high))
    sim.assert_tokens()
    sim.assert_all_free()


def test_equals_never_evict_each_other_and_what_would_not_help_is_not_done() -> None:
    sim = Sim(CoreConfig(policy="priority", max_num_seqs=2))
    for i in range(5):
        sim.submit([5 + i, 6, 7], 20, priority=1, ignore_eos=True)
    sim.run()
    assert sim.scheduler.stats().preemptions == 0
    sim = Sim(CoreConfig(policy="priority"), toy_info(num_blocks=20))
    big = sim.submit(range(5, 55), 20, priority=5, ignore_eos=True)  # 13 blocks, 18 in the end
    small = sim.submit([5, 6, 7], 9, priority=0, ignore_eos=True)
    for _ in range(2):
        sim.fill()
        sim.deliver()
    high = sim.submit(range(80, 120), 5, priority=4, ignore_eos=True)  # ten: not even with small's
    while sim.clients[small].reason is None:
        assert not any(s.preemptions for s in sim.scheduler.live_sequences())
        sim.fill()
        sim.deliver()
    sim.run()
    assert sim.clients[big].reason and sim.clients[high].reason
    sim.assert_tokens()


def test_who_was_passed_by_a_shorter_prompt_does_not_evict_it() -> None:
    """It came before, and is no more important."""
    config = CoreConfig(policy="priority", max_num_seqs=2, long_prefill_token_threshold=8, max_long_partial_prefills=1)
    sim = Sim(config)
    long = [sim.submit(range(5 + i, 45 + i), 9, ignore_eos=True) for i in range(2)]
    short = sim.submit([5, 6, 7], 60, ignore_eos=True)
    _steps_until_token(sim, short)
    assert not sim.clients[long[1]].tokens
    sim.run()
    assert sim.scheduler.stats().preemptions == 0
    sim.assert_tokens()


def test_room_is_made_on_one_executor_only() -> None:
    """Also while what was made there has to wait for results in flight."""
    one = Sim(CoreConfig(policy="priority"), toy_info(num_rows=2, max_num_seqs=2))
    other = Sim(info=toy_info(num_rows=2, max_num_seqs=2), beside=one)
    for i in range(4):
        one.submit([5 + i, 6, 7], 40, ignore_eos=True)
    for _ in range(4):
        for sim in (one, other):
            sim.fill()
            sim.deliver()
    high = one.submit([30, 6, 7], 4, priority=1, ignore_eos=True)
    while one.scheduler.num_live:
        for sim in (one, other):
            sim.fill()
        for sim in (one, other):
            sim.deliver()
    assert one.clients[high].reason and one.scheduler.stats().preemptions == 1
    one.assert_tokens()


def test_evictions_are_bounded_for_each_request() -> None:
    sim = Sim(CoreConfig(policy="priority", max_num_seqs=1, max_preemptions=2))
    low = sim.submit([5, 6, 7], 40, ignore_eos=True)
    for i in range(12):
        for _ in range(3):
            sim.fill()
            sim.deliver()
        sim.submit([8 + i, 6, 7], 4, priority=1 + i, ignore_eos=True)
    sim.run()
    assert 0 < sim.scheduler.stats().preemptions <= 2 * 13
    assert sim.clients[low].reason == FinishReason.MAX_TOKENS
    sim.assert_tokens()
    sim.assert_all_free()


def _passed_by(aging_ms: int) -> int:
    """How many later ones of a higher priority a low one lets pass; one comes every 10 ms, for ever."""
    sim = Sim(CoreConfig(policy="priority", max_num_seqs=1, priority_aging_ms=aging_ms, max_preemptions=0))
    sim.submit([4, 6, 7], 6, priority=2, ignore_eos=True)
    low = sim.submit([5, 6, 7], 2, ignore_eos=True)
    passed = 0
    while not sim.clients[low].tokens and passed < 60:
        sim.submit([6 + passed, 6, 7], 2, priority=2, ignore_eos=True)
        passed += 1
        sim.pass_time(10)
        sim.fill()
        sim.deliver()
    sim.run()
    sim.assert_tokens()
    return passed


@pytest.mark.parametrize(("levels", "evicted"), [(1, 0), (2, 1)])
def test_with_aging_an_evicted_one_stands_a_whole_level_behind(levels: int, evicted: int) -> None:
    """One level, half of which the running one has aged already, is not enough."""
    sim = Sim(CoreConfig(policy="priority", max_num_seqs=1, priority_aging_ms=100))
    sim.submit([5, 6, 7], 30, ignore_eos=True)
    for _ in range(3):
        sim.fill()
        sim.deliver()
    sim.pass_time(50)
    sim.submit([6, 6, 7], 5, priority=levels, ignore_eos=True)
    sim.run()
    assert sim.scheduler.stats().preemptions == evicted
    sim.assert_tokens()


def test_priority_starves_by_design_and_aging_bounds_it() -> None:
    assert _passed_by(0) == 60
    assert _passed_by(50) < 40  # two levels of 50 ms each, ten requests, and their time to run


# ------------------------------------------------------------------------------------------------------------ deadline


def test_the_earliest_deadline_goes_first_and_who_has_none_is_not_passed_for_ever() -> None:
    sim = Sim(CoreConfig(policy="deadline", max_num_seqs=1))
    s = 1_000_000_000
    late, none, early = (sim.submit([5 + i, 6, 7], 3, deadline_ns=d) for i, d in enumerate((90 * s, 0, 5 * s)))
    sim.run()
    assert [int(r.prefill_keys[0]) for r in sim.records if len(r.prefill_keys)] == [early, none, late]


def test_deadlines_over_an_hour_away_count_as_an_hour() -> None:
    """Else those a day away would be passed for ever by ones two hours away."""
    sim = Sim(CoreConfig(policy="deadline", max_num_seqs=1))
    day = sim.submit([5, 6, 7], 3, deadline_ns=86_400_000_000_000)
    sim.clock.advance_ns(1_000_000_000)
    two_hours = sim.submit([6, 6, 7], 3, deadline_ns=7_200_000_000_000)
    sim.run()
    assert [int(r.prefill_keys[0]) for r in sim.records if len(r.prefill_keys)] == [day, two_hours]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_deadlines_end_work_under_every_policy(policy: str) -> None:
    sim = Sim(CoreConfig(policy=policy, max_num_seqs=2))
    start, ms = sim.now_ns, 1_000_000
    running = sim.submit([5, 6, 7], 100, deadline_ns=start + 20 * ms, ignore_eos=True)
    other = sim.submit([6, 6, 7], 20, deadline_ns=start + 10_000 * ms, ignore_eos=True)
    waiting = sim.submit([7, 6, 7], 100, deadline_ns=start + 30 * ms)
    for _ in range(5):
        sim.clock.advance_ns(5 * ms)
        sim.fill()
        sim.deliver()  # a result is enough for the core to look
    assert isinstance(sim.clients[running].error, DeadlinePassed) and sim.clients[running].tokens
    assert sim.clients[waiting].reason is None and sim.scheduler.next_expiry_ns == start + 30 * ms
    sim.disconnect()
    sim.pass_time(10)  # the clock alone is enough too
    assert isinstance(sim.clients[waiting].error, DeadlinePassed)
    sim.run()
    assert sim.clients[other].reason is not None
    assert sim.scheduler.stats().requests_expired == 2
    sim.assert_tokens()
    sim.assert_all_free()


def test_a_deadline_that_has_passed_is_refused() -> None:
    sim = Sim()
    sim.pass_time(10)
    with pytest.raises(DeadlinePassed):
        sim.submit([5, 6, 7], 5, deadline_ns=sim.now_ns - 5_000_000)
    assert sim.scheduler.num_live == 0 and sim.scheduler.stats().requests_refused == 1


def _run_timed(sim: Sim, step_ms: float = 10.0) -> None:
    while sim.scheduler.num_live or sim.pending:
        sim.fill()
        sim.clock.advance_ns(int(step_ms * 1e6))
        sim.deliver()
    sim.run()  # tells the executor the last releases


def test_what_can_not_make_its_deadline_by_the_measured_speed_is_refused() -> None:
    sim = Sim(CoreConfig(policy="deadline", pipeline_depth=1))
    sim.submit(range(5, 45), 30, ignore_eos=True)
    _run_timed(sim)  # 10 ms a step
    now = sim.now_ns
    with pytest.raises(DeadlinePassed, match="at least"):
        sim.submit([5, 6, 7], 50, ignore_eos=True, deadline_ns=now + 300_000_000)
    easy = sim.submit([5, 6, 7], 50, ignore_eos=True, deadline_ns=now + 900_000_000)
    open_end = sim.submit([6, 6, 7], 50, deadline_ns=now + 100_000_000)  # an EOS may come in time
    _run_timed(sim)
    assert sim.clients[easy].reason == FinishReason.MAX_TOKENS
    assert sim.clients[open_end].tokens
    sim.assert_tokens()
    sim.assert_all_free()


def test_prompt_tokens_in_the_prefix_cache_need_no_time() -> None:
    sim = Sim(CoreConfig(policy="deadline", pipeline_depth=1, max_prefill_chunk=4))
    for start in (10, 100):  # steps of 10 ms, each with 4 prompt tokens or 1 generated one
        sim.submit(range(start, start + 40), 30, ignore_eos=True)
        _run_timed(sim)
    deadline_ns = sim.now_ns + 40_000_000
    with pytest.raises(DeadlinePassed, match="at least"):
        sim.submit(range(200, 240), 1, ignore_eos=True, deadline_ns=deadline_ns)
    found = sim.submit(range(100, 140), 1, ignore_eos=True, deadline_ns=deadline_ns)
    _run_timed(sim)
    assert sim.clients[found].reason == FinishReason.MAX_TOKENS and sim.clients[found].cached == 36


def test_what_can_no_longer_make_its_deadline_does_not_begin() -> None:
    sim = Sim(CoreConfig(policy="deadline", pipeline_depth=1, max_num_seqs=1))
    sim.submit(range(5, 45), 30, ignore_eos=True)
    _run_timed(sim)
    now = sim.now_ns
    first = sim.submit([5, 6, 7], 40, ignore_eos=True, deadline_ns=now + 500_000_000)
    second = sim.submit([6, 6, 7], 40, ignore_eos=True, deadline_ns=now + 600_000_000)
    _run_timed(sim)
    assert sim.clients[first].reason == FinishReason.MAX_TOKENS
    assert isinstance(sim.clients[second].error, DeadlinePassed) and not sim.clients[second].tokens
    assert not any(second in record.prefill_keys for record in sim.records), "no step was wasted on it"
    sim.assert_all_free()


# -------------------------------------------------------------------------------------------------------- long prompts


def _chunks(plan: StepPlan) -> list[int]:
    return [int(count) for count in plan.prefill_counts]


def test_a_long_prompt_takes_its_threshold_and_shorter_ones_use_the_rest() -> None:
    config = CoreConfig(long_prefill_token_threshold=16, max_num_batched_tokens=48)
    sim = Sim(config)
    sim.submit(range(5, 105), 3)
    sim.submit(range(5, 21), 3)
    sim.plan()
    assert _chunks(sim.records[0].plan) == [16, 16]
    sim.run()
    assert all(max(_chunks(r.plan), default=0) <= 16 for r in sim.records)
    sim.assert_tokens()


def test_shorter_prompts_pass_long_ones_within_the_caps() -> None:
    config = CoreConfig(
        long_prefill_token_threshold=8, max_long_partial_prefills=1, max_partial_prefills=3, max_num_batched_tokens=20
    )
    sim = Sim(config)
    long = [sim.submit(range(5 + i, 65 + i), 3) for i in range(3)]
    short = [sim.submit([5 + i, 6, 7], 3) for i in range(5)]
    admitted: list[int] = []
    while sim.scheduler.num_live:
        record = sim.plan()
        if record is None:
            sim.deliver()
            continue
        admitted += [k for k in record.prefill_keys.tolist() if k not in admitted]
        rows = sim.scheduler.executors[0]
        keys = [int(rows.rows.keys[row]) for row in rows.prefilling]
        assert len(keys) <= 3 and len(set(keys) & set(long)) <= 1
    assert admitted[0] == long[0] and set(admitted[1:6]) == set(short)
    assert admitted[6:] == long[1:]
    sim.run()
    sim.assert_tokens()
    sim.assert_all_free()


def test_a_stream_of_short_prompts_does_not_starve_long_ones() -> None:
    config = CoreConfig(
        long_prefill_token_threshold=8, max_long_partial_prefills=1, max_num_batched_tokens=16, max_num_seqs=4
    )
    sim = Sim(config, toy_info(num_blocks=60))
    long = [sim.submit(range(5 + i, 55 + i), 3) for i in range(3)]
    steps = 0
    while any(sim.clients[key].reason is None for key in long):
        if sim.scheduler.num_waiting < 12:
            sim.submit([5 + steps % 90, 6, 7], 3)
        sim.fill()
        sim.deliver()
        steps += 1
        assert steps < 400, "the long ones starve"
    sim.run()
    sim.assert_tokens()


def test_one_partial_prefill_at_a_time() -> None:
    sim = Sim(CoreConfig(max_partial_prefills=1, max_prefill_chunk=8))
    for i in range(4):
        sim.submit(range(5 + i, 30 + i), 3)
    while sim.scheduler.num_live:
        if sim.plan() is None:
            sim.deliver()
        assert len(sim.scheduler.executors[0].prefilling) <= 1
    sim.run()
    sim.assert_tokens()
