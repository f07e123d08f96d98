"""Several choices of one prompt: they share its blocks, and nothing else of each other."""

from collections.abc import Callable

import pytest

from common.errors import DuplicateRequest, Overloaded, SequenceFailed, TooLarge
from scheduler_svc.choice_seed import choice_seed
from scheduler_svc.core.config import CoreConfig
from tests.fakes.toy_executor import toy_info
from tests.sim.harness import Sim

PROMPT = range(20, 43)  # five blocks of 4 and 3 tokens more


def _steps(sim: Sim, count: int) -> None:
    for _ in range(count):
        sim.fill()
        sim.deliver()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 23, 24, 25])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_each_choice_is_what_n_1_gives_with_its_seed(length: int, cache: bool, depth: int) -> None:
    sim = Sim(CoreConfig(enable_prefix_cache=cache, pipeline_depth=depth))
    prompt = [*range(30, 30 + length)]
    key = sim.submit(prompt, 9, n=4)
    sim.run()
    sim.assert_tokens()
    sim.assert_all_free()
    assert len({tuple(sim.clients[key + i].tokens) for i in range(4)}) == 4, "the choices differ"
    alone = Sim(CoreConfig(enable_prefix_cache=cache, pipeline_depth=depth))
    for i in range(4):
        seed = choice_seed(sim.clients[key].submit.sampling.seed, i)
        other = alone.submit(prompt, 9, seed=seed)
        alone.run()
        assert alone.clients[other].tokens == sim.clients[key + i].tokens


@pytest.mark.parametrize("cache", [True, False])
def test_the_prompt_is_computed_and_held_once(cache: bool) -> None:
    sim = Sim(CoreConfig(enable_prefix_cache=cache))
    key = sim.submit(PROMPT, 4, n=3)
    _steps(sim, 2)
    computed = sum(record.prefill_tokens for record in sim.records)
    assert computed == 23 + 2, "of the prompt each further choice computes one token"
    copies = [(s, t) for r in sim.records for s, t in zip(r.plan.copy_sources, r.plan.copy_targets, strict=True)]
    assert len(copies) == 2 and len({s for s, _ in copies}) == 1
    rows = {s.key: s.row for s in sim.scheduler.live_sequences()}
    tables = [sim.scheduler.executors[0].rows.blocks(rows[key + i]).tolist() for i in range(3)]
    assert tables[0][:5] == tables[1][:5] == tables[2][:5], "full blocks are shared"
    assert len({table[5] for table in tables}) == 3, "the block that all write on in is not"
    assert {t for _, t in copies} == {tables[1][5], tables[2][5]}
    sim.run()
    stats = sim.scheduler.stats()
    assert stats.forked_tokens == 2 * 22
    assert [sim.clients[key + i].cached for i in range(3)] == [0, 22, 22]
    sim.assert_tokens()
    sim.assert_all_free()


def test_a_prompt_that_ends_one_past_a_block_needs_no_copy() -> None:
    sim = Sim()
    sim.submit(range(20, 29), 4, n=3)
    sim.run()
    assert not any(len(record.plan.copy_sources) for record in sim.records)
    sim.assert_tokens()


def test_choices_wait_for_the_prompt_without_holding_others_up() -> None:
    sim = Sim(CoreConfig(max_prefill_chunk=4))
    key = sim.submit(PROMPT, 4, n=3)
    other = sim.submit([5, 6], 4)
    sim.plan()
    assert sim.scheduler.num_waiting == 2 and sim.scheduler.num_running == 2
    _steps(sim, 4)
    assert len(sim.clients[other].tokens) and not sim.clients[key].tokens
    sim.run()
    assert all(not len(r.plan.admit) or r.plan.num_tokens for r in sim.records)
    sim.assert_tokens()


def test_all_or_nothing_is_accepted() -> None:
    sim = Sim(CoreConfig(max_queued_requests=4), toy_info(max_num_seqs=1))
    sim.submit([5, 6, 7], 30)
    sim.plan()
    sim.submit(PROMPT, 4, n=2)
    with pytest.raises(Overloaded):
        sim.submit(PROMPT, 4, n=3)
    with pytest.raises(TooLarge) as refused:
        sim.submit(PROMPT, 4, n=5)
    assert (refused.value.field, refused.value.limit) == ("n", "4")
    sim.submit(PROMPT, 4, n=2)
    stats = sim.scheduler.stats()
    assert (stats.requests_accepted, stats.requests_refused, stats.waiting) == (5, 8, 4)
    sim.run()
    sim.assert_tokens()
    sim.assert_all_free()


