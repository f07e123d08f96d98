"""The search for the highest rate that keeps an objective."""

import math

import pytest

from common.errors import ConfigError
from scheduler_svc.simulate.capacity import Probe, find_capacity, parse_objective
from scheduler_svc.simulate.lengths import Lengths
from scheduler_svc.simulate.results import Results
from scheduler_svc.simulate.workload import DrawnWorkload
from tests.unit.simulate.scenes import simulated

OBJECTIVE = parse_objective("p99_ttft_ms<=500")


def known(limit: float, served: bool = True) -> "Know":
    return Know(limit, served)


class Know:
    """A system whose TTFT passes 500 ms right at `limit` requests per second."""

    def __init__(self, limit: float, served: bool) -> None:
        self.limit, self.served = limit, served

    def __call__(self, rate: float) -> Results:
        finished = 10.0 if self.served else 9.0
        return Results({}, {"requests": 10.0, "finished": finished, "p99_ttft_ms": 500 * rate / self.limit})


@pytest.mark.parametrize("limit", [0.013, 0.9, 1.0, 77.7, 12_345.0])
@pytest.mark.parametrize("start", [0.5, 100.0])
def test_the_limit_is_found(limit: float, start: float) -> None:
    seen: list[Probe] = []
    capacity = find_capacity(known(limit), OBJECTIVE, start, watch=seen.append)
    assert limit / 1.03 <= capacity.rate <= limit * (1 + 1e-9)
    assert capacity.rate < capacity.above <= capacity.rate * 1.03
    assert capacity.probes == tuple(seen)


def test_what_is_never_kept_or_always_kept_ends() -> None:
    never = find_capacity(known(0.0 + 1e-30), OBJECTIVE, 1.0)
    assert never.rate == 0 and never.above < 1e-6
    always = find_capacity(known(1e30), OBJECTIVE, 1.0)
    assert always.above == math.inf and always.rate > 1e6


def test_who_is_not_served_is_not_served_in_time() -> None:
    assert find_capacity(known(5.0, served=False), OBJECTIVE, 1.0).rate == 0


def test_nothing_measured_keeps_nothing() -> None:
    assert not OBJECTIVE.holds(Results({}, {"requests": 1.0, "finished": 1.0, "p99_ttft_ms": math.nan}))


@pytest.mark.parametrize("text", ["p99_ttft_ms", "p99_ttft_ms<=", "<=5", "p99_ttft_ms==5", "p99_ttft_ms<=x", "a<=1e"])
def test_wrong_objectives(text: str) -> None:
    with pytest.raises(ConfigError, match="find_capacity"):
        parse_objective(text)


def test_an_unknown_number_names_the_closest() -> None:
    with pytest.raises(ConfigError, match="p99_ttft_ms"):
        find_capacity(known(1.0), parse_objective("p99_tftt_ms<=5"), 1.0)


@pytest.mark.parametrize(("text", "kept"), [("hit_rate>=0.5", True), ("hit_rate>0.5", False), ("hit_rate < 0.6", True)])
def test_comparisons(text: str, kept: bool) -> None:
    results = Results({}, {"requests": 1.0, "finished": 1.0, "hit_rate": 0.5})
    assert parse_objective(text).holds(results) == kept


def test_the_real_core_has_a_capacity() -> None:
    """16 rows of a device whose steps take a little over 1 ms: the rate must lie near what a full batch brings."""
    workload = DrawnWorkload(requests=60, output=Lengths("fixed", 16))
    objective = parse_objective("p95_ttft_ms<=20")
    once, again = (
        find_capacity(lambda rate: simulated(workload.trace(rate))[1], objective, 100.0, precision=0.3)
        for _ in range(2)
    )
    assert 50 < once.rate < 800
    assert once == again
