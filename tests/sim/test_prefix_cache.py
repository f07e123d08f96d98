"""What the prefix cache gives back, to whom, and what a reset takes from it."""

import pytest

from common import wire
from scheduler_svc.core.config import CoreConfig
from tests.fakes.toy_executor import toy_info
from tests.sim.harness import Sim

PROMPT = range(20, 45)  # six blocks of 4 and a token more


def _steps(sim: Sim, count: int) -> None:
    for _ in range(count):
        sim.fill()
        sim.deliver()


def _preempt(sim: Sim, key: int) -> None:
    row = next(s.row for s in sim.scheduler.live_sequences() if s.key == key)
    sim.scheduler._planner.preempt(sim.scheduler.executors[0], row)


def test_the_hit_rate_is_of_first_admissions() -> None:
    sim = Sim()
    sim.submit(PROMPT, 3)
    sim.run()
    sim.submit([*PROMPT, 50, 51], 3)
    sim.run()
    stats = sim.scheduler.stats()
    assert (stats.cache_queried_tokens, stats.cache_hit_tokens) == (25 + 27, 24)
    assert stats.cached_tokens == 24 and stats.readmitted_tokens == 0


def test_without_a_cache_nothing_is_queried() -> None:
    sim = Sim(CoreConfig(enable_prefix_cache=False))
    sim.submit(PROMPT, 3)
    sim.run()
    assert sim.scheduler.stats().cache_queried_tokens == 0


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_preempted_find_their_own_blocks_again(depth: int) -> None:
    sim = Sim(CoreConfig(pipeline_depth=depth))
    key = sim.submit(PROMPT, 20)
    _steps(sim, 8)
    known = len(PROMPT) + len(sim.clients[key].tokens)
    _preempt(sim, key)
    seen = len(sim.records)
    sim.run()
    (again,) = [admit for record in sim.records[seen:] for admit in record.plan.admit]
    assert again.length >= known and again.computed_len == (again.length - 1) // 4 * 4, "all its full blocks"
    stats = sim.scheduler.stats()
    assert (stats.readmitted_tokens, stats.readmitted_hit_tokens) == (again.length, again.computed_len)
    assert stats.cache_queried_tokens == len(PROMPT) and stats.cache_hit_tokens == 0
    sim.assert_tokens()


def test_what_others_needed_meanwhile_goes_from_the_tail() -> None:
    sim = Sim(CoreConfig(pipeline_depth=1), toy_info(num_blocks=16, max_num_seqs=1))
    key = sim.submit(PROMPT, 30)
    _steps(sim, 8)
    _preempt(sim, key)
    sim.cancel(key)
    _steps(sim, 1)
    sim.submit(range(100, 140), 4)  # needs 11 of the 16 blocks: all free ones and part of what is cached
    sim.run()
    third = sim.submit(PROMPT, 4)
    sim.run()
    assert 0 < sim.clients[third].cached < 24, "the head of the prefix outlived its tail"
    sim.assert_tokens()


@pytest.mark.parametrize("salt", [b"", b"b"])
def test_salts_keep_apart(salt: bytes) -> None:
    sim = Sim()
    sim.submit(PROMPT, 3, cache_salt=b"a")
    sim.run()
    other = sim.submit(PROMPT, 3, cache_salt=salt)
    same = sim.submit(PROMPT, 3, cache_salt=b"a")
    sim.run()
    assert sim.clients[other].cached == 0 and sim.clients[same].cached == 24


