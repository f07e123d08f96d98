"""Higher priority first, and instead of lower."""

from scheduler_svc.core.policies.base import Policy
from scheduler_svc.messages import Submit

_ORDER_BITS = 40
_MAX_PRIORITY = 1 << 20
_AGED_ORDER_BITS = 24
_AGED_MAX_PRIORITY = 1 << 10


class Priority(Policy):
    """Higher priority first, equals by arrival. A waiting request that finds no room (sequences, rows or blocks) evicts
    running ones of lower priority, last arrived first. An evicted sequence comes back by recompute and loses no token;
    after `max_preemptions` it is evicted no more, so work is never thrown away without end.

    By design a low priority waits for as long as higher ones keep all room taken. `priority_aging_ms` bounds that: one
    level of priority is then worth so much waiting, so a request is passed only by those of k levels above that arrive
    within k times that span after it. As both sides age alike, their order never changes: it is the order of
    arrival − priority × priority_aging_ms, and an evicted one stands a whole level behind.

    Priorities beyond ±2^20 (with aging ±2^10) count as that.
    """

    def rank(self, request: Submit, order: int) -> int:
        aging_ms = self._config.priority_aging_ms
        if aging_ms:
            priority = max(-_AGED_MAX_PRIORITY, min(_AGED_MAX_PRIORITY, request.priority))
            aged_ms = request.arrival_ns // 1_000_000 - priority * aging_ms
            return (aged_ms << _AGED_ORDER_BITS) + (order & ((1 << _AGED_ORDER_BITS) - 1))
        priority = max(-_MAX_PRIORITY, min(_MAX_PRIORITY, request.priority))
        return (-priority << _ORDER_BITS) + order

    def evicts_after(self, rank: int) -> int | None:
        aging_ms = self._config.priority_aging_ms
        if aging_ms:
            return rank + (aging_ms << _AGED_ORDER_BITS)
        return rank | ((1 << _ORDER_BITS) - 1)  # the last of its own level
