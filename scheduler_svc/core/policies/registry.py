"""The policies by name. A new one is a file here and a line in POLICIES."""

from typing import Final

from common.errors import ConfigError
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.policies.base import Policy
from scheduler_svc.core.policies.deadline import Deadline
from scheduler_svc.core.policies.fair import Fair
from scheduler_svc.core.policies.fcfs import Fcfs
from scheduler_svc.core.policies.priority import Priority
from scheduler_svc.core.tenants import Tenants

POLICIES: Final[dict[str, type[Policy]]] = {
    "fcfs": Fcfs,
    "priority": Priority,
    "fair": Fair,
    "deadline": Deadline,
}


def make_policy(config: CoreConfig, tenants: Tenants) -> Policy:
    """Raises ConfigError for a name nobody knows."""
    if config.policy not in POLICIES:
        raise ConfigError(f"policy: {config.policy!r} is none of {sorted(POLICIES)}", field="policy")
    return POLICIES[config.policy](config, tenants)
