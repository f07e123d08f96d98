"""Capturing graphs, with a stand-in for CUDA: in which order, into which memory, and what is said of it."""

import logging
from types import SimpleNamespace

import pytest
import torch

from executor_svc import build
from executor_svc.cpu_device import CpuDevice
from executor_svc.graph_cache import GraphCache, GraphShape, Variant

CUDA = torch.device("cuda")
MIB = 1 << 20


class FakeCuda:
    """Stands in for torch.cuda. `began`, `ended`: the pool of each graph whose capture began, and how many ended."""

    def __init__(self) -> None:
        self.num_pools = 0
        self.began: list[object] = []
        self.ended = 0
        self.free = 100 * MIB

    def graph_pool_handle(self) -> tuple[int, int]:
        self.num_pools += 1
        return (0, self.num_pools)

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: None)

    def make_graph(self) -> SimpleNamespace:
        def capture_begin(pool: object, capture_error_mode: str) -> None:
            assert self.ended == len(self.began), "one capture at a time"
            self.began.append(pool)
            self.free -= 5 * MIB // 2

        def capture_end() -> None:
            self.ended += 1

        return SimpleNamespace(capture_begin=capture_begin, capture_end=capture_end)


class OnCuda(CpuDevice):
    @property
    def torch_device(self) -> torch.device:
        return CUDA


class PaddingStep:
    """What warm-up asks of a device step."""

    variants = (Variant.GREEDY, Variant.FULL)

    def __init__(self) -> None:
        self.seen: list[GraphShape] = []
        self.prepared: list[int] = []

    def run_padding(self, num_rows: int, chunks: object = (), *, full: bool = False) -> None:
        assert not self.seen, "graphs come last"

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
    monkeypatch.setattr(build, "cuda_free", lambda device: fake.free)
    return fake


def test_graphs_are_captured_largest_first_into_one_pool(cuda: FakeCuda) -> None:
    step, cache = PaddingStep(), GraphCache((2, 4, 8), (16, 64))
    cache.capture_all(step.body, CUDA, step.variants, lambda done, total: None)
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
        GraphCache((2,), (16,)).capture_all(body, CUDA, [Variant.GREEDY], lambda done, total: None)
    assert cuda.ended == 1


def test_the_log_says_what_graphs_took(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    step, graphs, device = PaddingStep(), GraphCache((2, 4), (64,)), OnCuda(threads=1)
    with caplog.at_level(logging.INFO, logger=build.__name__):
        build._warm_up(device, step, graphs, 4, 32, 64, lambda what, done, total: None)  # type: ignore[arg-type]
    device.close()
    assert step.prepared == [4] and graphs.num_graphs == 4
    [line] = [record.getMessage() for record in caplog.records if "graphs captured" in record.getMessage()]
    assert line.startswith("4 graphs captured in ") and line.endswith(" s, 10.0 MiB")