def test_an_id_is_live_until_its_last_choice_ends() -> None:
    sim = Sim()
    key = sim.submit(PROMPT, 30, n=2, request_id="a")
    _steps(sim, 4)
    sim.finish(key, 1)
    assert sim.scheduler.keys_of("a") == (key + 1,)
    with pytest.raises(DuplicateRequest):
        sim.submit([5], 3, request_id="a")
    sim.cancel(key + 1)
    assert sim.scheduler.keys_of("a") == ()
    sim.submit([5], 3, request_id="a")
    sim.run()
    sim.assert_tokens()
    sim.assert_all_free()


def _nowhere(sim: Sim) -> None:
    pass


def _in_the_prompt(sim: Sim) -> None:
    sim.plan()


def _right_behind_it(sim: Sim) -> None:
    while not sim.scheduler.executors[0].rows.decoding.any():
        sim.plan()
        if len(sim.pending) == sim.depth:
            sim.deliver()


def _with_forks_in_flight(sim: Sim) -> None:
    _right_behind_it(sim)
    if len(sim.pending) == sim.depth:
        sim.deliver()
    sim.plan()


def _while_all_decode(sim: Sim) -> None:
    _steps(sim, 10)


PLACES = [_nowhere, _in_the_prompt, _right_behind_it, _with_forks_in_flight, _while_all_decode]


@pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("gone", [{0}, {1}, {0, 1}, {2, 3}, {0, 1, 2, 3}], ids=str)
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
def test_choices_leave_without_disturbing_the_others(
    place: Callable[[Sim], None], gone: set[int], cache: bool, depth: int
) -> None:
    """vllm#14326: an abort leaves the other choices running."""
    config = CoreConfig(pipeline_depth=depth, max_prefill_chunk=8, enable_prefix_cache=cache)
    sim = Sim(config, toy_info(num_blocks=40))
    key = sim.submit(PROMPT, 20, n=4)
    sim.submit([7, 8, 9], 40)
    place(sim)
    for i in sorted(gone):
        assert sim.cancel(key + i)
        sim.plan()
    # What they held is wanted at once.
    sim.submit(range(100, 160), 20)
    sim.run()
    sim.assert_tokens()
    sim.assert_all_free()
    assert all(sim.clients[key + i].reason is not None for i in range(4) if i not in gone)
    assert sim.scheduler.stats().requests_aborted == len(gone)


@pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("crash", [False, True])
def test_choices_survive_their_executor(place: Callable[[Sim], None], crash: bool) -> None:
    sim = Sim(CoreConfig(max_prefill_chunk=8))
    sim.submit(PROMPT, 20, n=4)
    place(sim)
    sim.disconnect()
    if crash:
        sim.replace_executor()
    sim.run()
    assert all(client.reason is not None for client in sim.clients.values())
    sim.assert_tokens()
    sim.assert_all_free()


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("max_preemptions", [0, 1, 4])
def test_many_choices_in_few_blocks(cache: bool, max_preemptions: int) -> None:
    config = CoreConfig(enable_prefix_cache=cache, max_preemptions=max_preemptions, pipeline_depth=3)
    sim = Sim(config, toy_info(num_blocks=14))
    for _ in range(3):
        sim.submit(PROMPT, 30, n=5)
    sim.run()
    assert all(client.reason is not None for client in sim.clients.values())
    assert max_preemptions == 0 or sim.scheduler.stats().preemptions
    sim.assert_tokens()
    sim.assert_all_free()


def test_a_choice_that_comes_back_is_an_ordinary_sequence() -> None:
    sim = Sim(CoreConfig(enable_prefix_cache=False))
    key = sim.submit(PROMPT, 20, n=2)
    _steps(sim, 5)
    executor = sim.scheduler.executors[0]
    row = next(s.row for s in sim.scheduler.live_sequences() if s.key == key + 1)
    sim.scheduler._planner.preempt(executor, row)
    seen = len(sim.records)
    sim.run()
    again = [admit for record in sim.records[seen:] for admit in record.plan.admit]
    assert [admit.computed_len for admit in again] == [0]
    sim.assert_tokens()


def test_what_fails_for_the_prompt_fails_for_all_that_wait_for_it() -> None:
    sim = Sim(CoreConfig(max_prefill_chunk=4))
    sim.toy.nan_token = 30
    sim.submit(PROMPT, 20, n=4)
    other = sim.submit([5, 6, 7], 5)
    sim.run()
    for client in sim.clients.values():
        if client.submit.key != other:
            assert isinstance(client.error, SequenceFailed) and client.ends == 1
    assert sim.scheduler.stats().requests_failed == 4
    sim.assert_tokens()
    sim.assert_all_free()


