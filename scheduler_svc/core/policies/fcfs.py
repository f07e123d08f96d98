"""First come, first served."""

from scheduler_svc.core.policies.base import Policy
from scheduler_svc.messages import Submit


class Fcfs(Policy):
    """By arrival; a preempted sequence keeps its place. Nobody starves: who came first is never passed, but for short
    prompts while too many long ones are in prefill (see the planner)."""

    def rank(self, request: Submit, order: int) -> int:
        return order
