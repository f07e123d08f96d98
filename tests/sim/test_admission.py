"""Admission and queue: what can never fit is refused at once, what fits gets its turn."""

import numpy as np
import pytest

from common.errors import (
    Draining,
    DuplicateRequest,
    InvalidInput,
    NotSupported,
    Overloaded,
    ProtocolError,
    StepwireError,
    TooLarge,
    Unavailable,
)
from common.messages import Sampling, u32
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.messages import FinishReason, Submit
from tests.fakes.toy_executor import toy_info
from tests.sim.harness import Sim


def test_a_prompt_larger_than_the_kv_cache_is_refused_and_others_run() -> None:
    """vllm#39734, vllm#1534: it blocks the queue for everyone behind it."""
    sim = Sim(info=toy_info(num_blocks=8))  # 32 slots
    with pytest.raises(TooLarge) as refused:
        sim.submit(range(3, 35), 1)
    assert refused.value.limit == "31" and refused.value.field == "prompt"
    key = sim.submit(range(3, 34), 1)
    sim.run()
    assert sim.clients[key].reason == FinishReason.MAX_TOKENS
    assert sim.scheduler.stats().requests_refused == 1


def test_context_limit_takes_the_kv_cache_into_account() -> None:
    sim = Sim(info=toy_info(num_blocks=8))
    assert sim.scheduler.limits() == (32, 31)
    key = sim.submit([5, 6, 7], 0, ignore_eos=True)
    sim.run()
    assert sim.clients[key].reason == FinishReason.CONTEXT
    assert len(sim.clients[key].tokens) == 29
    sim.assert_tokens()


@pytest.mark.parametrize("small", [{"num_blocks": 16}, {"max_blocks_per_row": 16}], ids=str)
def test_no_sequence_outgrows_the_smallest_executor(small: dict[str, int]) -> None:
    """It could end up there: then it would never fit, and hold up everyone behind it."""
    one = Sim(info=toy_info(**small))
    other = Sim(info=toy_info(num_blocks=256), beside=one)
    grown = one.submit(range(5, 40), 0)
    for _ in range(25):
        other.fill()
        other.deliver()
    other.disconnect()
    late = one.submit([5, 6, 7], 4)
    one.run()
    assert one.clients[grown].reason == FinishReason.CONTEXT and len(one.clients[grown].tokens) == 64 - 35
    assert one.clients[late].reason == FinishReason.MAX_TOKENS
    one.assert_tokens()


@pytest.mark.parametrize(
    ("less", "error"),
    [
        ({"max_output_bytes": 2000}, TooLarge),
        ({"features": ("logprobs",)}, NotSupported),
        ({"max_message_bytes": 128 * 1024}, TooLarge),
    ],
    ids=str,
)
def test_an_executor_that_comes_back_with_less_leaves_nobody_waiting_for_ever(
    less: dict[str, object], error: type[StepwireError]
) -> None:
    sim = Sim(info=toy_info(max_output_bytes=1 << 20))
    bias = tuple((token, 1.0) for token in range(300)) * 80
    wide = sim.submit([5, 6, 7], 9, raw_logits=True, bias=bias)
    usual = sim.submit([5, 6, 7], 9)
    sim.fill()
    sim.deliver()
    sim.disconnect()
    sim.replace_executor(toy_info(**less))
    sim.run()
    assert isinstance(sim.clients[wide].error, error)
    assert sim.clients[usual].reason == FinishReason.MAX_TOKENS
    with pytest.raises(ProtocolError):
        Sim(info=toy_info(**{**less, "max_output_bytes": 1000, "features": ()}), beside=sim)


def test_an_executor_is_not_locked_out_because_another_has_grown() -> None:
    one = Sim(info=toy_info(num_blocks=16))
    other = Sim(info=toy_info(num_blocks=16), beside=one)
    other.disconnect()
    other.replace_executor(toy_info(num_blocks=64))
    other.connect()
    one.disconnect()
    one.connect()
    assert one.executor.up and one.scheduler.limits() == (64, 63)
    one.disconnect()
    one.replace_executor(toy_info(num_blocks=15))
    with pytest.raises(ProtocolError):
        one.connect()


