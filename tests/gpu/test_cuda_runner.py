"""The runner on CUDA: the same tokens as on the CPU, from captured graphs, with no synchronisation in steady steps."""

import pytest
import torch

from common.messages import StepMode, u32
from executor_svc.build import make_device
from tests.contract.driver import Driver, Options
from tests.contract.executors import tiny_runner
from tests.contract.plans import admit, prefill, started
from tests.contract.test_tokens_stand import GREEDY, SAMPLINGS, requests

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


def test_exact_tokens_do_not_depend_on_the_batch() -> None:
    runner = tiny_runner(numerics="exact", device=make_device("cuda"), buckets=(4, 8))
    alone = Driver(runner, Options(batch=1), epoch=1).run(requests(GREEDY))
    assert Driver(runner, Options(depth=3, chunk=5, preempt_every=4), epoch=2).run(requests(GREEDY)) == alone
    runner.close()