def test_after_a_reset_nothing_from_before_is_found() -> None:
    sim = Sim()
    sim.submit(PROMPT, 3)
    sim.run()
    assert sim.reset_cache() == (6, 0)
    assert sim.scheduler.stats().executors[0].free_blocks == 256
    again = sim.submit(PROMPT, 3)
    sim.run()
    after = sim.submit(PROMPT, 3)
    sim.run()
    assert (sim.clients[again].cached, sim.clients[after].cached) == (0, 24)
    assert sim.reset_cache() == (6, 0) and sim.reset_cache() == (0, 0)
    sim.assert_tokens()


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("steps", [0, 1, 2, 8])
def test_what_runs_at_a_reset_goes_on_and_is_never_found(depth: int, steps: int) -> None:
    """In a prefill chunk, between chunks, while decoding, with results in flight; then it is preempted. The harness
    checks each later admission: see Sim.reset_cache."""
    sim = Sim(CoreConfig(pipeline_depth=depth, max_prefill_chunk=8))
    key = sim.submit(PROMPT, 20)
    sim.fill()
    _steps(sim, steps)
    sim.fill()
    _, forgotten = sim.reset_cache()
    assert (forgotten > 0) == (steps > 0)
    sim.fill()
    _preempt(sim, key)
    sim.submit(PROMPT, 4)
    sim.run()
    sim.assert_tokens()
    sim.assert_all_free()


def test_choices_of_a_request_that_runs_at_a_reset_are_never_found() -> None:
    sim = Sim(CoreConfig(max_prefill_chunk=8, pipeline_depth=1))
    sim.submit(PROMPT, 20, n=3, temperature=0.9, ignore_eos=True)
    _steps(sim, 2)
    sim.reset_cache()
    _steps(sim, 4)  # the prompt's end, and the forks
    assert sim.scheduler.stats().forked_tokens == 2 * 24
    late = sim.submit(PROMPT, 1)
    sim.run()
    assert sim.clients[late].cached == 0
    # Nor what they generated behind that prompt, when somebody's prompt goes on like that.
    for key in sorted(sim.clients)[:3]:
        turn = sim.submit([*PROMPT, *sim.clients[key].tokens], 1)
        sim.run()
        assert sim.clients[turn].cached == 24
    sim.assert_tokens()
    sim.assert_all_free()


def test_a_reset_reaches_blocks_an_executor_keeps_while_it_is_away() -> None:
    sim = Sim()
    sim.submit(PROMPT, 3)
    sim.run()
    sim.disconnect()
    assert sim.reset_cache() == (6, 0)
    sim.connect()
    again = sim.submit(PROMPT, 3)
    sim.run()
    assert sim.clients[again].cached == 0
    sim.assert_tokens()


def test_a_prompt_is_hashed_when_it_comes_unless_many_wait() -> None:
    sim = Sim(info=toy_info(max_num_seqs=2))
    keys = [sim.submit(PROMPT, 3) for _ in range(4)]
    sequences = {sequence.key: sequence for sequence in sim.scheduler.live_sequences()}
    assert [len(sequences[key].hashes) for key in keys] == [6, 6, 0, 0]
    sim.run()
    sim.assert_tokens()
    assert sim.scheduler.stats().cache_hit_tokens > 0, "who was not hashed then was hashed later"


def test_of_the_many_who_wait_the_next_are_hashed_between_two_steps() -> None:
    sim = Sim(info=toy_info(max_num_seqs=2))
    keys = [sim.submit([*PROMPT, i], 3) for i in range(20)]
    sequences = {sequence.key: sequence for sequence in sim.scheduler.live_sequences()}
    sim.looks_ahead = lambda _: False
    sim.plan()
    sim.scheduler.look_ahead(0)
    assert [len(sequences[key].hashes) for key in keys] == [6] * 10 + [0] * 10, "two run, eight of the others are next"
    sim.scheduler.look_ahead(0)
    sim.check()
    assert [bool(sequences[key].hashes) for key in keys].count(True) == 10
    sim.cancel(keys[3])
    sim.run()
    sim.assert_tokens()


@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority", "deadline"])
def test_looking_ahead_changes_no_plan(policy: str) -> None:
    def plans(looks: bool) -> list[bytes]:
        sim = Sim(CoreConfig(policy=policy), toy_info(max_num_seqs=3))
        sim.looks_ahead = lambda _: looks
        for i in range(30):
            sim.submit([*PROMPT[: 7 + i % 9], i], 2 + i % 5, tenant="ab"[i % 2], priority=i % 3)
        sim.run()
        sim.assert_tokens()
        return [wire.encode_to_executor(record.plan).SerializeToString() for record in sim.records]

    assert plans(True) == plans(False)
