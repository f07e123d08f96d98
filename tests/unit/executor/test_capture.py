"""Capturing graphs, with a stand-in for CUDA: in which order, into which memory, and what is told of it."""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from common.errors import ConfigError
from executor_svc import warm_up
from executor_svc.cpu_device import CpuDevice
from executor_svc.graph_cache import GraphCache, GraphShape, Variant
from executor_svc.warm_up import Held, WarmUp

CUDA = torch.device("cuda")
MIB = 1 << 20
MAX_TOKENS = 32


class FakeCuda:
    """Stands in for torch.cuda and is the device's memory. A graph takes 2.5 MiB, 1 of them at its first
    replay, the first in a pool 8 MiB more.

    `began`, `ended`: the pool of each graph whose capture began, and how many ended.
    """

    def __init__(self) -> None:
        self.num_pools = 0
        self.began: list[object] = []
        self.ended = 0
        self.free = 100 * MIB
        self.given_back = 0

    def free_bytes(self) -> int:
        return self.free

    def give_back(self) -> None:
        self.given_back += 1

    def graph_pool_handle(self) -> tuple[int, int]:
        self.num_pools += 1
        return (0, self.num_pools)

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: None)

    def make_graph(self) -> SimpleNamespace:
        def capture_begin(pool: object, capture_error_mode: str) -> None:
            assert self.ended == len(self.began), "one capture at a time"
            self.free -= 3 * MIB // 2 + (0 if pool in self.began else 8 * MIB)
            self.began.append(pool)

        def capture_end() -> None:
            self.ended += 1

        def replay() -> None:
            assert self.ended == len(self.began)
            self.free -= MIB

        return SimpleNamespace(capture_begin=capture_begin, capture_end=capture_end, replay=replay)


class OnCuda(CpuDevice):
    def __init__(self, memory: FakeCuda) -> None:
        super().__init__(threads=1)
        self._memory = memory

    @property
    def torch_device(self) -> torch.device:
        return CUDA

    @property
    def memory(self) -> FakeCuda:
        return self._memory


class PaddingStep:
    """What warm-up asks of a device step; the largest takes 20 MiB, at its first run."""

    variants = (Variant.GREEDY, Variant.FULL)

    def __init__(self, cuda: FakeCuda | None = None) -> None:
        self.seen: list[GraphShape] = []
        self.prepared: list[int] = []
        self._cuda = cuda

    def run_padding(self, num_rows: int, chunks: Sequence[int] = (), *, full: bool = False) -> None:
        assert not self.seen, "graphs come last"
        if self._cuda is not None and sum(chunks) + num_rows - len(chunks) >= MAX_TOKENS:
            self._cuda.free -= 20 * MIB
            self._cuda = None

    def prepare_graphs(self, max_rows: int) -> None:
        self.prepared.append(max_rows)

    def body(self, shape: GraphShape) -> tuple[torch.Tensor, ...]:
        self.seen.append(shape)
        return ()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", fake.graph_pool_handle)
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current_stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", fake.make_graph)
    return fake


def test_graphs_are_captured_largest_first_into_one_pool(cuda: FakeCuda) -> None:
    step, cache = PaddingStep(), GraphCache((2, 4, 8), (16, 64))
    cache.capture((8, 4, 2), step.body, CUDA, step.variants, lambda *told: None)
    order = [GraphShape(rows, context, v) for rows in (8, 4, 2) for context in (64, 16) for v in step.variants]
    assert step.seen[::2] == step.seen[1::2] == order, "each once as it is and once captured"
    assert cuda.num_pools == 1
    assert cuda.began == [(0, 1)] * len(order) and cuda.ended == len(order)


def test_a_capture_that_fails_is_ended(cuda: FakeCuda) -> None:
    def body(shape: GraphShape) -> tuple[torch.Tensor, ...]:
        if cuda.began:
            raise RuntimeError("not in a graph")
        return ()

    with pytest.raises(RuntimeError, match="not in a graph"):
        GraphCache((2,), (16,)).capture((2,), body, CUDA, [Variant.GREEDY], lambda *told: None)
    assert cuda.ended == 1


def test_what_broke_a_capture_is_told_not_that_it_was_broken(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an operation that no graph may hold, torch's capture_end fails too."""
    plain = cuda.make_graph()

    def capture_end() -> None:
        cuda.ended += 1
        raise torch.AcceleratorError("operation failed due to a previous error during capture")

    broken = SimpleNamespace(capture_begin=plain.capture_begin, capture_end=capture_end, replay=plain.replay)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: broken)

    def body(shape: GraphShape) -> tuple[torch.Tensor, ...]:
        if cuda.began:
            raise torch.AcceleratorError("operation not permitted when stream is capturing")
        return ()

    with pytest.raises(torch.AcceleratorError, match="not permitted"):
        GraphCache((2,), (16,)).capture((2,), body, CUDA, [Variant.GREEDY], lambda *told: None)
    assert cuda.ended == 1


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_collected_during_a_capture(cuda: FakeCuda, fails: bool) -> None:
    """It may be a graph, whose end would break the capture."""
    seen: list[bool] = []

    def body(shape: GraphShape) -> tuple[torch.Tensor, ...]:
        seen.append(gc.isenabled())
        if fails and len(seen) == 2:
            raise RuntimeError("not in a graph")
        return ()

    with pytest.raises(RuntimeError, match="not in a graph") if fails else nullcontext():
        GraphCache((2,), (16,)).capture((2,), body, CUDA, [Variant.GREEDY], lambda *told: None)
    assert seen == [True, False] and gc.isenabled()


