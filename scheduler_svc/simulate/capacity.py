"""The highest request rate that keeps an objective: bracket by doubling, then bisect."""

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from common.config_sources import closest
from common.errors import ConfigError
from scheduler_svc.simulate.results import Results

_FORM: Final = re.compile(r"\s*([a-z0-9_]+)\s*(<=|>=|<|>)\s*([0-9.eE+-]+)\s*")
_OPERATORS: Final[dict[str, Callable[[float, float], bool]]] = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_MAX_DOUBLINGS: Final = 24


@dataclass(frozen=True, slots=True)
class Objective:
    """`number` is a name in Results.numbers."""

    number: str
    comparison: str
    limit: float

    def __str__(self) -> str:
        return f"{self.number}{self.comparison}{self.limit:g}"

    def value(self, results: Results) -> float:
        """Raises ConfigError when there is no such number."""
        if self.number not in results.numbers:
            hint = closest(self.number, list(results.numbers))
            raise ConfigError(f"find_capacity: no number {self.number!r}{hint}", field="find_capacity")
        return results.numbers[self.number]

    def holds(self, results: Results) -> bool:
        """Never when a request was refused or ended early: who is not served is not served in time."""
        value = self.value(results)
        return results.all_served and not math.isnan(value) and _OPERATORS[self.comparison](value, self.limit)


def parse_objective(text: str) -> Objective:
    """`p99_ttft_ms<=500`. Raises ConfigError."""
    found = _FORM.fullmatch(text)
    try:
        if found is not None:
            return Objective(found[1], found[2], float(found[3]))
    except ValueError:
        pass
    raise ConfigError(f"find_capacity {text!r}: write an objective like p99_ttft_ms<=500", field="find_capacity")


@dataclass(frozen=True, slots=True)
class Probe:
    rate: float
    value: float
    holds: bool


@dataclass(frozen=True, slots=True)
class Capacity:
    """rate: the highest one found to hold (0: none); above: the lowest found not to (inf: none)."""

    objective: Objective
    rate: float
    above: float
    probes: tuple[Probe, ...]


def find_capacity(
    simulate: Callable[[float], Results],
    objective: Objective,
    start: float,
    precision: float = 0.03,
    watch: Callable[[Probe], None] | None = None,
) -> Capacity:
    """`simulate` runs the same requests at a rate. The objective is taken to hold below some rate and not above.

    Ends when the two rates are within `precision` of each other; `watch` sees each probe.
    """
    probes: list[Probe] = []

    def holds(rate: float) -> bool:
        results = simulate(rate)
        probe = Probe(rate, objective.value(results), objective.holds(results))
        probes.append(probe)
        if watch is not None:
            watch(probe)
        return probe.holds

    low, high = 0.0, math.inf
    rate = start
    for _ in range(_MAX_DOUBLINGS):
        if holds(rate):
            low = rate
            rate *= 2
        else:
            high = rate
            rate /= 2
        if low and high < math.inf:
            break
    while low and high < math.inf and high > low * (1 + precision):
        rate = math.sqrt(low * high)
        if holds(rate):
            low = rate
        else:
            high = rate
    return Capacity(objective, low, high, tuple(probes))
