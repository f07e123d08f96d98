"""Ten thousand steps with requests that come, go, share prefixes and are thrown out leave the process as it was.

A sample runs always; NO_GROWTH_STEPS=10000 for all of them.
"""

import gc
import os
import random
import sys

import psutil
import pytest

from common.messages import Sampling
from executor_svc.step_executor import StepExecutor
from tests.contract.conftest import IS_FULL, Makers
from tests.contract.driver import Driver, Options, Request
from tests.contract.executors import MAX_CONTEXT, VOCAB
from tests.contract.kinds import RUNNERS

STEPS = int(os.environ.get("NO_GROWTH_STEPS", "2000"))
WARM_STEPS = 1000
# One small object of Python's kept for every fifth step would be more, and so would a KiB kept anywhere for every step.
MAX_BLOCKS = STEPS // 5
MAX_BYTES = STEPS << 10
# Of interpreted kernels only the interpreter's own growth would be told.
KINDS = [name for name, kind in RUNNERS.items() if not kind.is_interpreted]


def serve_some(executor: StepExecutor, epoch: int) -> int:
    """One epoch of many requests; returns how many steps it took."""
    rng = random.Random(epoch)
    beginnings = [tuple(rng.randrange(3, VOCAB - 1) for _ in range(8)) for _ in range(3)]
    requests = []
    for number in range(100):
        # What comes after the beginning fills no block: the driver would keep it for ever.
        prompt = rng.choice(beginnings) + tuple(rng.randrange(3, VOCAB - 1) for _ in range(rng.randint(1, 3)))
        sampling = Sampling(
            seed=number,
            max_tokens=rng.randint(2, MAX_CONTEXT - len(prompt) - 1),
            temperature=rng.choice((0.0, 0.8)),
            top_k=rng.choice((0, 5)),
            repetition_penalty=rng.choice((1.0, 1.1)),
            num_logprobs=rng.choice((0, 2)),
            ignore_eos=True,
        )
        requests.append(Request(prompt, sampling, raw=number % 25 == 0))
    options = Options(depth=3, chunk=8, preempt_every=17, share=True, seed=epoch)
    driver = Driver(executor, options, epoch=epoch)
    driver.run(requests)
    return len(driver.results)


def size() -> tuple[int, int]:
    """Blocks that Python has handed out, and bytes of the process in memory."""
    gc.collect()
    return sys.getallocatedblocks(), psutil.Process().memory_info().rss


@pytest.mark.slow
@pytest.mark.parametrize("make", KINDS if IS_FULL else ("torch", "native"), indirect=True)
def test_nothing_grows_with_steps(make: Makers) -> None:
    executor = make()
    steps = epoch = 0
    before = (0, 0)
    while steps < STEPS + WARM_STEPS:
        epoch += 1
        steps += serve_some(executor, epoch)
        if not before[0] and steps >= WARM_STEPS:
            before = size()
    blocks, num_bytes = (now - then for now, then in zip(size(), before, strict=True))
    assert blocks < MAX_BLOCKS, f"{blocks} more blocks of Python's after {steps} steps in {epoch} epochs"
    assert num_bytes < MAX_BYTES, f"{num_bytes} bytes more after {steps} steps in {epoch} epochs"
