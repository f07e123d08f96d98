"""Whatever happened to a sequence, its tokens are those of an undisturbed run."""

import random
import struct

import pytest

from common.messages import u32
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.recent_tokens import SPAN
from scheduler_svc.messages import FinishReason
from tests.fakes.toy_executor import toy_info
from tests.fakes.toy_tokens import is_greedy, log_softmax, toy_logits
from tests.sim.harness import Sim


def _load(sim: Sim, count: int = 12) -> None:
    draw = random.Random(7)
    shared = [draw.randrange(3, 900) for _ in range(40)]
    for i in range(count):
        prompt = shared[: draw.randrange(0, 40)] + [draw.randrange(3, 900) for _ in range(draw.randrange(1, 20))]
        sim.submit(prompt, draw.randrange(1, 40), temperature=0.0 if i % 2 else 0.7)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(("chunk", "block_size"), [(0, 4), (1, 8), (7, 16), (16, 3)])
def test_depth_chunk_block_size_and_cache(depth: int, cache: bool, chunk: int, block_size: int) -> None:
    config = CoreConfig(pipeline_depth=depth, max_prefill_chunk=chunk, enable_prefix_cache=cache)
    sim = Sim(config, toy_info(block_size=block_size, num_blocks=400))
    _load(sim)
    sim.run()
    sim.assert_tokens()
    sim.assert_all_free()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_preemption_by_a_tiny_cache(depth: int) -> None:
    """vllm#16832: output is incomplete after recompute."""
    sim = Sim(CoreConfig(pipeline_depth=depth), toy_info(num_blocks=26, num_rows=70, max_num_seqs=6), eos_chance=0.02)
    for i in range(12):
        sim.submit(range(3 + i, 8 + i), 60)
    sim.run()
    assert sim.scheduler.stats().preemptions > 0
    sim.assert_tokens()
    sim.assert_all_free()


@pytest.mark.parametrize("cache", [True, False])
def test_sequences_of_more_steps_than_the_last_ones_that_are_kept(cache: bool) -> None:
    """What the core keeps of the last steps runs over and is emptied row by row; the preempted, a lost executor and the
    next turn all need tokens from before that."""
    info = toy_info(block_size=64, max_blocks_per_row=40, num_blocks=200, vocab_size=40)
    sim = Sim(CoreConfig(enable_prefix_cache=cache), info)
    check, sim.check = sim.check, lambda: None  # type: ignore[method-assign]
    keys = [sim.submit(range(5 + i, 10 + i), SPAN + 150 * i, ignore_eos=True) for i in range(1, 5)]
    for step in range(SPAN + 90):
        sim.fill()
        sim.deliver()
        if step % 64 == 0:
            check()
        if step in (700, SPAN + 60):
            row = next(s.row for s in sim.scheduler.live_sequences() if s.key == keys[-1])
            sim.scheduler._planner.preempt(sim.executor, row)
    sim.disconnect()
    sim.run()
    check()
    sim.assert_tokens()
    turns = [sim.submit([*range(5 + i, 10 + i), *sim.clients[key].tokens, 7], 4) for i, key in enumerate(keys, 1)]
    sim.run()
    assert all(bool(sim.clients[turn].cached) == cache for turn in turns)
    sim.assert_tokens()
    sim.assert_all_free()


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("how", ["stream", "process"])
@pytest.mark.parametrize("after", [0, 1, 3, 9])
def test_an_executor_lost_in_the_middle(depth: int, how: str, after: int) -> None:
    sim = Sim(CoreConfig(pipeline_depth=depth, max_prefill_chunk=16))
    _load(sim)
    for _ in range(3):
        for _ in range(after):
            sim.fill()
            sim.deliver()
        sim.fill()
        sim.disconnect()
        if how == "process":
            sim.replace_executor()
        sim.connect()
    sim.run()
    assert sim.scheduler.stats().executors[0].epochs_ended == 3
    sim.assert_tokens()
    sim.assert_all_free()


