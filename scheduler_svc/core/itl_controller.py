"""Steers the prefill tokens of a step so that decoding sequences keep their pace.

Sarathi-Serve (Agrawal et al., OSDI 2024) bounds the gap between tokens by a fixed token budget that someone has to find
by measuring; here it follows from the steps as they run.
"""

from math import exp

from scheduler_svc.core.step_times import StepTimes

MIN_BUDGET = 16
FIRST_BUDGET = 128
MIN_MARGIN = 0.25
_SHARE_OVER = 0.005  # of the steps with prefill; half of what a p99 allows
_MARGIN_GAIN = 0.1
_FULL = 0.75


class ItlController:
    """Budget = (margin × target − base_ns) / token_ns, with both times from StepTimes.

    Feed-forward and feedback each do what they are good at. The measured times find the budget in a few steps, also
    after the device's speed or the batch changed. The margin answers for the noise around them: each full step over the
    target lowers it by about 10 %, each one below raises it by 0.05 %, which rests where 0.5 % of the steps are over,
    whatever the noise's distribution.

    Stability. Say base is wrong by e (true A = base + e) and the true cost of a token is C. A step of p tokens makes
    token_ns (A + C·p − base)/p, so the next budget is p' = K·p/(e + C·p) with K = margin × target − base. It rests at
    A + C·p = margin × target, whatever e, and there dp'/dp = e/K. With the averages' gain of 0.1 an error is multiplied
    by 1 − 0.1·(1 − e/K) in each step: it shrinks for −19·K < e < K. The right side says that decoding alone keeps the
    margin; a base that is too long beyond the left one is corrected by StepTimes itself.

    A target that decoding alone does not keep can not be held: the budget is then MIN_BUDGET, for prompts never stand
    still.
    """

    __slots__ = ("_margin", "_max_budget", "_target_ns", "_times")

    def __init__(self, target_ns: float, max_budget: int, times: StepTimes) -> None:
        """`times`: of the same executor; its owner updates it, after this one."""
        self._target_ns = target_ns
        self._max_budget = max_budget
        self._times = times
        self._margin = 0.9

    @property
    def budget(self) -> int:
        """Prefill tokens the next step with decodes may take."""
        times = self._times
        if not times.token_ns:
            return min(FIRST_BUDGET, self._max_budget)
        tokens = (self._margin * self._target_ns - times.base_ns) / times.token_ns
        return int(max(MIN_BUDGET, min(self._max_budget, tokens)))

    def update(self, prefill_tokens: int, decode_tokens: int, duration_ns: int) -> None:
        """A step took `duration_ns` from the result before it, or from its plan where the executor was idle. Only steps
        that the budget could have shortened lower the margin; one with the least budget that keeps the target still
        raises it, else a spell of slow steps could leave it so low that nothing changed it ever again."""
        budget = self.budget
        over = duration_ns > self._target_ns
        if decode_tokens and prefill_tokens >= _FULL * budget and (budget > MIN_BUDGET or not over):
            self._margin = max(MIN_MARGIN, min(1.0, self._margin * exp(_MARGIN_GAIN * (_SHARE_OVER - over))))
