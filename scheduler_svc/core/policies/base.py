"""What a scheduling policy decides: who goes first, who makes room."""

from abc import ABC, abstractmethod
from typing import ClassVar

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.tenants import Tenants
from scheduler_svc.messages import Submit


class Policy(ABC):
    """Waiting requests stand in lanes. In a lane the lowest rank goes first; of the lanes' heads the one whose lane has
    the lowest turn, of equal turns again the lowest rank. A rank never changes, a turn may rise: that is all a policy
    needs to be fixed (one lane) or to depend on what was served (a lane for each tenant), and finding the first costs
    O(log n) in both cases.

    Ranks also choose whom a shortage of blocks hits: the running sequence with the highest. They lie in a numpy column
    beside the rows, so choosing is one masked argmax.

    returns_first: a preempted sequence goes before everyone who never ran. Without it, it goes by its rank.
    refuses_late: a request that can not make its deadline is refused, or ended before it takes room (see `expiry`).
    """

    returns_first: ClassVar[bool] = False
    refuses_late: ClassVar[bool] = False

    def __init__(self, config: CoreConfig, tenants: Tenants) -> None:
        self._config = config
        self._tenants = tenants

    @abstractmethod
    def rank(self, request: Submit, order: int) -> int:
        """`order`: rising arrival number of the request, at most 2^40. Different for different orders; fits int64."""

    def evicts_after(self, rank: int) -> int | None:
        """A waiting request of this rank takes the place of running ones whose ranks are above the answer, where it
        finds no room. None: of nobody's."""
        return None

    def lane(self, tenant: int) -> int:
        """The lane of a tenant's requests."""
        return 0

    def turn(self, lane: int) -> float:
        """May only rise while someone waits in the lane."""
        return 0.0

    def joined(self, lane: int, least: float | None) -> None:
        """The first request came to an empty lane; `least`: the lowest turn of the others, None when all are empty."""
        return

    def left(self, lane: int) -> None:
        """The lane's last waiting request went."""
        return
