"""The prefill budget against a modelled executor: noise, delays, changes of speed and of the batch."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from scheduler_svc.core.itl_controller import FIRST_BUDGET, MIN_BUDGET, ItlController
from scheduler_svc.core.step_times import StepTimes

MS = 1_000_000


@dataclass
class Device:
    """A step takes (base + each decode + each prefill token) × speed × noise. Log-normal noise has a long tail."""

    base_ms: float = 4.0
    decode_ms: float = 0.03
    token_ms: float = 0.02
    sigma: float = 0.05
    slower: float = 1.0

    def mean_ms(self, prefill: int, decodes: int) -> float:
        return (self.base_ms + self.decode_ms * decodes + self.token_ms * prefill) * self.slower

    def step_ms(self, prefill: int, decodes: int, draw: random.Random) -> float:
        return self.mean_ms(prefill, decodes) * draw.lognormvariate(0, self.sigma)

    def most_tokens(self, target_ms: float, decodes: int) -> float:
        """The most prefill tokens of a step that keeps the target in 99 % of cases."""
        tail = float(np.exp(2.326 * self.sigma))
        return (target_ms / tail / self.slower - self.base_ms - self.decode_ms * decodes) / self.token_ms


def _drive(
    device: Device,
    target_ms: float,
    steps: int,
    *,
    depth: int = 2,
    decodes: Callable[[int], int] = lambda step: 32,
    wanted: Callable[[int], int] = lambda step: 1 << 30,
    change: Callable[[int, Device], None] = lambda step, device: None,
    seed: int = 1,
) -> tuple[list[float], list[int]]:
    """Step times in ms and their prefill tokens. A step's budget is that of `depth` steps before its result."""
    draw, times = random.Random(seed), StepTimes()
    controller = ItlController(target_ms * MS, 8192, times)
    planned: deque[tuple[int, int]] = deque()
    took, tokens = [], []
    for step in range(steps):
        change(step, device)
        while len(planned) < depth:
            planned.append((min(controller.budget, wanted(step)), decodes(step)))
        prefill, rows = planned.popleft()
        duration_ms = device.step_ms(prefill, rows, draw)
        controller.update(prefill, rows, int(duration_ms * MS))
        times.update(prefill, int(duration_ms * MS))
        took.append(duration_ms)
        tokens.append(prefill)
    return took, tokens


@pytest.mark.parametrize("sigma", [0.0, 0.02, 0.05, 0.15])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("target_ms", [12.0, 40.0])
def test_p99_keeps_the_target_and_throughput_is_near_the_most_it_allows(
    sigma: float, depth: int, target_ms: float
) -> None:
    device = Device(sigma=sigma)
    took, tokens = _drive(device, target_ms, 8000, depth=depth)
    assert np.percentile(took[500:], 99) <= target_ms
    assert np.mean(tokens[500:]) >= 0.82 * device.most_tokens(target_ms, 32)


@pytest.mark.parametrize("factor", [0.4, 0.7, 1.6, 2.5])
def test_a_change_of_speed_is_answered_within_a_few_steps(factor: float) -> None:
    def change(step: int, device: Device) -> None:
        device.slower = factor if step >= 3000 else 1.0

    device = Device()
    took, tokens = _drive(device, 30.0, 9000, change=change)
    over = np.array(took) > 30.0
    assert over[3000:3060].sum() <= 25, "it takes the new speed in"
    assert over[3060:].mean() <= 0.01
    assert np.mean(tokens[4000:]) >= 0.8 * device.most_tokens(30.0, 32)
    assert np.std(tokens[5000:]) <= 0.15 * np.mean(tokens[5000:]), "and comes to rest"


def test_a_batch_that_grows_and_shrinks() -> None:
    device = Device(decode_ms=0.06)
    took, tokens = _drive(device, 30.0, 12000, decodes=lambda step: 8 if step // 1500 % 2 else 200)
    late = np.array(took[1500:])
    assert (late > 30.0).mean() <= 0.015  # the few steps at each change are among them
    most = np.mean([device.most_tokens(30.0, 8), device.most_tokens(30.0, 200)])
    assert np.mean(tokens[1500:]) >= 0.75 * most


def test_a_batch_that_was_too_large_for_the_target_does_not_leave_the_budget_low_for_ever() -> None:
    """All steps carry prefill, so none tells how short decoding alone has become."""
    device = Device(decode_ms=0.1)
    took, tokens = _drive(
        device,
        30.0,
        6000,
        decodes=lambda step: 300 if step < 1000 else 8,
        wanted=lambda step: 0 if step < 100 else 1 << 30,
    )
    assert set(tokens[200:990]) == {MIN_BUDGET}
    assert np.mean(tokens[1100:]) >= 0.8 * device.most_tokens(30.0, 8)
    assert (np.array(took[1000:]) > 30.0).mean() <= 0.01


def test_prompts_in_bursts_between_steps_that_only_decode() -> None:
    device = Device(sigma=0.08)
    took, _ = _drive(device, 25.0, 20000, wanted=lambda step: 1 << 30 if step % 40 < 12 else 0)
    with_prefill = [ms for step, ms in enumerate(took) if step > 1000 and step % 40 < 12]
    assert np.percentile(with_prefill, 99) <= 25.0


def test_what_decoding_alone_does_not_keep_still_lets_prompts_through() -> None:
    took, tokens = _drive(Device(base_ms=20.0), 10.0, 2000)
    assert set(tokens[100:]) == {MIN_BUDGET} and min(took) > 10.0


def test_pauses_that_no_budget_can_help_do_not_take_all_of_it() -> None:
    """Two steps in a hundred take ten times as long, whatever is in them: p99 can not be kept, the rest goes on."""
    draw = random.Random(7)
    device = Device()

    def change(step: int, device: Device) -> None:
        device.slower = 10.0 if draw.random() < 0.02 else 1.0

    _, tokens = _drive(device, 40.0, 6000, change=change)
    assert np.mean(tokens[1000:]) >= 0.15 * Device().most_tokens(40.0, 32)


def test_it_begins_small_and_keeps_to_its_limits() -> None:
    times = StepTimes()
    assert ItlController(30 * MS, 8192, times).budget == FIRST_BUDGET
    assert ItlController(30 * MS, 64, times).budget == 64
    times.update(0, 5 * MS)
    times.update(100, 6 * MS)
    assert ItlController(1e12, 2048, times).budget == 2048


@pytest.mark.parametrize("slower", [2.0, 3.0, 5.0])
@pytest.mark.parametrize("target_ms", [8.0, 16.0, 30.0])
def test_a_spell_of_slow_steps_is_forgotten(slower: float, target_ms: float) -> None:
    """While nothing keeps the target the budget is as small as can be; there must be a way out of that."""

    def change(step: int, device: Device) -> None:
        device.slower = slower if 1000 <= step < 1400 else 1.0

    device = Device()
    took, tokens = _drive(device, target_ms, 9000, change=change)
    assert np.mean(tokens[6000:]) >= 0.75 * device.most_tokens(target_ms, 32)
    assert (np.array(took[1460:]) > target_ms).mean() <= 0.01
