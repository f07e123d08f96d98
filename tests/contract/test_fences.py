"""Every fence guards something: without it, on a device that is late, tokens come out wrong.

The comparison is of tokens and of nothing else: a fence whose loss only made the device fail would not count.
"""

import random
from dataclasses import replace

import pytest

from common.messages import Sampling
from executor_svc.step_executor import PlanRefused
from executor_svc.streams import Fence
from tests.contract.driver import Driver, NoEndError, Options, Request
from tests.contract.executors import VOCAB, tiny_runner
from tests.contract.late_device import LateDevice

# One step deeper than the rings are made for, twice: the fences, not the caller's good manners, must hold.
RING_DEPTH = 1
WAY = Options(depth=RING_DEPTH + 2, chunk=5, preempt_every=17, piece=2, idle=0.4, seed=3)
SEEDS = range(16)


def requests() -> list[Request]:
    rng = random.Random(4)
    sampling = Sampling(seed=5, max_tokens=1, temperature=0.8, ignore_eos=True)
    return [
        Request(
            tuple(rng.randrange(VOCAB - 1) for _ in range(rng.randrange(2, 14))),
            replace(sampling, seed=n, temperature=0.8 * (n % 2), max_tokens=4 + 3 * n),
            arrives=n,
        )
        for n in range(7)
    ]


def late_tokens(seed: int, without: Fence | None) -> tuple[list[list[int]] | None, LateDevice]:
    """None: the device failed, or sequences got nowhere."""
    device = LateDevice(seed, without=without)
    runner = tiny_runner(device=device, depth=RING_DEPTH)
    try:
        return Driver(runner, WAY).run(requests()), device
    except (PlanRefused, NoEndError):
        return None, device


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    runner = tiny_runner()
    try:
        return Driver(runner, Options(batch=1)).run(requests())
    finally:
        runner.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_with_all_fences_lateness_changes_nothing(right: list[list[int]], seed: int) -> None:
    tokens, device = late_tokens(seed, None)
    assert tokens == right
    if seed == 0:
        unused = [fence.name for fence, waits in device.num_waits.items() if not waits]
        assert not unused, f"nothing ever waited at {unused}: this test shows nothing of them"


@pytest.mark.parametrize("fence", list(Fence), ids=lambda fence: fence.name)
def test_without_a_fence_tokens_are_wrong(right: list[list[int]], fence: Fence) -> None:
    outcomes = (late_tokens(seed, fence)[0] for seed in SEEDS)
    assert any(tokens is not None and tokens != right for tokens in outcomes), (
        f"{fence.name} guards nothing that tokens show"
    )
