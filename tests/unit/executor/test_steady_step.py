"""What a steady step asks of the device besides one replay: a copy of its output, and nothing that takes memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.messages import StepMode, u32
from executor_svc.graph_cache import PlainGraph
from executor_svc.runner import Runner
from tests.contract.executors import tiny_runner
from tests.contract.late_device import LateDevice
from tests.contract.plans import GREEDY, Steps, admit, prefill, started

DEPTH = 2
# Operators that make another tensor of the same memory.
VIEWS = {"slice", "view", "select", "_unsafe_view", "detach"}


class CountingDevice(LateDevice):
    """Runs all work where it is enqueued; counts what asks it for memory."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self._late = range(0)
        self.taken = 0

    @contextmanager
    def not_asked(self) -> Iterator[None]:
        """Nothing within takes memory."""
        taken = self.taken
        yield
        assert self.taken == taken

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.taken += 1
        return super().pinned(num_bytes)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        self.taken += 1
        return super().zeros(*shape, dtype=dtype)

    def scratch(self, num_bytes: int) -> torch.Tensor:
        self.taken += 1
        return super().scratch(num_bytes)


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of what torch runs, but for views, and for what a graph holds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.replays = 0
        self._in_graph = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self._in_graph and name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def replaying(self, replay: Callable[[PlainGraph], Any]) -> Callable[[PlainGraph], Any]:
        def wrapped(graph: PlainGraph) -> Any:
            self._in_graph = True
            self.replays += 1
            try:
                return replay(graph)
            finally:
                self._in_graph = False

        return wrapped


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Runner, CountingDevice, Steps, Operators]]:
    """Three rows that decode, each slot of the rings used once."""
    device = CountingDevice()
    runner = tiny_runner(numerics="fast", device=device, depth=DEPTH, buckets=(1, 2, 4, 8))
    seen = Operators()
    monkeypatch.setattr(PlainGraph, "replay", seen.replaying(PlainGraph.replay))
    steps = started(runner)
    blocks = [[4 * row + n for n in range(4)] for row in range(3)]
    steps.run(
        admit=tuple(admit(row, [4, 5 + row], blocks[row], sampling=GREEDY) for row in range(3)),
        **prefill((0, 0, 2), (1, 0, 2), (2, 0, 2)),
    )
    for _ in range(DEPTH + 1):
        steps.decode(0, 1, 2)
    yield runner, device, steps, seen
    runner.close()


def test_a_steady_step_is_a_replay_and_a_copy_of_its_output(
    scene: tuple[Runner, CountingDevice, Steps, Operators],
) -> None:
    _, device, steps, seen = scene
    with device.not_asked(), seen:
        for _ in range(5):
            steps.decode(0, 1, 2)
    assert {result.mode for result in steps.results[-5:]} == {StepMode.GRAPH}
    assert seen.replays == 5 + DEPTH + 1
    assert seen.names == ["copy_"] * 5, "the copy to the host"


def test_a_step_with_news_is_an_upload_and_a_scatter_more(
    scene: tuple[Runner, CountingDevice, Steps, Operators],
) -> None:
    runner, device, steps, seen = scene
    with device.not_asked(), seen:
        steps.run(decode_rows=u32([0, 1, 2]), grant_rows=u32([0, 2]), grant_indices=u32([4, 4]),
                  grant_blocks=u32([40, 41]))  # fmt: skip
    assert seen.names == ["copy_", "index_copy_", "copy_"]
    assert runner.state.block_tables[:3, 4].tolist() == [40, runner.cache.null_block, 41]


def test_another_batch_is_one_upload_more(scene: tuple[Runner, CountingDevice, Steps, Operators]) -> None:
    _, device, steps, seen = scene
    with device.not_asked(), seen:
        for _ in range(DEPTH + 2):
            steps.decode(0, 2)
    assert seen.names == ["copy_", "copy_"] * (DEPTH + 1) + ["copy_"]