Told = list[tuple[str, int, int, str]]


@pytest.fixture
def warm_up_and_told(cuda: FakeCuda) -> Iterator[tuple[WarmUp, Told]]:
    told: Told = []

    def say(activity: str, done: int, total: int, detail: str = "") -> None:
        told.append((activity, done, total, detail))

    device = OnCuda(cuda)
    yield WarmUp(device, 16, MAX_TOKENS, 64, say), told
    device.close()


@pytest.mark.parametrize("rows", [(), (4,), (2, 4), (1, 2, 4), (1, 2, 4, 8, 16)])
def test_what_steps_and_all_graphs_take_is_known_from_a_few(
    rows: tuple[int, ...], cuda: FakeCuda, warm_up_and_told: tuple[WarmUp, Told]
) -> None:
    step, graphs = PaddingStep(cuda), GraphCache(rows, (64,))
    held = warm_up_and_told[0].measure(lambda: (step, graphs), cuda)  # type: ignore[arg-type, return-value]
    assert held == Held(20 * MIB, 0 if not rows else 8 * MIB + len(rows) * 2 * 5 * MIB // 2)
    assert graphs.num_graphs == 2 * min(3, len(rows)), "a few are enough"
    assert step.prepared == [*rows[-1:]], "what all share is taken once"
    assert cuda.given_back == 1 and cuda.num_pools == bool(rows)


def test_what_others_give_back_meanwhile_is_not_counted(
    cuda: FakeCuda, warm_up_and_told: tuple[WarmUp, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    frees = iter(range(0, 100 * MIB, MIB))
    monkeypatch.setattr(cuda, "free_bytes", lambda: next(frees))
    made = PaddingStep(), GraphCache((1, 2), (64,))
    held = warm_up_and_told[0].measure(lambda: made, cuda)  # type: ignore[arg-type, return-value]
    assert held == Held(0, 0)


def test_what_graphs_took_is_told_beside_what_was_held_back(
    cuda: FakeCuda, warm_up_and_told: tuple[WarmUp, Told], caplog: pytest.LogCaptureFixture
) -> None:
    step, graphs = PaddingStep(), GraphCache((2, 4), (64,))
    warm_up_, told = warm_up_and_told
    with caplog.at_level(logging.INFO, logger=warm_up.__name__):
        warm_up_.run(step, graphs, Held(1, 20 * MIB))  # type: ignore[arg-type]
    assert step.prepared == [4] and graphs.num_graphs == 4
    [line] = [record.getMessage() for record in caplog.records if "graphs captured" in record.getMessage()]
    assert line.startswith("4 graphs captured in ") and line.endswith(" s, 18.0 MiB; 20.0 MiB were held back")
    assert [one for one in told if one[0] == "capturing graphs"] == [
        ("capturing graphs", 1, 4, "4 rows, greedy, 10 MiB"),
        ("capturing graphs", 2, 4, "4 rows, full, 13 MiB"),
        ("capturing graphs", 3, 4, "2 rows, greedy, 16 MiB"),
        ("capturing graphs", 4, 4, "2 rows, full, 18 MiB"),
    ]


def test_a_step_there_is_no_memory_for_is_a_clear_error(
    cuda: FakeCuda, warm_up_and_told: tuple[WarmUp, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(self: PaddingStep, num_rows: int, chunks: Sequence[int] = (), *, full: bool = False) -> None:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    monkeypatch.setattr(PaddingStep, "run_padding", no_memory)
    made = PaddingStep(), GraphCache((2,), (64,))
    with pytest.raises(ConfigError, match=r"the largest step: lower max_tokens_per_step \(32\).*3 GiB") as error:
        warm_up_and_told[0].measure(lambda: made, cuda)  # type: ignore[arg-type, return-value]
    assert error.value.field == "max_tokens_per_step"


def test_a_graph_there_is_no_memory_for_at_its_first_replay_is_a_clear_error(
    cuda: FakeCuda, warm_up_and_told: tuple[WarmUp, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = cuda.make_graph()

    def replay() -> None:  # the driver's answer, which torch tells apart from its own allocator's
        raise torch.AcceleratorError("CUDA error: out of memory")

    hungry = SimpleNamespace(capture_begin=plain.capture_begin, capture_end=plain.capture_end, replay=replay)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: hungry)
    with pytest.raises(ConfigError, match=r"no memory for every graph: lower .*CUDA error: out of memory") as error:
        warm_up_and_told[0].run(PaddingStep(), GraphCache((2,), (64,)), None)  # type: ignore[arg-type]
    assert error.value.field == "max_tokens_per_step"
