"""A device with memory of its own: the cache gets what steps and graphs leave. The CPU plays it, and counts."""

import logging
import re
import weakref

import pytest
import torch

from common.errors import ConfigError
from executor_svc import graph_cache, sampler, warm_up
from executor_svc.attention.base import Attend
from executor_svc.build import build_runner, make_ops
from executor_svc.cpu_device import CpuDevice
from executor_svc.graph_cache import Body, GraphShape, PlainGraph
from executor_svc.kv_cache import CUDA_SHARE
from executor_svc.models.decoder import Decoder
from executor_svc.runner import Runner
from executor_svc.step_model import Model
from tests.contract.executors import tiny_model

TOTAL = 64 << 20
PER_TOKEN = 64 << 10
PER_GRAPH = 128 << 10
MAX_TOKENS = 32
BUCKETS = (1, 2, 4, 8)
NUM_GRAPHS = len(BUCKETS) * 2  # greedy, and to the logits


class Meter:
    """The device's memory: what lives, and what torch would keep of the largest step."""

    def __init__(self) -> None:
        self.living = 0
        self.kept = 0

    def take(self, num_bytes: int, owner: object) -> None:
        self.living += num_bytes
        weakref.finalize(owner, self._free, num_bytes)

    def _free(self, num_bytes: int) -> None:
        self.living -= num_bytes

    def free_bytes(self) -> int:
        return TOTAL - self.living - self.kept

    def give_back(self) -> None:
        self.kept = 0


class MeteredDevice(CpuDevice):
    def __init__(self) -> None:
        super().__init__(threads=1)
        self._meter = Meter()
        self.largest = TOTAL

    @property
    def memory(self) -> Meter:
        return self._meter

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = super().zeros(*shape, dtype=dtype)
        self._meter.take(tensor.nbytes, tensor)
        if tensor.nbytes > self.largest or self._meter.free_bytes() < 0:
            raise torch.OutOfMemoryError("nothing as large is free")
        return tensor


class Hungry:
    """A model whose activations take PER_TOKEN bytes a token."""

    def __init__(self, model: Decoder, meter: Meter) -> None:
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self._model, self._meter = model, meter

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        self._meter.kept = max(self._meter.kept, PER_TOKEN * token_ids.shape[0])
        return self._model.forward(token_ids, positions, attend)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> MeteredDevice:
    made = MeteredDevice()

    class MeteredGraph(PlainGraph):
        def __init__(self, shape: GraphShape, body: Body) -> None:
            super().__init__(shape, body)
            made.memory.take(PER_GRAPH, self)

    monkeypatch.setattr(graph_cache, "PlainGraph", MeteredGraph)
    return made


def build(device: MeteredDevice, *, num_blocks: int = 0, kv_cache_memory: int = 0) -> Runner:
    ops = make_ops("fast")
    model: Model = Hungry(tiny_model(ops), device.memory)
    return build_runner(
        model, ops=ops, device=device, block_size=4, max_num_seqs=8, max_tokens_per_step=MAX_TOKENS, buckets=BUCKETS,
        num_blocks=num_blocks, kv_cache_memory=kv_cache_memory,
    )  # fmt: skip


def held_back(caplog: pytest.LogCaptureFixture) -> tuple[int, int]:
    """Bytes for steps and for graphs, as the log has them."""
    pattern = re.compile(r"(\d+) bytes are held back for steps and (\d+) for graphs")
    (found,) = [match for record in caplog.records if (match := pattern.fullmatch(record.getMessage()))]
    return int(found[1]), int(found[2])


@pytest.fixture(autouse=True)
def plenty_is_useful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model's longest sequences would not fill the memory."""
    monkeypatch.setattr("executor_svc.build.LIMBO_ROWS", 1 << 12)


def test_the_cache_gets_what_steps_and_graphs_leave(device: MeteredDevice, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=warm_up.__name__):
        runner = build(device)
    steps, graphs = held_back(caplog)
    assert steps >= MAX_TOKENS * PER_TOKEN
    assert graphs == NUM_GRAPHS * PER_GRAPH
    left = TOTAL - steps - graphs
    assert runner.info.num_blocks == int(left * CUDA_SHARE) // runner.cache.shape.block_bytes
    # And so it came: nothing of the trial lives, and the share that the cache leaves is free.
    assert device.memory.free_bytes() >= left - left * CUDA_SHARE
    assert "1.0 MiB; 1.0 MiB were held back" in caplog.text
    runner.close()


@pytest.mark.parametrize("num_blocks", [0, 100])
def test_what_rows_keep_by_token_is_there_before_one_needs_it(
    device: MeteredDevice, num_blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=warm_up.__name__):
        runner = build(device, num_blocks=num_blocks)
    kept = [runner.state.output_counts, runner.state.in_prompt, runner.state.bias, runner.state.stops]
    by_token = sum(tensor.nbytes for tensor in kept if tensor is not None)
    assert by_token == 10 * (runner.info.num_rows + 1) * runner.info.vocab_size
    if not num_blocks:
        assert held_back(caplog)[0] >= by_token + MAX_TOKENS * PER_TOKEN
    runner.close()


def test_every_way_to_sample_is_tried_for_all_rows(device: MeteredDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    largest: dict[str, int] = {}

    def seen(name: str) -> None:
        own = getattr(sampler, name)

        def count(values: torch.Tensor, *rest: object) -> torch.Tensor:
            largest[name] = max(largest.get(name, 0), values.shape[0])
            made: torch.Tensor = own(values, *rest)
            return made

        monkeypatch.setattr(sampler, name, count)

    for name in ("_penalise", "_mask", "_draw", "_filter"):
        seen(name)
    runner = build(device)
    assert largest == dict.fromkeys(("_penalise", "_mask", "_draw", "_filter"), 8)
    runner.close()


def test_a_cache_that_was_asked_for_must_leave_room_for_steps_and_graphs(device: MeteredDevice) -> None:
    with pytest.raises(
        ConfigError, match=r"are free \(\d+ bytes are held back for steps and \d+ for graphs\)"
    ) as error:
        build(device, kv_cache_memory=TOTAL - NUM_GRAPHS * PER_GRAPH)
    assert error.value.field == "kv_cache_memory"
    runner = build(device, kv_cache_memory=TOTAL // 2)
    assert runner.info.num_blocks == TOTAL // 2 // runner.cache.shape.block_bytes
    runner.close()


def test_a_number_of_blocks_is_taken_as_it_is(device: MeteredDevice, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=warm_up.__name__):
        runner = build(device, num_blocks=100)
    assert runner.info.num_blocks == 100 and "held back" not in caplog.text
    runner.close()


def test_a_number_of_blocks_there_is_no_memory_for_is_a_clear_error(device: MeteredDevice) -> None:
    device.largest = 1 << 20  # there is more, in pieces
    with pytest.raises(ConfigError, match=r"there is no memory for 2000 KV blocks and .*: nothing as large") as error:
        build(device, num_blocks=2000)
    assert error.value.field == "num_blocks"
