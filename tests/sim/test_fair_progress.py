"""Nobody starves: decodes under prefills, the old under pressure, the preempted in the queue."""

import pytest

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.sequence import SequenceState
from tests.fakes.toy_executor import toy_info
from tests.sim.harness import Sim


def test_decodes_never_miss_a_step_under_a_stream_of_prefills() -> None:
    """sglang#32549: decodes starve."""
    sim = Sim(CoreConfig(pipeline_depth=2, max_num_batched_tokens=16), toy_info(num_blocks=1000))
    decoding = [sim.submit([5 + i, 6, 7], 60) for i in range(4)]
    for i in range(30):
        sim.submit(range(3 + i, 103 + i), 2)
    while any(sim.clients[key].reason is None for key in decoding):
        record = sim.plan()
        if record is None:
            sim.deliver()
            continue
        running = [k for k in decoding if sim.clients[k].tokens and sim.clients[k].reason is None]
        planned = set(record.decode_keys.tolist())
        full = {k for k in running if len(sim.clients[k].tokens) + sim.depth >= 60}
        assert set(running) - full <= planned, "a decode sat out for a prefill"
        assert record.plan.num_tokens <= 16
    sim.run()
    sim.assert_tokens()


def test_a_long_prompt_is_cut_so_that_others_go_on() -> None:
    sim = Sim(CoreConfig(max_prefill_chunk=10))
    sim.submit(range(3, 203), 5)
    short = sim.submit([5, 6, 7], 5)
    sim.plan()
    assert sim.records[0].plan.prefill_counts.tolist() == [10, 3]
    sim.run()
    assert sim.clients[short].reason is not None
    assert all(r.plan.prefill_counts.max(initial=0) <= 10 for r in sim.records)
    sim.assert_tokens()


def test_first_come_first_served() -> None:
    sim = Sim(CoreConfig(max_num_seqs=2))
    keys = [sim.submit([5 + i, 6, 7], 6) for i in range(10)]
    order: list[int] = []
    while sim.scheduler.num_live:
        sim.fill()
        sim.deliver()
        order += [k for k in keys if sim.clients[k].tokens and k not in order]
    assert order == keys


def test_preemption_storm_is_bounded_and_the_oldest_always_moves() -> None:
    """vllm#18115: throughput collapses when the cache is full."""
    config = CoreConfig(pipeline_depth=2, max_preemptions=2)
    sim = Sim(config, toy_info(num_blocks=24, max_num_seqs=8, num_rows=72))
    keys = [sim.submit(range(3 + i, 9 + i), 60) for i in range(16)]
    preempted = dict.fromkeys(keys, 0)
    last, quiet = (0, 0), 0
    while sim.scheduler.num_live:
        before = {s.key: s.preemptions for s in sim.scheduler.live_sequences()}
        oldest = min(before)
        sim.fill()
        sim.deliver()
        for sequence in sim.scheduler.live_sequences():
            preempted[sequence.key] = sequence.preemptions
        assert preempted[oldest] == before.get(oldest, 0), "the oldest was preempted"
        tokens = len(sim.clients[oldest].tokens)
        quiet = quiet + 1 if (oldest, tokens) == last else 0
        last = (oldest, tokens)
        assert quiet <= 4 * sim.depth, "the oldest stands still"
    assert sim.scheduler.stats().preemptions > 0
    assert max(preempted.values()) <= 2
    sim.run()
    sim.assert_tokens()
    sim.assert_all_free()


def test_a_preempted_sequence_comes_back_before_any_that_never_ran() -> None:
    """vllm#41951: it loses its place for ever."""
    sim = Sim(CoreConfig(pipeline_depth=2), toy_info(num_blocks=20, max_num_seqs=3, num_rows=67))
    keys = [sim.submit(range(3 + i, 23 + i), 30) for i in range(8)]
    admitted: list[int] = []
    while sim.scheduler.num_live:
        live = sim.scheduler.live_sequences()
        waiting_again = {s.key for s in live if s.preemptions and s.state != SequenceState.RUNNING}
        record = sim.plan()
        if record is None:
            sim.deliver()
            continue
        rows = sim.scheduler.executors[0].rows
        taken = [int(rows.keys[admit.row]) for admit in record.plan.admit]
        assert set(taken) <= set(admitted) or waiting_again <= set(taken), "a newcomer passed a preempted one"
        admitted += taken
    assert sim.scheduler.stats().preemptions > 0
    assert sorted(set(admitted)) == keys
    sim.assert_tokens()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline"])
def test_nobody_takes_the_place_of_one_whose_results_are_under_way(policy: str) -> None:
    sim = Sim(CoreConfig(policy=policy, max_num_seqs=1))
    first = sim.submit([5, 6, 7], 20, ignore_eos=True)
    sim.fill()
    sim.deliver()
    sim.fill()
    newcomer = sim.submit([6, 6, 7], 5)
    sim.scheduler._planner.preempt(sim.executor, sim.scheduler.live_sequences()[0].row)
    while sim.clients[first].reason is None:
        sim.fill()
        assert not any(
            newcomer in record.prefill_keys.tolist() for record in sim.records if not sim.clients[first].ends
        )
        sim.deliver()
    sim.run()
    assert sim.clients[newcomer].reason is not None
    sim.assert_tokens()


