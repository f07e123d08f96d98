"""When windows open and close, what counts as slow, which requests are sampled: no OpenTelemetry, no real time."""

from common.clock import ManualClock
from scheduler_svc.trace_policy import (
    MAX_REQUEST_SPANS,
    MAX_TRACE_SPANS,
    SECOND_NS,
    SlowSteps,
    TokenBucket,
    TraceAllowance,
    WindowLimits,
    WindowPolicy,
)

STEP_NS = 10_000_000


def test_bucket_gives_its_burst_then_its_rate() -> None:
    clock = ManualClock()
    bucket = TokenBucket(SECOND_NS, 3)
    assert [bucket.try_take(clock.monotonic_ns()) for _ in range(4)] == [True, True, True, False]
    assert bucket.next_ns(clock.monotonic_ns()) == clock.monotonic_ns() + SECOND_NS
    clock.advance_ns(SECOND_NS - 1)
    assert not bucket.try_take(clock.monotonic_ns())
    clock.advance_ns(1)
    assert bucket.try_take(clock.monotonic_ns())
    assert not bucket.try_take(clock.monotonic_ns())


def test_bucket_keeps_a_reserve() -> None:
    bucket = TokenBucket(SECOND_NS, 2)
    assert bucket.try_take(0, keep=1)
    assert not bucket.try_take(0, keep=1)
    assert bucket.next_ns(0, keep=1) == SECOND_NS
    assert bucket.try_take(0)
    assert bucket.next_ns(0, keep=1) == 2 * SECOND_NS
    bucket.give_back()
    assert bucket.tokens(0) == 1


def test_bucket_never_saves_up_more_than_its_capacity() -> None:
    bucket = TokenBucket(SECOND_NS, 2)
    bucket.try_take(0)
    assert bucket.tokens(1000 * SECOND_NS) == 2


def opened(policy: WindowPolicy, clock: ManualClock, seconds: int) -> list[str]:
    """Asks before each step for so long, no window staying open."""
    reasons = []
    for _ in range(seconds * SECOND_NS // STEP_NS):
        reasons.append(policy.may_open(clock.monotonic_ns()))
        clock.advance_ns(STEP_NS)
    return [reason for reason in reasons if reason]


def test_periodic_windows_keep_to_the_interval() -> None:
    policy, clock = WindowPolicy(WindowLimits()), ManualClock()
    assert opened(policy, clock, 60) == ["periodic"] * 12


def test_a_request_finds_a_window_at_once_and_the_rate_still_holds() -> None:
    policy, clock = WindowPolicy(WindowLimits()), ManualClock()
    opened(policy, clock, 20)
    policy.request_came(1)
    assert policy.may_open(clock.monotonic_ns()) == "request"
    policy.request_seen(1)
    # The saved token is spent: the next periodic window waits until it is saved up again.
    assert len(opened(policy, clock, 60)) <= 11


def test_many_requests_share_the_budget() -> None:
    policy, clock = WindowPolicy(WindowLimits()), ManualClock()
    count = 0
    for step in range(60 * SECOND_NS // STEP_NS):
        policy.request_came(step)
        policy.request_runs(step)
        if policy.may_open(clock.monotonic_ns()):
            count += 1
            for key in range(step + 1):
                policy.request_seen(key)
        clock.advance_ns(STEP_NS)
    assert count <= 60 // 5 + 2


def test_a_request_that_found_no_window_gets_one_while_it_runs() -> None:
    policy, clock = WindowPolicy(WindowLimits()), ManualClock()
    for key in (1, 2):
        policy.request_came(key)
        assert policy.may_open(clock.monotonic_ns()) == "request"
        policy.request_seen(key)
    policy.request_came(3)
    assert policy.may_open(clock.monotonic_ns()) == ""
    policy.request_runs(3)
    assert opened(policy, clock, 6) == ["request"]


def test_a_queued_request_spends_one_window_not_all() -> None:
    policy, clock = WindowPolicy(WindowLimits()), ManualClock()
    policy.request_came(1)
    assert policy.may_open(clock.monotonic_ns()) == "request"
    clock.advance_ns(60 * SECOND_NS)
    assert opened(policy, clock, 1) == ["periodic"]
    policy.request_runs(1)
    assert policy.may_open(clock.monotonic_ns()) == "request"


def test_a_request_that_left_asks_for_nothing() -> None:
    policy, clock = WindowPolicy(WindowLimits()), ManualClock()
    policy.request_came(1)
    policy.request_runs(1)
    policy.request_seen(1)
    assert policy.may_open(clock.monotonic_ns()) == "periodic"


def test_a_window_ends_after_its_steps_or_a_pause() -> None:
    policy = WindowPolicy(WindowLimits(max_steps=32, max_gap_ns=SECOND_NS))
    assert not policy.is_over(5, 31, 0)
    assert policy.is_over(5, 32, 0)
    assert not policy.is_over(SECOND_NS, 1, 0)
    assert policy.is_over(SECOND_NS + 1, 1, 0)


def test_slow_steps_are_far_above_their_kind() -> None:
    slow = SlowSteps()
    now = 0
    for _ in range(200):
        now += 10_000_000
        assert not slow.is_slow(now, 10_000_000, 0)
        assert not slow.is_slow(now, 300_000_000, 300)  # prefill: 1 ms a token
    assert not slow.is_slow(now, 45_000_000, 0)
    assert slow.is_slow(now, 200_000_000, 0)
    assert not slow.is_slow(now, 200_000_000, 0), "the budget is spent"
    now += 5 * SECOND_NS
    assert slow.is_slow(now, 200_000_000, 0)


def test_short_steps_are_never_slow_and_the_first_steps_only_teach() -> None:
    slow = SlowSteps()
    assert not any(slow.is_slow(0, took, 0) for took in [10**9] + [100_000] * 31)
    assert not slow.is_slow(0, 19_000_000, 0)


def test_a_fixed_threshold() -> None:
    slow = SlowSteps(threshold_ns=50_000_000)
    assert not slow.is_slow(0, 49_000_000, 0)
    assert slow.is_slow(0, 50_000_000, 7)


def test_no_trace_gets_more_spans_than_it_may_have() -> None:
    allowance = TraceAllowance()
    granted = sum(allowance.reserve(7, MAX_REQUEST_SPANS) for _ in range(100))
    assert granted * MAX_REQUEST_SPANS <= MAX_TRACE_SPANS
    assert not allowance.reserve(7, MAX_REQUEST_SPANS)
    assert allowance.reserve(8, MAX_REQUEST_SPANS)
    allowance.give_back(7, MAX_REQUEST_SPANS)
    assert allowance.reserve(7, MAX_REQUEST_SPANS)


def test_the_allowance_forgets_old_traces_and_stays_bounded() -> None:
    allowance = TraceAllowance()
    for trace_id in range(1, 3 * TraceAllowance.MAX_TRACES):
        assert allowance.reserve(trace_id, MAX_REQUEST_SPANS)
    assert len(allowance._used) <= TraceAllowance.MAX_TRACES
    allowance.give_back(1, 5)  # forgotten: nothing happens


def test_requests_of_no_trace_are_sampled_at_a_bounded_rate() -> None:
    allowance, clock = TraceAllowance(), ManualClock()
    sampled = 0
    for _ in range(10_000):
        sampled += allowance.allows_root(clock.monotonic_ns())
        clock.advance_ns(1_000_000)
    assert sampled <= 10 * 10 + 20
