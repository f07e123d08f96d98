"""Hypothesis looks for the order of operations that breaks the scheduler, and shortens what it finds.

All invariants are checked after every operation; the end of each history is played out, see `Fleet.end`. Longer
histories at a tenth of the cost: test_random_operations.

vllm#57562: chunked prefill kills an asynchronous engine through a negative counter. Counters are among the invariants.
"""

import random

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.sim.fleet import OPERATIONS, Fleet
from tests.sim.fleet_setting import draw_setting

RANDOMS = st.randoms(use_true_random=False)


class SchedulerMachine(RuleBasedStateMachine):
    """A rule for each operation of the fleet."""

    fleet: Fleet

    @initialize(rng=RANDOMS)
    def start(self, rng: random.Random) -> None:
        self.fleet = Fleet(draw_setting(rng))

    @rule(rng=RANDOMS)
    def submit(self, rng: random.Random) -> None:
        self.fleet.submit(rng)

    @rule(rng=RANDOMS)
    def submit_another(self, rng: random.Random) -> None:
        """Twice as likely as the rest, so that there is something to disturb."""
        self.fleet.submit(rng)

    @rule(rng=RANDOMS)
    def cancel(self, rng: random.Random) -> None:
        self.fleet.cancel(rng)

    @rule(rng=RANDOMS)
    def finish(self, rng: random.Random) -> None:
        self.fleet.finish(rng)

    @rule(rng=RANDOMS)
    def abort(self, rng: random.Random) -> None:
        self.fleet.abort(rng)

    @rule(rng=RANDOMS)
    def plan(self, rng: random.Random) -> None:
        self.fleet.plan(rng)

    @rule(rng=RANDOMS)
    def fill(self, rng: random.Random) -> None:
        self.fleet.fill(rng)

    @rule(rng=RANDOMS)
    def deliver(self, rng: random.Random) -> None:
        self.fleet.deliver(rng)

    @rule(rng=RANDOMS)
    def go(self, rng: random.Random) -> None:
        self.fleet.go(rng)

    @rule(rng=RANDOMS)
    def preempt(self, rng: random.Random) -> None:
        self.fleet.preempt(rng)

    @rule(rng=RANDOMS)
    def time_passes(self, rng: random.Random) -> None:
        self.fleet.time_passes(rng)

    @rule(rng=RANDOMS)
    def reset_cache(self, rng: random.Random) -> None:
        self.fleet.reset_cache(rng)

    @rule(rng=RANDOMS)
    def row_fails(self, rng: random.Random) -> None:
        self.fleet.row_fails(rng)

    @rule(rng=RANDOMS)
    def plan_fails(self, rng: random.Random) -> None:
        self.fleet.plan_fails(rng)

    @rule(rng=RANDOMS)
    def bad_plan(self, rng: random.Random) -> None:
        self.fleet.bad_plan(rng)

    @rule(rng=RANDOMS)
    def device_fails(self, rng: random.Random) -> None:
        self.fleet.device_fails(rng)

    @rule(rng=RANDOMS)
    def wrong_result(self, rng: random.Random) -> None:
        self.fleet.wrong_result(rng)

    @rule(rng=RANDOMS)
    def disconnect(self, rng: random.Random) -> None:
        self.fleet.disconnect(rng)

    @rule(rng=RANDOMS)
    def kill(self, rng: random.Random) -> None:
        self.fleet.kill(rng)

    @rule(rng=RANDOMS)
    def connect(self, rng: random.Random) -> None:
        self.fleet.connect(rng)

    @rule(rng=RANDOMS)
    def drain(self, rng: random.Random) -> None:
        """Seldom: what follows is dull."""
        if rng.randrange(8) == 0:
            self.fleet.drain(rng)

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.end()


def test_every_operation_has_its_rule() -> None:
    assert all(hasattr(SchedulerMachine, name) for name in OPERATIONS)


SchedulerMachine.TestCase.settings = settings(
    max_examples=160,
    stateful_step_count=40,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
TestScheduler = SchedulerMachine.TestCase
