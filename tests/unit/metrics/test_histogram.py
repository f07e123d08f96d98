"""Counts by length, as Prometheus wants them."""

from hypothesis import given
from hypothesis import strategies as st

from common.metrics.histogram import BOUNDS_S, Histogram


def test_a_bound_belongs_to_the_bucket_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.add(value)
    histogram.add(1.2, times=3)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 7), ("+Inf", 8)]
    assert (histogram.count, histogram.sum_s) == (8, 14.0 + 3 * 1.2)


@given(values=st.lists(st.floats(0, 100), max_size=50))
def test_buckets_rise_to_the_count(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    totals = [total for _, total in histogram.buckets()]
    assert totals == sorted(totals) and totals[-1] == len(values) == histogram.count
    for bound, total in zip(BOUNDS_S, totals, strict=False):
        assert total == sum(value <= bound for value in values)
