"""Each lifetime rule switched off in turn: the tokens themselves must change, or the toy executor see a block written
that a step in flight copies from. Checks the toy as much as the core."""

from collections.abc import Callable

import pytest

from scheduler_svc.core import forks
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.draft import Draft
from scheduler_svc.core.executor_state import ExecutorState
from scheduler_svc.core.forks import Head
from scheduler_svc.core.planner import Planner
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.sequence import Sequence
from tests.fakes.toy_executor import toy_info
from tests.sim.harness import Sim


def _no_limbo_for_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ExecutorState.vacate

    def vacate(self: ExecutorState, row: int, keep: bool) -> Sequence | None:
        sequence = original(self, row, keep)
        if row in self.limbo and self.rows.table_len[row]:
            gone = self.rows.seqs[row]
            assert gone is not None
            self.pool.free(self.rows.blocks(row), gone.num_known)
            self.rows.table_len[row] = 0
            self.rows.tainted[row] = True
        return sequence

    monkeypatch.setattr(ExecutorState, "vacate", vacate)


def _register_at_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ExecutorState.start_decoding

    def start_decoding(self: ExecutorState, row: int, length: int) -> bool:
        self.register(row, length)
        return original(self, row, length)

    monkeypatch.setattr(ExecutorState, "start_decoding", start_decoding)


def _count_the_last_token_as_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Rows.computed
    monkeypatch.setattr(Rows, "computed", lambda self, row: original(self, row) + 1)


def _copied_blocks_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader's row is not marked as named by the step that copies its block."""
    original = Planner._fork

    def fork(draft: Draft, head: Head, sequence: Sequence) -> None:
        last_step = int(draft.executor.rows.last_step[head.leader])
        original(draft, head, sequence)
        draft.executor.rows.last_step[head.leader] = last_step

    monkeypatch.setattr(Planner, "_fork", staticmethod(fork))


def _fork_in_the_prompts_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies come before a step's forward pass: what the same step writes is not there yet."""
    original = Planner._admissions

    def admissions(self: Planner, draft: Draft, now_ns: int) -> None:
        original(self, draft, now_ns)
        self._release_followers(draft)
        original(self, draft, now_ns)

    monkeypatch.setattr(Planner, "_admissions", admissions)
    monkeypatch.setattr(forks, "can_fork", lambda executor, sequence: sequence.leader is not None)


def _wear_out(sim: Sim) -> None:
    """Requests that come and go in a small cache, while steps are in flight."""
    for round_ in range(30):
        sim.submit([3 + round_, *range(20, 29)], 40)
        sim.fill()
        if round_ % 3 == 2:
            sim.cancel(min(s.key for s in sim.scheduler.live_sequences()))
        sim.deliver()
    sim.run()


def _lose_results(sim: Sim) -> None:
    """A step that was sent never ran; the executor kept its blocks. The same prompt comes again."""
    sim.submit(range(10, 40), 5)
    record = sim.scheduler.schedule(sim.executor_id, sim.now_ns)  # never reaches the executor
    assert record is not None
    sim.disconnect()
    sim.connect()
    sim.run()


def _second_turn(sim: Sim) -> None:
    """The next prompt holds the whole former answer, which ended with a block."""
    first = sim.submit(range(10, 20), 6, ignore_eos=True)
    sim.run()
    sim.submit([*range(10, 20), *sim.clients[first].tokens, 7, 8], 5)
    sim.run()


def _choices(sim: Sim) -> None:
    sim.submit(range(10, 33), 6, n=3)
    sim.run()


def _one_token_choices(sim: Sim) -> None:
    """Each leader is done with its first token, while its copies are in flight, and its blocks are wanted."""
    for _ in range(4):
        sim.submit(range(10, 33), 1, n=3)
        sim.submit(range(50, 70), 1)
    sim.run()


CASES = [
    (_no_limbo_for_blocks, _wear_out),
    (_register_at_planning, _lose_results),
    (_count_the_last_token_as_computed, _second_turn),
    (_copied_blocks_are_not_named, _one_token_choices),
    (_fork_in_the_prompts_own_step, _choices),
]


@pytest.mark.parametrize(("break_rule", "history"), CASES, ids=lambda f: f.__name__)
def test_without_the_rule_it_shows(
    break_rule: Callable[[pytest.MonkeyPatch], None],
    history: Callable[[Sim], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_rule(monkeypatch)
    sim = Sim(CoreConfig(pipeline_depth=3), toy_info(num_blocks=16, num_rows=6, max_num_seqs=4))
    monkeypatch.setattr(sim, "check", lambda: None)
    history(sim)
    wrong = [key for key, c in sim.clients.items() if c.tokens != sim.expected(key)[: len(c.tokens)]]
    assert wrong or sim.toy.limbo_violations


HISTORIES = [_wear_out, _lose_results, _second_turn, _one_token_choices, _choices]


@pytest.mark.parametrize("history", HISTORIES, ids=lambda f: f.__name__)
def test_with_the_rules_they_do_not(history: Callable[[Sim], None]) -> None:
    sim = Sim(CoreConfig(pipeline_depth=3), toy_info(num_blocks=16, num_rows=6, max_num_seqs=4))
    history(sim)
    sim.assert_tokens()
    sim.assert_all_free()
