"""The runner apart from the contract: failing devices, rings that are full, steady steps, start-up."""

import gc
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch

from common.errors import ConfigError
from common.messages import PlanErrorCode, u32
from executor_svc.attention.base import Attend
from executor_svc.build import LIMBO_ROWS, build_runner, make_ops
from executor_svc.cpu_device import CpuDevice
from executor_svc.models.decoder import Decoder
from executor_svc.runner import Runner
from executor_svc.step_executor import PlanRefused
from tests.contract.executors import MAX_SEQS, tiny_config, tiny_model, tiny_runner
from tests.contract.plans import Steps, admit, prefill, started, tokens_of

PROMPT = [11, 42, 7, 90, 3, 66]


class Brittle:
    """A model that fails when told to."""

    def __init__(self, model: Decoder) -> None:
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self._model = model
        self.failure: Exception | None = None

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        if self.failure is not None:
            raise self.failure
        return self._model.forward(token_ids, positions, attend)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)


@pytest.fixture
def brittle() -> Iterator[tuple[Runner, Brittle]]:
    ops = make_ops("fast")
    model = Brittle(tiny_model(ops))
    device = CpuDevice(threads=1)
    runner = build_runner(
        model, ops=ops, device=device, block_size=4, num_blocks=64, max_num_seqs=8, max_tokens_per_step=32
    )  # fmt: skip
    yield runner, model
    runner.close()


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (RuntimeError("an illegal access"), PlanErrorCode.DEVICE_FAILED),
        (torch.OutOfMemoryError("no memory"), PlanErrorCode.OUT_OF_MEMORY),
        (MemoryError(), PlanErrorCode.OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), PlanErrorCode.OUT_OF_MEMORY),
        (torch.AcceleratorError("CUDA error: out of memory"), PlanErrorCode.OUT_OF_MEMORY),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), PlanErrorCode.DEVICE_FAILED),
        (RuntimeError("Triton Error [CUDA]: out of memory"), PlanErrorCode.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling it"), PlanErrorCode.OUT_OF_MEMORY),
    ],
)
def test_a_failed_step_ends_the_epoch_and_the_next_begins_empty(
    brittle: tuple[Runner, Brittle], failure: Exception, code: PlanErrorCode
) -> None:
    runner, model = brittle
    steps = started(runner)
    want = [steps.run(admit=(admit(0, PROMPT, [0, 1, 2]),), **prefill((0, 0, 6))), steps.decode(0)]
    good = steps.launch(decode_rows=u32([0]))
    tokens_of(good.wait())
    model.failure = failure
    bad, after = steps.launch(decode_rows=u32([0])), None
    try:
        after = steps.launch(decode_rows=u32([0]))
    except PlanRefused as refusal:
        assert refusal.error.code is PlanErrorCode.EPOCH_ENDED
    for pending in (bad, after):
        if pending is not None:
            with pytest.raises(PlanRefused) as refused:
                pending.wait()
            assert refused.value.error.code is code
    with pytest.raises(PlanRefused) as late:
        steps.launch(decode_rows=u32([0]))
    assert late.value.error.code is PlanErrorCode.EPOCH_ENDED
    model.failure = None
    again = Steps(runner, epoch=2)
    assert not again.begin(keep_kv=True, known_incarnation=runner.incarnation)
    assert [again.run(admit=(admit(0, PROMPT, [0, 1, 2]),), **prefill((0, 0, 6))), again.decode(0)] == want


class Narrow(CpuDevice):
    """Has no memory beside its rings while told so."""

    is_full = False

    def scratch(self, num_bytes: int) -> torch.Tensor:
        if self.is_full:
            raise torch.OutOfMemoryError("nothing is free")
        return super().scratch(num_bytes)


def test_a_plan_there_is_no_memory_to_stage_ends_the_epoch_alone() -> None:
    device = Narrow(threads=1)
    runner = tiny_runner(numerics="fast", device=device)
    for slot in runner._rings.staging.slots:
        slot.capacity = 0  # every column takes memory of its own
    steps = started(runner)
    want = [steps.run(admit=(admit(0, PROMPT, [0, 1, 2]),), **prefill((0, 0, 6))), steps.decode(0)]
    device.is_full = True
    with pytest.raises(PlanRefused) as refusal:
        steps.launch(admit=(admit(1, PROMPT, [3, 4, 5]),), **prefill((1, 0, 6)))
    assert refusal.value.error.code is PlanErrorCode.OUT_OF_MEMORY
    device.is_full = False
    with pytest.raises(PlanRefused) as late:
        steps.launch(decode_rows=u32([0]))
    assert late.value.error.code is PlanErrorCode.EPOCH_ENDED
    again = Steps(runner, epoch=2)
    assert not again.begin(keep_kv=True, known_incarnation=runner.incarnation)
    assert [again.run(admit=(admit(0, PROMPT, [0, 1, 2]),), **prefill((0, 0, 6))), again.decode(0)] == want
    third = Steps(runner, epoch=3)
    assert third.begin(keep_kv=True, known_incarnation=runner.incarnation), "the plan that failed is forgotten"
    runner.close()