@pytest.mark.parametrize("num_blocks", [2, 3, 4])
def test_very_few_blocks_still_serve_everyone(num_blocks: int) -> None:
    """vllm#35541: one request is retried for ever."""
    sim = Sim(info=toy_info(num_blocks=num_blocks))
    for i in range(12):
        sim.submit(range(3 + i, 3 + i + 1 + i % (num_blocks * 4 - 1)), 20)
    sim.run()
    sim.assert_tokens()
    sim.assert_all_free()


def _submit(**fields: object) -> Submit:
    values: dict[str, object] = {"key": 1, "request_id": "a", "prompt": u32([5, 6]), "arrival_ns": 0}
    values["sampling"] = Sampling(1, 5)
    values.update(fields)
    return Submit(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        (_submit(prompt=u32()), InvalidInput, "prompt"),
        (_submit(prompt=u32([5, 1000])), InvalidInput, "prompt"),
        (_submit(sampling=Sampling(1, 5, stop_ids=(1000,))), InvalidInput, "sampling.stop_ids"),
        (_submit(sampling=Sampling(1, 5, allowed_ids=(1000,))), InvalidInput, "sampling.allowed_ids"),
        (_submit(sampling=Sampling(1, 5, bias=((1000, 1.0),))), InvalidInput, "sampling.bias"),
        (_submit(sampling=Sampling(1, 5, min_tokens=1, allowed_ids=(2,))), InvalidInput, "sampling.allowed_ids"),
        (_submit(prompt=u32(np.ones(256))), TooLarge, "prompt"),
        (_submit(raw_logits=True), TooLarge, "raw_logits"),
        (_submit(sampling=Sampling(1, 5, num_prompt_logprobs=500)), TooLarge, "prompt_logprobs"),
        (_submit(sampling=Sampling(1, 5, grammar="x" * 1_000_000)), TooLarge, "sampling"),
    ],
)
def test_what_can_never_run_is_refused_at_once(request_: Submit, error: type[StepwireError], field: str) -> None:
    """mini-sglang: what is too long is dropped with no answer."""
    sim = Sim(info=toy_info(max_output_bytes=3000))
    with pytest.raises(error) as refused:
        sim.scheduler.submit(request_, 0)
    assert refused.value.field == field
    assert sim.scheduler.num_live == 0 and sim.scheduler.keys_of("a") == ()


def test_features_the_executor_lacks_are_refused() -> None:
    sim = Sim(info=toy_info(features=()))
    with pytest.raises(NotSupported):
        sim.submit([5], raw_logits=True)
    with pytest.raises(NotSupported):
        sim.submit([5], num_prompt_logprobs=1, prompt_logprobs_from=1)


def test_a_duplicate_id_is_refused_and_the_first_is_unharmed() -> None:
    """vllm#15041, vllm#10583: the engine crashes."""
    sim = Sim()
    key = sim.submit([5, 6, 7], 10, request_id="same")
    sim.fill()
    with pytest.raises(DuplicateRequest):
        sim.submit([8, 9], 10, request_id="same")
    sim.run()
    sim.assert_tokens()
    assert sim.clients[key].reason is not None
    again = sim.submit([8, 9], 10, request_id="same")
    sim.run()
    assert sim.clients[again].reason is not None


def test_admission_ids_are_never_reused() -> None:
    sim = Sim(info=toy_info(num_blocks=10))
    for i in range(20):
        sim.submit(range(3 + i, 13 + i), 20)
    for _ in range(30):
        sim.fill()
        sim.deliver()
    sim.disconnect()
    sim.run()
    ids = [admit.admission_id for record in sim.records for admit in record.plan.admit]
    assert len(ids) > 20 and len(set(ids)) == len(ids)


def test_the_queue_is_bounded_by_requests() -> None:
    sim = Sim(CoreConfig(max_queued_requests=3))
    for _ in range(3):
        sim.submit([5, 6, 7], 5)
    with pytest.raises(Overloaded) as refused:
        sim.submit([5, 6, 7], 5)
    assert refused.value.retry_after_ms == 1000, "nothing is measured yet"
    sim.fill()  # the queue moves on: there is room again
    sim.submit([5, 6, 7], 5)
    sim.run()
    sim.assert_tokens()


