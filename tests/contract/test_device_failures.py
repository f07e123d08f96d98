"""A step that fails says so itself; what was finished before it stands."""

from collections.abc import Callable

import pytest
import torch

from common.messages import PlanErrorCode, u32
from executor_svc.step_executor import PlanRefused
from executor_svc.streams import Event, Fence, Stream
from tests.contract.conftest import Makers
from tests.contract.kinds import RUNNERS
from tests.contract.late_device import LateDevice
from tests.contract.plans import Steps, admit, prefill, started, tokens_of

PROMPT = [11, 42, 7, 90, 3, 66]

pytestmark = pytest.mark.parametrize("make", RUNNERS, indirect=True)


class LaunchingDevice(LateDevice):
    """Fails as CUDA does: out of memory when work is launched, while what was launched before runs on to its end; or
    altogether (`lost`), and then no wait tells anything."""

    def __init__(self) -> None:
        super().__init__(seed=0)
        self.out_of_memory = self.lost = False
        self._at_launch: BaseException | None = None

    @property
    def failure(self) -> BaseException | None:
        return self._at_launch or super().failure

    def enqueue(self, stream: Stream, work: Callable[[], None]) -> None:
        if self.out_of_memory and stream is Stream.COMPUTE and self._at_launch is None:
            self._at_launch = torch.OutOfMemoryError("no memory for this step's activations")
        if self._at_launch is None:
            super().enqueue(stream, work)

    def host_fence(self, fence: Fence, event: Event | None) -> bool:
        reached = super().host_fence(fence, event)
        if self.lost:
            self._at_launch = RuntimeError("an illegal access")
        return reached and not self.lost

    def recover(self) -> None:
        super().recover()
        self._at_launch = None


def prefilled(steps: Steps) -> dict[int, int]:
    return steps.run(admit=(admit(0, PROMPT, [0, 1, 2]),), **prefill((0, 0, len(PROMPT))))


def code_of(call: Callable[[], object]) -> PlanErrorCode:
    with pytest.raises(PlanRefused) as refusal:
        call()
    return refusal.value.error.code


def test_out_of_memory_fails_the_step_that_met_it_and_no_earlier_one(make: Makers) -> None:
    calm = started(make.runner())
    want = [prefilled(calm), calm.decode(0), calm.decode(0)]
    device = LaunchingDevice()
    runner = make.runner(device=device)
    steps = started(runner)
    got = [prefilled(steps)]
    good = [steps.launch(decode_rows=u32([0])) for _ in range(2)]
    device.out_of_memory = True
    bad = steps.launch(decode_rows=u32([0]))
    assert code_of(lambda: steps.launch(decode_rows=u32([0]))) is PlanErrorCode.EPOCH_ENDED
    got += [tokens_of(step.wait()) for step in good]
    assert got == want
    assert code_of(bad.wait) is PlanErrorCode.OUT_OF_MEMORY
    assert code_of(lambda: steps.launch(decode_rows=u32([0]))) is PlanErrorCode.EPOCH_ENDED
    device.out_of_memory = False
    again = Steps(runner, epoch=2)
    assert not again.begin(keep_kv=True, known_incarnation=runner.incarnation)
    assert [prefilled(again), again.decode(0), again.decode(0)] == want


def test_a_lost_device_leaves_nothing_to_believe(make: Makers) -> None:
    device = LaunchingDevice()
    steps = started(make.runner(device=device))
    prefilled(steps)
    pending = [steps.launch(decode_rows=u32([0])) for _ in range(2)]
    device.lost = True
    for step in pending:
        assert code_of(step.wait) is PlanErrorCode.DEVICE_FAILED
    assert code_of(lambda: steps.launch(decode_rows=u32([0]))) is PlanErrorCode.EPOCH_ENDED