def test_more_steps_than_the_rings_hold_are_refused(brittle: tuple[Runner, Brittle]) -> None:
    runner, _ = brittle
    steps = started(runner)
    pending = [steps.launch() for _ in range(runner.pipeline_depth + 2)]
    with pytest.raises(PlanRefused) as refusal:
        steps.launch()
    assert (refusal.value.error.code, refusal.value.error.limit) == (PlanErrorCode.BUDGET, runner.pipeline_depth + 2)
    assert [step.wait().step_id for step in pending] == list(range(1, len(pending) + 1))


def test_an_abandoned_step_has_no_result() -> None:
    runner = tiny_runner()
    steps = started(runner)
    left = steps.launch()
    Steps(runner, epoch=2).begin()
    with pytest.raises(PlanRefused) as refusal:
        left.wait()
    assert refusal.value.error.code is PlanErrorCode.EPOCH_ENDED
    runner.close()
    runner.close()
    with pytest.raises(PlanRefused):
        Steps(runner, epoch=2).launch()


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("buckets", [(), (4,)])
def test_steady_decode_steps_leave_nothing_behind(numerics: str, buckets: tuple[int, ...]) -> None:
    runner = tiny_runner(numerics=numerics, buckets=buckets)
    steps = started(runner)
    # What is kept between steps grows to the longest seen.
    longest = [1] * 30
    steps.run(admit=tuple(admit(r, longest, list(range(8 * r, 8 * r + 8))) for r in range(3)))
    for row in range(3):
        steps.run(**prefill((row, 0, 30)))
    steps.decode(0, 1, 2)
    steps.run(
        release=u32([0, 1, 2]),
        admit=tuple(admit(r, [r, 5], list(range(8 * r, 8 * r + 8))) for r in range(3)),
        **prefill((0, 0, 2), (1, 0, 2), (2, 0, 2)),
    )
    for _ in range(4):
        steps.decode(0, 1, 2)
    before = live_bytes()
    for _ in range(20):
        steps.decode(0, 1, 2)
    assert live_bytes() == before
    runner.close()


def live_bytes() -> int:
    """Of all tensors, shared storage counted once."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_a_new_epoch_releases_every_row(brittle: tuple[Runner, Brittle]) -> None:
    runner, _ = brittle
    steps = started(runner)
    steps.run(admit=(admit(0, PROMPT, [0, 1]), admit(9, PROMPT, [2, 3])))
    assert runner.num_occupied_rows == 2
    Steps(runner, epoch=2).begin()
    assert runner.num_occupied_rows == 0


def build(**changes: object) -> Callable[[], Runner]:
    ops = make_ops("fast")
    values: dict[str, object] = {"ops": ops, "num_blocks": 8, "max_num_seqs": MAX_SEQS, "buckets": ()}
    model = tiny_model(ops)
    return lambda: build_runner(model, device=CpuDevice(threads=1), **(values | changes))  # type: ignore[arg-type]


def test_info_tells_what_was_built() -> None:
    said: list[str] = []
    runner = build(
        block_size=8, max_context=50, eos_ids=[7, 2, 7], progress=lambda what, done, total: said.append(what)
    )()
    info = runner.info
    assert (info.num_rows, info.max_num_seqs) == (MAX_SEQS + LIMBO_ROWS, MAX_SEQS)
    assert (info.max_context, info.max_blocks_per_row, info.block_size) == (50, 7, 8)
    assert (info.eos_ids, info.num_blocks, info.vocab_size) == ((2, 7), 8, tiny_config().vocab_size)
    assert "warming up" in said
    runner.close()


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"num_blocks": 1 << 40}, "num_blocks"), ({"attention_backend": "none"}, "attention_backend")],
)
def test_what_can_not_be_built_is_said(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(**changes)()
    assert error.value.field == field


def test_exact_needs_float32() -> None:
    ops = make_ops("exact")
    model = tiny_model(ops)
    model.dtype = torch.bfloat16
    with pytest.raises(ConfigError) as error:
        build_runner(model, ops=ops, device=CpuDevice(threads=1))
    assert error.value.field == "dtype"


def test_a_model_that_fails_to_warm_up_is_a_clear_error() -> None:
    ops = make_ops("fast")
    model = Brittle(tiny_model(ops))
    model.failure = RuntimeError("no kernel for this")
    with pytest.raises(ConfigError, match="no kernel for this"):
        build_runner(model, ops=ops, device=CpuDevice(threads=1), num_blocks=8)


def test_padding_alone_runs_every_kind_of_step_and_leaves_rows_as_they_are() -> None:
    runner = tiny_runner(numerics="fast")
    before = runner.state.length.clone()
    with torch.inference_mode():
        for rows, chunks in product((1, 5), ((), (1,), (7,), (7, 3), (2, 2, 2, 2))):
            if len(chunks) <= rows:
                runner._step.run_padding(rows, chunks)
    assert torch.equal(runner.state.length, before)
    assert not runner.state.dead.any()
    runner.close()