def test_the_queue_is_bounded_by_tokens_but_one_request_always_fits() -> None:
    sim = Sim(CoreConfig(max_queued_tokens=10))
    sim.submit(range(3, 23), 5)
    with pytest.raises(Overloaded) as refused:
        sim.submit([5], 5)
    assert refused.value.limit == "10" and "20 prompt tokens" in refused.value.message
    sim.run()


def test_no_admission_before_any_executor_or_while_draining() -> None:
    scheduler = Scheduler(CoreConfig())
    with pytest.raises(Unavailable):
        scheduler.submit(_submit(), 0)
    scheduler.add_executor("x")
    with pytest.raises(Unavailable):
        scheduler.submit(_submit(), 0)
    sim = Sim()
    key = sim.submit([5, 6], 5)
    sim.scheduler.drain()
    assert not sim.scheduler.is_ready
    with pytest.raises(Draining):
        sim.submit([5, 6], 5)
    sim.run()
    assert sim.clients[key].reason is not None
    sim.assert_all_free()


def test_a_lost_executor_does_not_close_admission() -> None:
    sim = Sim()
    sim.disconnect()
    key = sim.submit([5, 6], 5)
    assert not sim.scheduler.can_schedule(sim.executor_id)
    sim.run()
    assert sim.clients[key].reason is not None


def test_room_is_evaluated_again_at_each_step() -> None:
    """Found in several engines: admission latches "full" though there is room again."""
    sim = Sim(info=toy_info(num_blocks=8, max_num_seqs=2))
    first = sim.submit(range(3, 27), 4)  # six of eight blocks
    second = sim.submit(range(30, 50), 4)
    sim.fill()
    assert sim.scheduler.num_running == 1
    while sim.clients[first].reason is None:
        sim.deliver()
        sim.fill()
    while sim.pending:
        sim.deliver()
    sim.fill()
    assert sim.scheduler.num_running == 1, "the next request runs as soon as the room is there"
    sim.run()
    assert sim.clients[second].reason is not None
    sim.assert_tokens()


def test_room_is_evaluated_again_when_the_prefix_became_known_meanwhile() -> None:
    """Who found no room for all its blocks needs fewer once another has computed the prompt they share."""
    sim = Sim(CoreConfig(max_prefill_chunk=8), toy_info(num_blocks=14))
    first = sim.submit(range(3, 27), 20, ignore_eos=True)
    second = sim.submit([*range(3, 27), 50, 51], 4, ignore_eos=True)
    sim.fill()
    assert sim.scheduler.num_running == 1
    while not sim.clients[second].tokens:
        assert sim.clients[first].reason is None, "it waited for the other's end"
        sim.deliver()
        sim.fill()
    assert sim.clients[second].cached > 0
    sim.run()
    sim.assert_tokens()
    sim.assert_all_free()


def test_what_no_longer_fits_after_a_restart_ends_with_an_error() -> None:
    sim = Sim(info=toy_info(num_blocks=64))
    large, small = sim.submit(range(3, 103), 50), sim.submit([5, 6, 7], 5)
    sim.fill()
    sim.deliver()
    sim.disconnect()
    sim.replace_executor(toy_info(num_blocks=16))
    sim.connect()
    assert isinstance(sim.clients[large].error, TooLarge)
    sim.run()
    assert sim.clients[small].reason is not None
    sim.assert_all_free()


def test_end_all_ends_everything_once() -> None:
    sim = Sim()
    keys = [sim.submit(range(3 + i, 40 + i), 20) for i in range(30)]
    for _ in range(3):
        sim.fill()
        sim.deliver()
    endings = sim.scheduler.end_all(Unavailable("over"), 0)
    assert sorted(e.key for e in endings) == sorted(k for k in keys if sim.clients[k].reason is None)
    for ending in endings:
        sim.clients[ending.key].silent = True
    sim.check()
    sim.run()
    sim.assert_all_free()
