"""Each tenant gets its share of the service, whatever the others ask for.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024 (Virtual Token Counter).
"""

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.policies.base import Policy
from scheduler_svc.core.tenants import Tenants
from scheduler_svc.messages import Submit


class Fair(Policy):
    """The tenant that was served least goes first; inside a tenant, first come first served.

    A tenant's counter (`Tenants.served`) rises by w_p for each prompt token computed at its request's first admission
    (those found in the prefix cache cost nothing) and by w_q for each generated token, divided by the tenant's weight
    φ. A tenant that begins to wait is lifted to the lowest counter among those that wait, or, when nobody waits, to
    that of the last who did: being idle earns no credit.

    Bound. Let f and g wait without a break over any span of time, W be what a tenant was served in it (w_p × prompt
    tokens + w_q × generated tokens), L the longest prompt, O the longest output, S the most sequences of one tenant
    that are admitted and unfinished at once, U = w_p·L + w_q·S·O. Then

        |W_f / φ_f − W_g / φ_g| ≤ U/φ_f + U/φ_g;  2·U with equal weights of 1.

    Why: at its last admission f's counter was the lowest of all that wait, thus at most g's. Since then f's rose by the
    prompt of that request and by what its admitted sequences generate: at most U/φ_f. g's did not fall. So at any
    moment c_f − c_g ≤ U/φ_f, and the same with f and g exchanged. No lift happens while both wait, so W/φ is the growth
    of the counter, and the difference of two growths is the difference of c_f − c_g at the span's ends. The paper's
    2·max(w_p·L, w_q·M) is this with M, the tokens of all sequences that run at once, taken at their final lengths: the
    cache here is granted as sequences grow, so M may be more than fits into it at one moment.

    Preempted sequences return before anyone else is admitted: they are admitted already, S counts them, and none loses
    its place for ever. Blocks are taken from who arrived last.

    Nobody starves: while a tenant waits its counter stands still and those of the others rise.
    """

    returns_first = True

    def __init__(self, config: CoreConfig, tenants: Tenants) -> None:
        super().__init__(config, tenants)
        self._last = 0.0  # counter of the tenant that was the last to wait

    def rank(self, request: Submit, order: int) -> int:
        return order

    def lane(self, tenant: int) -> int:
        return tenant

    def turn(self, lane: int) -> float:
        return float(self._tenants.served[lane])

    def joined(self, lane: int, least: float | None) -> None:
        self._tenants.lift(lane, self._last if least is None else least)

    def left(self, lane: int) -> None:
        self._last = float(self._tenants.served[lane])
