"""Who goes first. A policy turns a sequence into one integer; lower runs first, the highest is preempted first.

One integer, because ranks live in a numpy column beside the rows: choosing a victim is one masked argmax.
"""

from typing import Protocol

from common.errors import ConfigError

_ORDER_BITS = 40
_MAX_PRIORITY = 1 << 20


class Policy(Protocol):
    def rank(self, order: int, priority: int) -> int:
        """`order`: rising arrival number of the request. Unique for unique orders; fits int64."""
        ...


class Fcfs:
    """First come, first served. A preempted sequence keeps its place."""

    def rank(self, order: int, priority: int) -> int:
        return order


class ByPriority:
    """Higher priority first, equals by arrival. Priorities beyond ±2^20 count as that."""

    def rank(self, order: int, priority: int) -> int:
        return (max(-_MAX_PRIORITY, min(_MAX_PRIORITY, -priority)) << _ORDER_BITS) + order


_POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs, "priority": ByPriority}


def make_policy(name: str) -> Policy:
    """Raises ConfigError for a name nobody knows."""
    if name not in _POLICIES:
        raise ConfigError(f"policy: {name!r} is none of {sorted(_POLICIES)}", field="policy")
    return _POLICIES[name]()
