"""Drawn workloads: Poisson arrivals, bursts, closed loops; the same seed gives the same requests at every rate."""

from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from scheduler_svc.simulate.lengths import Lengths
from scheduler_svc.simulate.trace import I64, Trace

_S = 1_000_000_000


class Workload(Protocol):
    def trace(self, rate: float | None = None) -> Trace:
        """The requests; `rate` (requests per second, on average) instead of the workload's own.

        Raises ConfigError when a rate means nothing to it.
        """
        ...


@dataclass(frozen=True)
class DrawnWorkload:
    """rate: requests per second on average, Poisson. burst: (on, off) seconds; everything arrives while it is on.
    concurrency: instead of a rate, so many callers who wait for their answer and ask again. prefixes: so many shared
    prefixes of `prefix_tokens` tokens; each prompt begins with one of them and `prompt` more tokens follow. tenants and
    priorities: shares of the requests."""

    requests: int = 1000
    rate: float = 1.0
    prompt: Lengths = field(default_factory=lambda: Lengths("fixed", 256))
    output: Lengths = field(default_factory=lambda: Lengths("fixed", 128))
    burst: tuple[float, float] | None = None
    concurrency: int = 0
    prefixes: int = 0
    prefix_tokens: int = 0
    tenants: tuple[tuple[str, float], ...] = (("", 1.0),)
    priorities: tuple[tuple[int, float], ...] = ((0, 1.0),)
    deadline_s: float = 0.0
    seed: int = 1

    def __post_init__(self) -> None:
        """Raises ConfigError naming the field that is out of range."""
        checks = {
            "requests": self.requests >= 1,
            "rate": 0 < self.rate < inf,
            "burst": self.burst is None or (self.burst[0] > 0 and self.burst[1] >= 0),
            "concurrency": self.concurrency >= 0 and not (self.concurrency and self.burst),
            "prefixes": self.prefixes >= 0 and bool(self.prefixes) == bool(self.prefix_tokens),
            "prefix_tokens": self.prefix_tokens >= 0,
            "deadline_s": 0 <= self.deadline_s < inf,
            "seed": self.seed >= 0,
        }
        for name, fine in checks.items():
            if not fine:
                raise ConfigError(f"{name}: {getattr(self, name)} is out of range or contradicts others", field=name)

    def trace(self, rate: float | None = None) -> Trace:
        if rate is not None and self.concurrency:
            raise ConfigError("rate: a closed loop has none", field="rate")
        if rate is not None and not 0 < rate < inf:
            raise ConfigError(f"rate: {rate} is not above 0, or without end", field="rate")
        # One generator for each column: no setting changes what another draws.
        times, prompts, outputs, prefixes, tenants, priorities = (
            np.random.default_rng((self.seed, 0, column)) for column in range(6)
        )
        n = self.requests
        prefix: I64 = np.full(n, -1, dtype=np.int64)
        if self.prefixes:
            prefix = prefixes.integers(self.prefixes, size=n, dtype=np.int64)
        return Trace(
            arrival_ns=np.zeros(n, dtype=np.int64) if self.concurrency else self._arrivals(times, rate or self.rate),
            prompt_tokens=self.prompt.draw(n, prompts) + self.prefix_tokens,
            output_tokens=self.output.draw(n, outputs),
            prefix=prefix,
            prefix_tokens=np.full(n, self.prefix_tokens, dtype=np.int64),
            tenant=_pick(tenants, n, [share for _, share in self.tenants]),
            priority=np.array([p for p, _ in self.priorities])[_pick(priorities, n, [s for _, s in self.priorities])],
            deadline_ns=np.full(n, int(self.deadline_s * _S), dtype=np.int64),
            tenants=tuple(name for name, _ in self.tenants),
            concurrency=self.concurrency,
            description=self._describe(rate or self.rate),
        )

    def _arrivals(self, rng: np.random.Generator, rate: float) -> I64:
        waits: NDArray[np.float64] = rng.exponential(size=self.requests)
        if self.burst is None:
            return (np.cumsum(waits) / rate * _S).astype(np.int64)
        on, off = self.burst
        busy = np.cumsum(waits) / (rate * (on + off) / on)  # seconds of "on" that have passed
        return ((busy // on * (on + off) + busy % on) * _S).astype(np.int64)

    def _describe(self, rate: float) -> dict[str, object]:
        if self.concurrency:
            arrivals = f"closed loop of {self.concurrency}"
        elif self.burst:
            arrivals = f"{rate:g}/s on average, bursts of {self.burst[0]:g} s, then {self.burst[1]:g} s of silence"
        else:
            arrivals = f"Poisson, {rate:g}/s"
        found: dict[str, object] = {
            "arrivals": arrivals,
            "requests": self.requests,
            "prompt_tokens": str(self.prompt),
            "output_tokens": str(self.output),
            "seed": self.seed,
        }
        if self.prefixes:
            found["shared_prefixes"] = f"{self.prefixes} of {self.prefix_tokens} tokens, before the prompts"
        if len(self.tenants) > 1:
            found["tenants"] = dict(self.tenants)
        if len(self.priorities) > 1:
            found["priorities"] = {str(priority): share for priority, share in self.priorities}
        if self.deadline_s:
            found["deadline_s"] = self.deadline_s
        return found


def _pick(rng: np.random.Generator, count: int, shares: list[float]) -> I64:
    if len(shares) == 1:
        return np.zeros(count, dtype=np.int64)
    total = np.array(shares, dtype=np.float64)
    return rng.choice(len(shares), size=count, p=total / total.sum()).astype(np.int64)
