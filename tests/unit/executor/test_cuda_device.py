"""CudaDevice, with a stand-in for CUDA whose clock goes its own way."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.clock import ManualClock
from executor_svc.cuda_device import CudaDevice, CudaEvent
from executor_svc.streams import Fence, Stream

US = 1_000
MS = 1_000_000
SECOND = 1_000_000_000
STEP_NS = 20 * MS


class Gpu:
    """Events are met when they are recorded. Its clock gains `ppm` on the host's; what it tells is a float32."""

    def __init__(self, clock: ManualClock, ppm: int) -> None:
        self._clock = clock
        self._rate = 1 + ppm / 1e6

    def make_event(self, **options: bool) -> Any:
        event = SimpleNamespace(met_ns=0.0, synchronize=lambda: None)

        def record(stream: object) -> None:
            event.met_ns = self._clock.monotonic_ns() * self._rate

        def elapsed_time(other: Any) -> float:
            return float(np.float32((other.met_ns - event.met_ns) / MS))

        event.record, event.elapsed_time = record, elapsed_time
        return event


def stand_in(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "Event", gpu.make_event)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda enabled: None)


@pytest.fixture(params=[100, 0, -100])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[CudaDevice, ManualClock]:
    clock = ManualClock()
    stand_in(monkeypatch, Gpu(clock, request.param))
    return CudaDevice(clock=clock), clock


def step(device: CudaDevice, clock: ManualClock, noticed_after_ns: int) -> int:
    """A step of 3 ms. Returns by how much its times are wrong, at most."""
    events, times = [], []
    for took_ns in (0, 3 * MS):
        clock.advance_ns(took_ns)
        events.append(device.record(Stream.COMPUTE))
        times.append(clock.monotonic_ns())
    clock.advance_ns(noticed_after_ns)
    assert device.host_fence(Fence.RESULT_READY, events[-1])
    found = [event.time_ns() for event in events]
    assert abs(found[1] - found[0] - 3 * MS) < 2 * US, "the length of a step is the device's own measure"
    return max(abs(a - b) for a, b in zip(found, times, strict=True))


def test_times_follow_the_hosts_clock(made: tuple[CudaDevice, ManualClock]) -> None:
    device, clock = made
    worst = 0
    for number in range(60 * SECOND // STEP_NS):
        late_ns = 5 * MS if number % 3 else 40 * US  # most are noticed late: the others count
        worst = max(worst, step(device, clock, late_ns))
        clock.advance_ns(STEP_NS - 3 * MS - late_ns)
    assert worst < 250 * US, "the clocks drift 6 ms apart in a minute"


def test_times_are_right_after_an_hour_without_steps(made: tuple[CudaDevice, ManualClock]) -> None:
    device, clock = made
    step(device, clock, 40 * US)
    clock.advance_ns(3600 * SECOND)
    assert step(device, clock, 40 * US) < 250 * US


def test_a_device_that_failed_has_no_times(made: tuple[CudaDevice, ManualClock]) -> None:
    device, _ = made

    def fail(*args: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access")

    event = device.record(Stream.COPY_OUT)
    assert isinstance(event, CudaEvent)
    inner: Any = event.event
    device._base.elapsed_time = fail  # type: ignore[method-assign, assignment]
    assert device.host_fence(Fence.RESULT_READY, event), "it failed only after this event"
    inner.synchronize = fail
    assert not device.host_fence(Fence.RESULT_READY, event)
    assert isinstance(device.failure, torch.AcceleratorError) and event.time_ns() == 0


def test_the_thread_that_waits_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would begin to use the first one."""
    clock = ManualClock()
    stand_in(monkeypatch, Gpu(clock, 0))
    own = threading.local()
    seen: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(own, "device", device))
    device = CudaDevice(1, clock=clock)
    event = device.record(Stream.COPY_OUT)
    assert isinstance(event, CudaEvent)
    inner: Any = event.event
    inner.synchronize = lambda: seen.append(own.device)
    waiter = threading.Thread(target=device.host_fence, args=(Fence.RESULT_READY, event))
    waiter.start()
    waiter.join(20.0)
    assert seen == [torch.device("cuda", 1)]