def test_kept_blocks_are_used_after_a_broken_stream_and_not_after_a_crash() -> None:
    computed: dict[str, int] = {}
    for how in ("stream", "process", "unwilling"):
        sim = Sim()
        sim.submit(range(10, 50), 60, ignore_eos=True)
        for _ in range(25):
            sim.fill()
            sim.deliver()
        sim.disconnect()
        if how == "process":
            sim.replace_executor()
        sim.toy.keep_kv = how != "unwilling"
        before = len(sim.records)
        sim.run()
        sim.assert_tokens()
        computed[how] = sim.records[before].plan.admit[0].computed_len
    # 40 prompt tokens and 25 generated; the newest token was never computed.
    assert computed == {"stream": 64, "process": 0, "unwilling": 0}


def test_delivered_tokens_survive_with_their_boundary() -> None:
    sim = Sim()
    key = sim.submit([5, 6, 7], 30)
    for _ in range(6):
        sim.fill()
        sim.deliver()
    sim.disconnect()
    sim.connect()
    sim.fill()
    admit = next(r for r in reversed(sim.records) if r.plan.admit).plan.admit[0]
    assert admit.prompt_len == 3
    assert admit.tokens.tolist() == [5, 6, 7, *sim.clients[key].tokens]
    assert admit.sampling.max_tokens == 30
    sim.run()
    sim.assert_tokens()


def test_a_shared_prefix_is_computed_once() -> None:
    sim = Sim()
    first = sim.submit(range(10, 40), 4)
    sim.run()
    second = sim.submit([*range(10, 40), 50, 51], 4)
    salted = sim.submit([*range(10, 40), 50, 51], 4, cache_salt=b"x")
    sim.run()
    assert (sim.clients[first].cached, sim.clients[second].cached, sim.clients[salted].cached) == (0, 28, 0)
    assert sim.scheduler.stats().cached_tokens == 28
    sim.assert_tokens()


def test_at_least_one_prompt_token_is_computed() -> None:
    sim = Sim()
    for _ in range(2):
        key = sim.submit(range(10, 26), 4)  # exactly four blocks
        sim.run()
    assert sim.clients[key].cached == 12
    sim.assert_tokens()


def test_the_answer_is_in_the_cache_for_the_next_turn() -> None:
    sim = Sim()
    first = sim.submit(range(10, 20), 22, ignore_eos=True)
    sim.run()
    turn = sim.submit([*range(10, 20), *sim.clients[first].tokens, 60], 4)
    sim.run()
    assert sim.clients[turn].cached == 28  # 31 computed tokens, in whole blocks
    sim.assert_tokens()


def test_readers_of_a_cached_block_keep_it() -> None:
    sim = Sim(info=toy_info(num_blocks=24, max_num_seqs=6, num_rows=70))
    sim.submit(range(10, 30), 2)
    sim.run()
    for i in range(8):
        sim.submit([*range(10, 30), 40 + i], 30)
    sim.run()
    assert sim.scheduler.stats().cached_tokens >= 20
    sim.assert_tokens()
    sim.assert_all_free()


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("output", [100, 10_000])
def test_prompt_logprobs_are_recomputed_on_a_cache_hit(crash: bool, output: int) -> None:
    """vllm#42019: they are stale."""
    sim = Sim(CoreConfig(max_prefill_chunk=9), toy_info(max_output_bytes=output))
    prompt = list(range(10, 50))
    sim.submit(prompt, 2)
    sim.run()
    key = sim.submit(prompt, 3, num_prompt_logprobs=2, prompt_logprobs_from=6)
    if crash:
        sim.fill()
        sim.deliver()
        sim.fill()
        sim.disconnect()
        sim.connect()
    sim.run()
    assert sim.clients[key].cached == 4
    seen: dict[int, float] = {}
    for output_ in [o for e in sim.clients[key].extras for o in e.outputs]:
        assert len(output_.data) == output_.count * 12
        for i in range(output_.count):
            assert output_.position + i not in seen
            seen[output_.position + i] = struct.unpack_from("<f", output_.data, 12 * i)[0]
    assert list(seen) == list(range(6, 40))
    for position, logprob in seen.items():
        logits = toy_logits(sim.clients[key].submit.prompt[:position], 1000, (2,))
        assert logprob == pytest.approx(float(log_softmax(logits)[prompt[position]]))
    sim.assert_tokens()


