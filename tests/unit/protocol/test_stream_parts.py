import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.clock import ManualClock
from common.errors import ProtocolError
from common.messages import NO_TIMINGS, Output, OutputChunk, OutputKind, Timings
from common.wire_result import decode_output_chunk, output_chunks
from scheduler_svc.liveness import BEAT_S, STUCK_AFTER_BEATS, Liveness, until_next_beat
from scheduler_svc.stream_parts import Backoff, ClockEstimate, Exchange, OutputJoiner


def test_backoff_doubles_to_its_bound_and_starts_over() -> None:
    backoff = Backoff(0.1, 0.5)
    assert [backoff.next_s() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    backoff.reset()
    assert backoff.next_s() == 0.1


def test_clock_estimate_takes_the_offset_of_the_quickest_ping() -> None:
    estimate = ClockEstimate(window=4)
    offset = 1_000_000
    for out, held, back in ((50, 5, 950), (100, 20, 100), (400, 0, 100)):
        sent = 10_000
        received = sent + out + offset
        estimate.add(sent, received, received + held, sent + out + held + back)
    assert estimate.offset_ns == offset
    assert estimate.rtt_ns == 500  # the median of 1000, 200 and 500
    for _ in range(4):
        estimate.add(0, 2_000_300, 2_000_300, 600)
    assert (estimate.offset_ns, estimate.rtt_ns) == (2_000_000, 600)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=20),
    st.integers(-(10**9), 10**9),
)
def test_clock_estimate_errs_by_half_of_the_quickest_round_trip_at_most(
    trips: list[tuple[int, int]], offset: int
) -> None:
    estimate = ClockEstimate(window=20)
    for out, back in trips:
        estimate.add(0, out + offset, out + offset, out + back)
    assert abs(estimate.offset_ns - offset) <= min(out + back for out, back in trips) / 2 + 1


def test_the_first_step_of_an_interval_is_its_ping() -> None:
    clock, estimate, exchange = ManualClock(), ClockEstimate(), Exchange()
    start_ns, offset_ns = clock.monotonic_ns(), 5_000_000

    def answered(step_id: int, received_ns: int, held_ns: int) -> None:
        there_ns = received_ns + offset_ns
        exchange.answered(step_id, Timings(there_ns, sent_ns=there_ns + held_ns), estimate, clock)

    exchange.sent(7, clock)
    clock.advance_ns(100)
    exchange.sent(8, clock)
    clock.advance_ns(900)
    answered(7, start_ns + 10, 980)
    assert (estimate.offset_ns, estimate.rtt_ns) == (offset_ns, 20)
    clock.advance_ns(1000)
    answered(8, start_ns + 1, 1)  # one was enough
    assert (estimate.offset_ns, estimate.rtt_ns) == (offset_ns, 20)
    assert exchange.start_interval() and not exchange.start_interval()
    exchange.sent(9, clock)
    exchange.answered(9, NO_TIMINGS, estimate, clock)
    assert not exchange.start_interval(), "an executor that tells no times is pinged"
    exchange.sent(10, clock)
    assert not exchange.start_interval(), "a step that takes longer tells nothing in between"
    answered(10, clock.monotonic_ns(), 0)
    assert not exchange.start_interval()


@given(st.integers(0, 10**9), st.sampled_from([1.0, 0.05, 2.0]))
def test_what_is_done_each_second_is_done_at_one_moment(now_ms: int, interval_s: float) -> None:
    delay_s = until_next_beat(now_ms / 1000, interval_s)
    assert interval_s / 2 < delay_s <= 1.5 * interval_s + 1e-6
    beats = (now_ms / 1000 + delay_s) / interval_s
    assert abs(beats - round(beats)) < 1e-3


def whole(step: int, row: int, size: int) -> Output:
    return Output(step, OutputKind.RAW_LOGITS, row, row + 100, 9, 1, bytes(i % 251 for i in range(size)))


def chunks_of(output: Output) -> list[OutputChunk]:
    return [decode_output_chunk(chunk) for chunk in output_chunks(1, output)]


def test_chunks_of_several_outputs_and_steps_are_joined() -> None:
    joiner = OutputJoiner()
    first, second, later = whole(1, 3, 600_000), whole(1, 4, 10), whole(2, 3, 300_000)
    pieces = [*chunks_of(first), *chunks_of(second)]
    for i, chunk in enumerate(pieces):
        assert not joiner.has(1, 600_010), i
        joiner.add(chunk)
    for chunk in chunks_of(later):
        joiner.add(chunk)
    assert joiner.has(1, 600_010) and joiner.has(2, 300_000)
    assert joiner.take(1) == (first, second)
    assert joiner.take(2) == (later,)
    assert joiner.take(3) == ()


def test_a_chunk_out_of_place_is_refused() -> None:
    first, second, third = chunks_of(whole(1, 3, 600_000))
    joiner = OutputJoiner()
    with pytest.raises(ProtocolError, match="offset"):
        joiner.add(second)
    joiner.add(first)
    with pytest.raises(ProtocolError, match="offset"):
        joiner.add(third)
    with pytest.raises(ProtocolError, match="offset"):
        joiner.add(first)
    with pytest.raises(ProtocolError, match="of 600000 bytes"):
        joiner.take(1)


def test_alive_while_the_loop_turns_and_work_moves() -> None:
    second = int(BEAT_S * 1e9)
    liveness = Liveness(0)
    for beat in range(1, 40):
        assert not liveness.beat(beat * second, steps=beat, in_flight=0, live=3, connected=True)
    for beat in range(40, 80):  # idle, or nobody to work
        assert not liveness.beat(beat * second, steps=39, in_flight=0, live=beat % 2, connected=not beat % 2)
    assert liveness.is_alive(79 * second)
    assert not liveness.is_alive((79 + STUCK_AFTER_BEATS) * second)


def test_not_alive_when_work_waits_and_nothing_is_planned() -> None:
    liveness = Liveness(0)
    told = [liveness.beat(beat, steps=0, in_flight=0, live=1, connected=True) for beat in range(STUCK_AFTER_BEATS + 5)]
    assert told.count(True) == 1
    assert not liveness.is_alive(STUCK_AFTER_BEATS)
    liveness.beat(100, steps=1, in_flight=0, live=1, connected=True)
    assert liveness.is_alive(100)