@pytest.mark.parametrize("leaves", ["", "cancelled", "preempted"])
def test_a_prompt_that_failed_fails_for_those_that_forked_from_it_already(leaves: str) -> None:
    """A row that failed computes no more: what forks planned since then read was never written."""
    sim = Sim(CoreConfig(max_prefill_chunk=8, pipeline_depth=4))
    sim.submit([7, 8, 9], 20)
    other = sim.submit(PROMPT, 20, n=1, cache_salt=b"other")
    key = sim.submit(PROMPT, 20, n=3)
    sim.plan()
    row = next(s.row for s in sim.scheduler.live_sequences() if s.key == key)
    sim.toy.fail_rows.add(row)
    sim.fill()
    assert sim.executor.num_running == 5 and sim.depth == len(sim.pending), "two forks are in flight"
    if leaves == "cancelled":
        sim.cancel(key)
    elif leaves == "preempted":
        sim.scheduler._planner.preempt(sim.executor, row)
    sim.run()
    for i in range(3):
        client = sim.clients[key + i]
        assert client.silent or isinstance(client.error, SequenceFailed)
        assert not client.tokens
    assert sim.clients[other].reason is not None
    again = sim.submit(PROMPT, 20)
    sim.run()
    assert sim.clients[again].tokens == sim.expected(again)
    sim.assert_all_free()


def test_prompt_logprobs_come_with_the_first_choice_only() -> None:
    sim = Sim()
    key = sim.submit(PROMPT, 3, n=3, num_prompt_logprobs=2, prompt_logprobs_from=1, num_logprobs=2)
    sim.run()
    for i in range(3):
        outputs = [o for extra in sim.clients[key + i].extras for o in extra.outputs]
        assert sum(o.count for o in outputs) == (22 if i == 0 else 0)
        assert sum(len(extra.logprobs) for extra in sim.clients[key + i].extras) == 3
    sim.assert_tokens()


def test_the_wait_for_a_first_step_is_the_requests_not_each_choices() -> None:
    """Choices whose leader runs are not refused for waiting; one whose leader never ran ends with it."""
    config = CoreConfig(max_queue_time_ms=100, max_prefill_chunk=4)
    sim = Sim(config, toy_info(max_num_seqs=1))
    first = sim.submit(PROMPT, 4, n=3)
    _steps(sim, 2)
    late = sim.submit([5, 6], 4, n=2)
    sim.pass_time(200)
    assert all(isinstance(sim.clients[late + i].error, Overloaded) for i in range(2))
    sim.run()
    assert all(sim.clients[first + i].reason is not None for i in range(3))
    sim.assert_tokens()
    sim.assert_all_free()


def test_who_leads_after_an_aborted_leader_waits_no_longer_than_the_request_may() -> None:
    sim = Sim(CoreConfig(max_queue_time_ms=100), toy_info(max_num_seqs=1))
    running = sim.submit(PROMPT, 40, ignore_eos=True)
    _steps(sim, 2)
    late = sim.submit([5, 6], 4, n=3)
    assert sim.scheduler.cancel(late, sim.now_ns)
    sim.pass_time(200)
    assert all(isinstance(sim.clients[late + i].error, Overloaded) for i in (1, 2))
    sim.run()
    assert sim.clients[running].reason is not None
    sim.assert_all_free()


@pytest.mark.parametrize("crash", [False, True])
def test_choices_spread_over_two_executors(crash: bool) -> None:
    """A choice that another executor takes has nobody to fork from there."""
    one = Sim(CoreConfig(max_num_seqs=3, max_prefill_chunk=8))
    other = Sim(beside=one)
    for i in range(4):
        one.submit(range(5 + i, 28 + i), 25, n=4)
    for _ in range(8):
        for sim in (one, other):
            sim.fill()
            sim.deliver()
    assert one.scheduler.executors[0].num_running and one.scheduler.executors[1].num_running
    assert one.scheduler.reset_cache()[1] > 0, "of both"
    if crash:
        one.disconnect()
    while one.scheduler.num_live or other.pending or one.pending:
        for sim in (one, other):
            sim.fill()
            sim.deliver()
    assert all(client.reason is not None for client in one.clients.values())
    one.assert_tokens()
    other.assert_tokens()
    for stats in one.scheduler.stats().executors[crash:]:
        assert stats.free_rows == stats.num_rows and stats.free_blocks == stats.num_blocks
