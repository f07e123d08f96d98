"""Every fence guards something: without it, on a device that is late, tokens come out wrong.

The comparison is of tokens and of nothing else: a fence whose loss only made the device fail would not count.
"""

import random
from dataclasses import replace

import pytest

from common.messages import Sampling
from executor_svc.step_executor import PlanRefused
from executor_svc.streams import Fence
from tests.contract.conftest import IS_FULL, Makers
from tests.contract.driver import Driver, NoEndError, Options, Request
from tests.contract.executors import VOCAB
from tests.contract.kinds import RUNNERS
from tests.contract.late_device import LateDevice

# One step deeper than the rings are made for, twice: the fences, not the caller's good manners, must hold.
RING_DEPTH = 1
WAY = Options(depth=RING_DEPTH + 2, chunk=5, preempt_every=17, piece=2, idle=0.4, seed=3)
SEEDS = range(16)

# Kernels trust what they are told, so what comes of a missing fence could take the process along; torch's operators
# look first.
CHECKED = [name for name, kind in RUNNERS.items() if not kind.is_native and not kind.is_interpreted]
# What fences guard is the runner's, whatever computes: on one kind all is tried always, on others with FULL_CONTRACT=1.
FIRST = "exact"
LATE = [(name, seed) for name in RUNNERS for seed in SEEDS if seed == 0 or name == FIRST or IS_FULL]


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


def late_tokens(make: Makers, seed: int, without: Fence | None) -> tuple[list[list[int]] | None, LateDevice]:
    """None: the device failed, or sequences got nowhere."""
    device = LateDevice(seed, without=without)
    runner = make.runner(device=device, depth=RING_DEPTH)
    try:
        return Driver(runner, WAY).run(make.few(requests())), device
    except (PlanRefused, NoEndError):
        return None, device


def right_tokens(make: Makers) -> list[list[int]]:
    """Of the same plans on a device that is never late."""
    if make.name not in _right:
        _right[make.name] = Driver(make.runner(depth=RING_DEPTH), WAY).run(make.few(requests()))
    return _right[make.name]


_right: dict[str, list[list[int]]] = {}


@pytest.mark.parametrize(("make", "seed"), LATE, indirect=["make"])
def test_with_all_fences_lateness_changes_nothing(make: Makers, seed: int) -> None:
    tokens, device = late_tokens(make, seed, None)
    assert tokens == right_tokens(make)
    if seed == 0:
        unused = [fence.name for fence, waits in device.num_waits.items() if not waits]
        assert not unused, f"nothing ever waited at {unused}: this test shows nothing of them"


@pytest.mark.parametrize("make", CHECKED if IS_FULL else [FIRST], indirect=True)
@pytest.mark.parametrize("fence", list(Fence), ids=lambda fence: fence.name)
def test_without_a_fence_tokens_are_wrong(make: Makers, fence: Fence) -> None:
    outcomes, right = (late_tokens(make, seed, fence)[0] for seed in SEEDS), right_tokens(make)
    assert any(tokens is not None and tokens != right for tokens in outcomes), (
        f"{fence.name} guards nothing that tokens show"
    )
