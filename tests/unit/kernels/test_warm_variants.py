"""The warm-up launches every variant of the kernels that steps launch: one it missed would be compiled, for seconds, in
the middle of somebody's stream."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from common.messages import u32
from executor_svc.build import build_runner
from executor_svc.cpu_device import CpuDevice
from executor_svc.kernels import decode_attention
from executor_svc.triton_ops import TritonOps
from tests.contract.executors import tiny_config, tiny_model
from tests.contract.plans import GREEDY, admit, prefill, started
from tests.interpreter import DEVICE
from tests.random_model import random_decoder

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="it is the interpreter that is watched")

NUM_ROWS = 18
SAMPLED = replace(GREEDY, temperature=0.7, top_k=5, repetition_penalty=1.1, min_tokens=2)


class OwnMemory(CpuDevice):
    """Has memory of its own, so that the warm-up goes through all it does on a GPU."""

    @property
    def memory(self) -> Any:
        return self

    def free_bytes(self) -> int:
        return 1 << 30

    def give_back(self) -> None:
        pass


Variant = tuple[Any, ...]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Variant]]:
    """What Triton would have to compile: a kernel with the kinds of its arguments, as its launcher tells them apart."""
    variants: set[Variant] = set()
    run = InterpretedFunction.run

    def watched(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        parameters = inspect.signature(self.fn).parameters
        values = dict(zip(parameters, args, strict=False)) | options
        plain = self.kwargs["do_not_specialize"] or ()
        kinds = [
            (name, value if parameters[name].annotation is tl.constexpr else _kind(value, name not in plain))
            for name, value in values.items()
            if name in parameters
        ]
        variants.add((self.fn.__name__, *kinds, options["num_warps"]))
        return run(self, *args, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(InterpretedFunction, "run", watched)
    yield variants


def _kind(value: Any, is_special: bool) -> Any:
    """Triton's rules: pointers by their alignment, integers by whether they are 1 or a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and is_special:
        return int, value == 1, value % 16 == 0
    return type(value)


@pytest.mark.slow
def test_steps_launch_nothing_that_the_warm_up_did_not(launched: set[Variant]) -> None:
    ops = TritonOps()
    runner = build_runner(
        tiny_model(ops, num_layers=1), ops=ops, device=OwnMemory(threads=1), block_size=4, num_blocks=NUM_ROWS * 3,
        max_num_seqs=NUM_ROWS, max_tokens_per_step=20, buckets=(), attention_backend="triton",
    )  # fmt: skip
    warm = set(launched)
    launched.clear()
    steps = started(runner)
    blocks = np.arange(NUM_ROWS * 3).reshape(NUM_ROWS, 3).tolist()
    rows, last = range(NUM_ROWS - 1), NUM_ROWS - 1
    new = [admit(row, [4], blocks[row], sampling=SAMPLED if row == rows[-1] else GREEDY) for row in rows]
    steps.run(admit=tuple(new), **prefill(*((row, 0, 1) for row in rows)))
    steps.run(admit=(admit(last, list(range(4, 12)), blocks[last]),), **prefill((last, 0, 1)))
    # A chunk that samples nothing, beside so many that decode: none, one, sixteen, and one that is not greedy.
    for start, decoding in enumerate((rows[:0], rows[:1], rows[:16], rows[-1:]), 1):
        steps.run(decode_rows=u32(decoding), **prefill((last, start, 1)))
    steps.run(decode_rows=u32(rows[:5]), **prefill((last, 5, 3)))
    for decoding in (rows[:1], rows[:16], rows[-1:]):
        steps.decode(*decoding)
    runner.close()
    assert {variant[0] for variant in launched} > {"decode_kernel", "prefill_kernel", "commit_kernel", "draw_kernel"}
    missed = sorted(map(repr, launched - warm))
    assert not missed, "\n".join(missed)


def test_few_rows_split_their_keys_beside_a_chunk(launched: set[Variant], monkeypatch: pytest.MonkeyPatch) -> None:
    """With many key/value heads one row or two do so and three do not, as if there were so many."""
    monkeypatch.setattr(decode_attention, "_PROGRAMS", 8)
    ops = TritonOps()
    model = random_decoder(replace(tiny_config(num_layers=1), max_positions=512), ops, scale=0.3)
    runner = build_runner(
        model, ops=ops, device=OwnMemory(threads=1), block_size=4, num_blocks=12, max_num_seqs=4,
        max_tokens_per_step=20, buckets=(), attention_backend="triton",
    )  # fmt: skip
    warm = set(launched)
    launched.clear()
    steps = started(runner)
    new = [admit(row, [4], [3 * row]) for row in range(3)] + [admit(3, list(range(4, 12)), [9, 10, 11])]
    steps.run(admit=tuple(new), **prefill((0, 0, 1), (1, 0, 1), (2, 0, 1), (3, 0, 1)))
    for start, decoding in enumerate((1, 3), 1):
        steps.run(decode_rows=u32(range(decoding)), **prefill((3, start, 1)))
    runner.close()
    split = {dict(variant[1:-1])["IS_SPLIT"] for variant in launched if variant[0] == "decode_kernel"}
    missed = sorted(map(repr, launched - warm))
    assert split == {True, False} and not missed, "\n".join(missed)