def test_logprobs_belong_to_their_tokens_over_two_workers() -> None:
    sim = Sim(info=toy_info(num_blocks=30, max_num_seqs=6, num_rows=70), eos_chance=0.05)
    keys = [
        sim.submit(range(10 + i, 20 + i), 20, worker=i % 3, num_logprobs=(0, 1, 3)[i % 3], raw_logits=i % 4 == 0)
        for i in range(12)
    ]
    sim.run()
    sim.assert_tokens()
    for key in keys:
        client = sim.clients[key]
        tops = [t for extra in client.extras for t in extra.logprobs]
        wanted = client.submit.sampling.num_logprobs
        assert len(tops) == (len(client.tokens) if wanted else 0)
        for i, top in enumerate(tops):
            sequence = [*client.submit.prompt.tolist(), *client.tokens[:i]]
            logprobs = log_softmax(toy_logits(u32(sequence), 1000, (2,)))
            assert top.chosen == pytest.approx(float(logprobs[client.tokens[i]]))
            assert len(top.ids) == wanted - 1


def test_seeded_sampling_is_the_same_alone_and_in_company() -> None:
    alone, company = Sim(), Sim(CoreConfig(pipeline_depth=3, max_prefill_chunk=5), toy_info(num_blocks=60))
    alone_key = alone.submit(range(10, 20), 25, seed=99)
    alone.run()
    for i in range(6):
        company.submit(range(30 + i, 50 + i), 25)
    key = company.submit(range(10, 20), 25, seed=99)
    company.run()
    assert company.clients[key].tokens == alone.clients[alone_key].tokens
    assert not is_greedy(company.clients[key].submit.sampling)


@pytest.mark.parametrize("length", [16_384, 16_385, 40_000, 300_000])
def test_long_prompts_arrive_in_pieces_before_they_are_used(length: int) -> None:
    info = toy_info(
        block_size=512, max_blocks_per_row=600, num_blocks=700, max_tokens_per_step=length // 3 + 1, vocab_size=50_000
    )
    sim = Sim(info=info)
    sim.submit([3 + i % 40_000 for i in range(length)], 3)
    sim.run()
    for record in sim.records:
        plan = record.plan
        pieces = [*(a.tokens for a in plan.admit), *(e.tokens for e in plan.extend)]
        assert all(len(piece) <= 16_384 for piece in pieces)
        assert sum(4 * len(piece) for piece in pieces) <= 960 * 1024
    assert sum(len(e.tokens) for r in sim.records for e in r.plan.extend) == max(0, length - 16_384)
    sim.assert_tokens()


def test_many_long_prompts_at_once_stay_below_the_message_limit() -> None:
    info = toy_info(
        block_size=512, max_blocks_per_row=64, num_blocks=64 * 40, max_tokens_per_step=500_000, max_num_seqs=40
    )
    sim = Sim(CoreConfig(enable_prefix_cache=False), info)
    for i in range(30):
        sim.submit([3 + (i + j) % 900 for j in range(16_000)], 2)
    sim.run()
    assert len([r for r in sim.records if r.plan.admit]) >= 2
    assert max(sum(4 * len(a.tokens) for a in r.plan.admit) for r in sim.records) <= 960 * 1024
    sim.assert_tokens()


@pytest.mark.parametrize(("min_tokens", "ignore_eos"), [(0, False), (6, False), (0, True), (6, True)])
def test_eos_obeys_ignore_eos_and_min_tokens(min_tokens: int, ignore_eos: bool) -> None:
    sim = Sim(eos_chance=0.3)
    keys = [sim.submit([5 + i, 6, 7], 30, min_tokens=min_tokens, ignore_eos=ignore_eos) for i in range(10)]
    sim.run()
    sim.assert_tokens()
    reasons = {sim.clients[key].reason for key in keys}
    assert reasons == ({FinishReason.MAX_TOKENS} if ignore_eos else {FinishReason.EOS})
    assert ignore_eos or all(len(sim.clients[key].tokens) > min_tokens for key in keys)


def test_stop_ids_end_with_the_stop_token_last() -> None:
    sim = Sim()
    stops = tuple(range(100, 400))
    keys = [sim.submit([5 + i, 6, 7], 60, stop_ids=stops[: 10 * (i + 1)]) for i in range(12)]
    sim.run()
    sim.assert_tokens()
    assert any(sim.clients[key].reason == FinishReason.STOP_TOKEN for key in keys)
