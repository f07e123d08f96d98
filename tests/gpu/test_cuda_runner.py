"""The runner on CUDA: the same tokens as on the CPU, from captured graphs, with no synchronisation in steady steps."""

from dataclasses import replace

import pytest
import torch

from common.messages import PlanErrorCode, StepMode, u32
from executor_svc.build import build_runner, make_device, make_ops
from executor_svc.environment import why_no_triton
from executor_svc.step_executor import PlanRefused
from tests.contract.driver import Driver, Options
from tests.contract.executors import tiny_model, tiny_runner
from tests.contract.plans import admit, prefill, started, tokens_of
from tests.contract.test_tokens_stand import GREEDY, SAMPLINGS, requests
from tests.unit.executor.test_runner import Brittle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_tokens_are_those_of_the_cpu(name: str) -> None:
    sampling = SAMPLINGS[name]
    on_cpu = tiny_runner(numerics="fast")
    on_cuda = tiny_runner(numerics="fast", device=make_device("cuda"), buckets=(1, 2, 4, 8))
    want = Driver(on_cpu, Options()).run(requests(sampling))
    assert Driver(on_cuda, Options(depth=3)).run(requests(sampling)) == want
    on_cpu.close()
    on_cuda.close()


# torch says once that its watch for synchronisation is a prototype, and here a warning is an error.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_steady_steps_replay_graphs_and_never_wait_for_the_device() -> None:
    runner = tiny_runner(numerics="fast", device=make_device("cuda"), buckets=(1, 2, 4, 8))
    steps = started(runner)
    steps.run(admit=(admit(0, [4, 5, 6], list(range(10)), sampling=GREEDY),), **prefill((0, 0, 3)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = []
        for _ in range(4):
            pending.append(steps.launch(decode_rows=u32([0])))
            if len(pending) > 1:
                result = pending.pop(0).wait()
                assert (result.mode, result.bucket) == (StepMode.GRAPH, 1)
                assert 0 < result.timings.device_start_ns <= result.timings.device_end_ns
        for step in pending:
            step.wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    runner.close()


def test_steady_steps_take_no_memory_of_the_device() -> None:
    runner = tiny_runner(numerics="fast", device=make_device("cuda"), buckets=(1, 2, 4, 8))
    steps = started(runner)
    sampling = replace(GREEDY, max_tokens=20)
    steps.run(admit=(admit(0, [4, 5, 6], list(range(8)), sampling=sampling),), **prefill((0, 0, 3)))
    for _ in range(6):  # each slot of the rings once
        steps.decode(0)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(6):
        steps.decode(0)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    runner.close()


def test_tokens_are_the_same_where_kernels_are_launched_early() -> None:
    if torch.cuda.get_device_capability() < (9, 0) or why_no_triton():
        pytest.skip("needs capability 9.0 and Triton")
    from executor_svc.kernels.early import launch_early

    tokens = []
    for on in (False, True):
        launch_early(on)
        try:
            runner = tiny_runner(numerics="fast", device=make_device("cuda"), buckets=(1, 2, 4, 8))
            tokens.append(Driver(runner, Options(depth=3)).run(requests(GREEDY)))
            runner.close()
        finally:
            launch_early(False)
    assert tokens[0] == tokens[1]


def test_exact_tokens_do_not_depend_on_the_batch() -> None:
    runner = tiny_runner(numerics="exact", device=make_device("cuda"), buckets=(4, 8))
    alone = Driver(runner, Options(batch=1), epoch=1).run(requests(GREEDY))
    assert Driver(runner, Options(depth=3, chunk=5, preempt_every=4), epoch=2).run(requests(GREEDY)) == alone
    runner.close()


def test_out_of_memory_at_a_launch_fails_no_earlier_step() -> None:
    device = make_device("cuda")
    ops = make_ops("fast")
    model = Brittle(tiny_model(ops, device=device.torch_device))
    runner = build_runner(
        model, ops=ops, device=device, block_size=4, num_blocks=64, max_num_seqs=8, max_tokens_per_step=32, buckets=()
    )  # fmt: skip
    steps = started(runner)
    steps.run(admit=(admit(0, [4, 5, 6], list(range(10)), sampling=GREEDY),), **prefill((0, 0, 3)))
    good = steps.launch(decode_rows=u32([0]))
    model.failure = torch.OutOfMemoryError("no memory")
    bad = steps.launch(decode_rows=u32([0]))
    assert set(tokens_of(good.wait())) == {0}
    with pytest.raises(PlanRefused) as refusal:
        bad.wait()
    assert refusal.value.error.code is PlanErrorCode.OUT_OF_MEMORY
    runner.close()
