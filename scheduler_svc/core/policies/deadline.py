"""Earliest deadline first."""

from scheduler_svc.core.policies.base import Policy
from scheduler_svc.messages import Submit

_ORDER_BITS = 24
UNHURRIED_NS = 60_000_000_000
FARTHEST_NS = 60 * UNHURRIED_NS


class Deadline(Policy):
    """The request whose deadline comes first goes first; blocks are taken from the one with the latest. A request
    without a deadline ranks as if it had 60 s, so it is passed only by those whose deadlines lie before that: nobody
    starves. (Deadlines over an hour away count as that.) Running sequences are not evicted for waiting ones.

    What can not make its deadline is refused, or ended before it takes room.
    """

    refuses_late = True

    def rank(self, request: Submit, order: int) -> int:
        deadline_ns = request.deadline_ns or request.arrival_ns + UNHURRIED_NS
        deadline_ns = min(deadline_ns, request.arrival_ns + FARTHEST_NS)
        return (deadline_ns // 1_000_000 << _ORDER_BITS) + (order & ((1 << _ORDER_BITS) - 1))
