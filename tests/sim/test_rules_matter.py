"""Each lifetime rule switched off in turn: the tokens themselves must change. Checks the toy as much as the core."""

from collections.abc import Callable

import pytest

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.executor_state import ExecutorState
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.sequence import Sequence
from tests.fakes.toy_executor import toy_info
from tests.sim.harness import Sim


def _no_limbo_for_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ExecutorState.vacate

    def vacate(self: ExecutorState, row: int, keep: bool) -> Sequence | None:
        sequence = original(self, row, keep)
        if row in self.limbo and self.rows.table_len[row]:
            self.pool.leave_limbo(self.rows.blocks(row))
            self.pool.free(self.rows.blocks(row))
            self.rows.table_len[row] = 0
            self.rows.tainted[row] = True
        return sequence

    monkeypatch.setattr(ExecutorState, "vacate", vacate)


def _register_at_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ExecutorState.start_decoding

    def start_decoding(self: ExecutorState, row: int) -> None:
        sequence = self.rows.seqs[row]
        assert sequence is not None
        self.register(row, sequence.admitted_len)
        original(self, row)

    monkeypatch.setattr(ExecutorState, "start_decoding", start_decoding)


def _count_the_last_token_as_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Rows.computed
    monkeypatch.setattr(Rows, "computed", lambda self, row: original(self, row) + 1)


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


CASES = [
    (_no_limbo_for_blocks, _wear_out),
    (_register_at_planning, _lose_results),
    (_count_the_last_token_as_computed, _second_turn),
]


@pytest.mark.parametrize(("break_rule", "history"), CASES, ids=lambda f: f.__name__)
def test_without_the_rule_tokens_change(
    break_rule: Callable[[pytest.MonkeyPatch], None],
    history: Callable[[Sim], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_rule(monkeypatch)
    sim = Sim(CoreConfig(pipeline_depth=3), toy_info(num_blocks=16, num_rows=6, max_num_seqs=4))
    monkeypatch.setattr(sim, "check", lambda: None)
    history(sim)
    wrong = [key for key, c in sim.clients.items() if c.tokens != sim.expected(key)[: len(c.tokens)]]
    assert wrong


@pytest.mark.parametrize("history", [_wear_out, _lose_results, _second_turn], ids=lambda f: f.__name__)
def test_with_the_rules_they_do_not(history: Callable[[Sim], None]) -> None:
    sim = Sim(CoreConfig(pipeline_depth=3), toy_info(num_blocks=16, num_rows=6, max_num_seqs=4))
    history(sim)
    sim.assert_tokens()
    sim.assert_all_free()
