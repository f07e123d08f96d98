"""What watchers are told of the steps adds up to what the core says of itself."""

import pytest

from common.messages import StepResult
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.outcome import StepOutcome
from scheduler_svc.messages import StepSeen
from scheduler_svc.step_seen import step_seen
from tests.fakes.toy_executor import toy_info
from tests.sim.harness import Sim


def watched(sim: Sim, monkeypatch: pytest.MonkeyPatch) -> list[StepSeen]:
    seen: list[StepSeen] = []
    update = sim.scheduler.update

    def told(executor_id: int, result: StepResult, now_ns: int) -> StepOutcome:
        outcome = update(executor_id, result, now_ns)
        seen.append(step_seen(sim.scheduler.executors[executor_id], outcome, result, now_ns))
        return outcome

    monkeypatch.setattr(sim.scheduler, "update", told)
    return seen


def test_steps_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With too few blocks, so that sequences are preempted, and a prompt that all share."""
    sim = Sim(CoreConfig(max_num_seqs=6), toy_info(num_blocks=30, num_rows=70))
    seen = watched(sim, monkeypatch)
    for number in range(12):
        sim.submit([*range(5, 17), 20 + number], 30, ignore_eos=True)
    sim.run()
    stats = sim.scheduler.stats()
    assert [step.step_id for step in seen] == list(range(1, len(seen) + 1))
    assert seen[-1].preemptions == stats.preemptions > 0
    assert sum(step.generated_tokens for step in seen) == stats.generated_tokens == 12 * 30
    hits = stats.cache_hit_tokens + stats.readmitted_hit_tokens
    assert sum(step.cached_tokens for step in seen) == hits > 0
    assert sum(step.admitted_tokens for step in seen) > hits
    for step in seen:
        assert step.num_blocks == 30 >= step.free_blocks and step.running <= 6
        assert step.num_sequences <= step.running and step.decode_tokens <= step.num_sequences
    assert max(step.waiting for step in seen) >= 6 and seen[-1].waiting == 0