@pytest.mark.parametrize("steps", [2, 3, 4, 5])
@pytest.mark.parametrize("depth", [2, 3])
def test_a_row_that_limbo_will_satisfy_sits_out(depth: int, steps: int) -> None:
    """The others want a block while one that left still holds its own: in steps that differ with the depth."""
    sim = Sim(CoreConfig(pipeline_depth=depth), toy_info(num_blocks=12, max_num_seqs=3, num_rows=67))
    old, leaving, young = (sim.submit(range(3 + i, 12 + i), 40, ignore_eos=True) for i in range(3))
    sim.fill()
    for _ in range(steps):
        sim.deliver()
        sim.fill()
    sim.cancel(leaving)  # its blocks are in limbo now
    before = sim.scheduler.stats().preemptions
    for _ in range(depth + 1):
        sim.plan()
        sim.deliver()
    assert sim.scheduler.stats().preemptions == before
    sim.run()
    for key in (old, young):
        assert sim.clients[key].reason is not None
    sim.assert_tokens()


def test_higher_priority_is_admitted_first_where_the_policy_says_so() -> None:
    sim = Sim(CoreConfig(max_num_seqs=1, policy="priority"))
    low, high = sim.submit([5, 6, 7], 5, priority=-1), sim.submit([6, 7, 8], 5, priority=3)
    sim.plan()
    assert sim.records[0].prefill_keys.tolist() == [high]
    sim.run()
    assert sim.clients[low].reason is not None


def test_raw_logits_beyond_the_output_budget_take_turns() -> None:
    info = toy_info(max_output_bytes=2 * 4 * 1000)  # two rows a step
    sim = Sim(CoreConfig(pipeline_depth=2), info)
    keys = [sim.submit([5 + i, 6, 7], 12, raw_logits=True, ignore_eos=True) for i in range(5)]
    plain = sim.submit([50, 6, 7], 12, ignore_eos=True)
    progress: list[int] = []
    while sim.scheduler.num_live:
        sim.fill()
        sim.deliver()
        lengths = [len(sim.clients[k].tokens) for k in keys]
        progress.append(max(lengths) - min(lengths))
    assert all(len(r.plan.raw_logits_rows) <= 2 for r in sim.records)
    assert max(progress) <= 4, "one row ran away from the others"
    assert len(sim.clients[plain].tokens) == 12
    for key in keys:
        outputs = [o for e in sim.clients[key].extras for o in e.outputs]
        assert [o.position for o in outputs] == list(range(3, 15))
    sim.assert_tokens()


def _step_times(target_ms: float) -> tuple[list[float], int]:
    """Milliseconds of each step that decodes and prefills, at 2 ms and 0.1 ms a token; and all tokens of prompts."""
    sim = Sim(CoreConfig(target_itl_ms=target_ms, enable_prefix_cache=False), toy_info(num_blocks=2000))
    for i in range(4):
        sim.submit([5 + i, 6, 7], 150, ignore_eos=True)
    took, prompts = [], 0
    for i in range(140):
        if sim.scheduler.num_waiting < 4:
            sim.submit(range(5 + i, 105 + i), 1, ignore_eos=True)
        sim.fill()
        record = sim.pending[0][0]
        milliseconds = 2 + 0.1 * record.plan.num_tokens
        sim.clock.advance_ns(int(milliseconds * 1e6))
        sim.deliver()
        prompts += record.prefill_tokens
        if i >= 20 and record.decode_tokens and record.prefill_tokens:
            took.append(milliseconds)
    sim.run()
    sim.assert_tokens()
    return took, prompts


def test_a_target_for_the_time_between_tokens_bounds_what_prompts_may_take_of_a_step() -> None:
    free, most = _step_times(0.0)
    assert max(free) == 8.4, "64 tokens, all that the executor takes"
    steered, prompts = _step_times(5.5)
    assert max(steered) <= 5.5 and len(steered) > 50
    assert prompts > 0.4 * most, "as many as the target allows: 30 of 60"


def test_prompt_logprobs_do_not_wait_until_no_raw_logits_are_wanted() -> None:
    """One row's raw logits fill the output of a step, in every step."""
    sim = Sim(CoreConfig(), toy_info(max_output_bytes=4000))
    raw = sim.submit([5, 6, 7], 100, raw_logits=True, ignore_eos=True)
    sim.fill()
    sim.deliver()
    key = sim.submit(range(20, 60), 5, num_prompt_logprobs=3, prompt_logprobs_from=1)
    while sim.clients[key].reason is None:
        sim.fill()
        sim.deliver()
    assert len(sim.clients[raw].tokens) < 15
    sim.run()
    sim.assert_tokens()
