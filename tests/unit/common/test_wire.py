"""Every message survives the wire; what is not well-formed is refused by name."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common import bitmaps, wire, wire_handshake, wire_plan, wire_result
from common import messages as m
from common.errors import ProtocolError
from stepwire.executor.v1 import executor_pb2 as pb
from tests.unit.common.step_messages import ROWS, from_executor, infos, same, to_executor

SETTINGS = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


@SETTINGS
@given(to_executor)
def test_to_executor_round_trip(message: m.ToExecutor) -> None:
    data = wire.encode_to_executor(message).SerializeToString()
    assert same(wire.decode_to_executor(pb.ToExecutor.FromString(data)), message)


@SETTINGS
@given(from_executor)
def test_from_executor_round_trip(message: m.FromExecutor) -> None:
    data = wire.encode_from_executor(message).SerializeToString()
    assert same(wire.decode_from_executor(pb.FromExecutor.FromString(data)), message)


@SETTINGS
@given(infos)
def test_info_round_trip(info: m.ExecutorInfo) -> None:
    assert wire_handshake.decode_info(wire_handshake.encode_info(info)) == info


@SETTINGS
@given(ROWS)
def test_bitmap_is_as_short_as_it_can_be(rows: m.U32) -> None:
    data = bitmaps.pack_bitmap(rows)
    assert len(data) == (int(rows[-1]) // 8 + 1 if len(rows) else 0)
    mask = np.zeros(int(rows[-1]) + 20 if len(rows) else 20, dtype=np.bool_)
    mask[rows] = True
    column = bitmaps.column_of(mask, mask.nonzero()[0])
    assert np.array_equal(column, rows)
    assert bitmaps.pack_bitmap(column) == data
    assert not len(rows) or bitmaps.unpack_bitmap(data) is column
    padded = bitmaps.unpack_bitmap(data + b"\0\0")
    assert np.array_equal(padded, rows)
    assert bitmaps.pack_bitmap(padded) == data


@pytest.mark.parametrize("size", [0, 1, m.MAX_OUTPUT_CHUNK_BYTES, m.MAX_OUTPUT_CHUNK_BYTES + 1, 1_000_000])
def test_outputs_are_cut_into_chunks_and_every_chunk_says_where_it_belongs(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    output = m.Output(7, m.OutputKind.RAW_LOGITS, 3, 11, 40, 1, data)
    chunks = [wire_result.decode_output_chunk(chunk) for chunk in wire_result.output_chunks(5, output)]
    assert b"".join(chunk.data for chunk in chunks) == data
    assert all(len(chunk.data) <= m.MAX_OUTPUT_CHUNK_BYTES for chunk in chunks)
    assert [chunk.offset for chunk in chunks] == list(range(0, max(size, 1), m.MAX_OUTPUT_CHUNK_BYTES))
    first = chunks[0]
    assert (first.epoch, first.step_id, first.row, first.admission_id) == (5, 7, 3, 11)
    assert (first.position, first.count, first.total_bytes) == (40, 1, size)


def test_columns_are_read_only_on_both_sides() -> None:
    """vllm#53217: a buffer is changed after it was handed over."""
    plan = m.StepPlan(1, 1, 0, 1, decode_rows=m.u32([3]), release=m.u32([1, 2]))
    for one in (plan, wire_plan.decode_plan(wire.encode_to_executor(plan).plan)):
        for name in ("decode_rows", "release", "grant_rows"):
            with pytest.raises(ValueError, match="read-only"):
                getattr(one, name)[...] = 0


# ----------------------------------------------------------------------------------------------------------- malformed

PLAN_COLUMNS = [
    "release", "grant_rows", "grant_indices", "grant_blocks", "copy_sources", "copy_targets", "set_token_rows",
    "set_token_tokens", "prefill_rows", "prefill_starts", "prefill_counts", "draft_rows", "draft_counts",
    "raw_logits_rows", "raw_logits_positions",
]  # fmt: skip


@pytest.mark.parametrize("name", PLAN_COLUMNS)
def test_plan_column_that_is_not_whole_values(name: str) -> None:
    message = pb.StepPlan(epoch=1, step_id=1)
    setattr(message, name, b"\1\2\3")
    with pytest.raises(ProtocolError) as caught:
        wire_plan.decode_plan(message)
    assert caught.value.field == name


@pytest.mark.parametrize("name", [n for n in PLAN_COLUMNS if n != "release"])
def test_plan_columns_that_belong_together_have_one_length(name: str) -> None:
    message = pb.StepPlan(epoch=1, step_id=1)
    setattr(message, name, b"\1\0\0\0")
    with pytest.raises(ProtocolError) as caught:
        wire_plan.decode_plan(message)
    assert caught.value.field.split("_")[0] == name.split("_")[0]


def _admit(admit: pb.Admit) -> pb.StepPlan:
    return pb.StepPlan(admit=[pb.Admit(), admit])


def _sampled(sampling: pb.Sampling) -> pb.StepPlan:
    return pb.StepPlan(admit=[pb.Admit(sampling=sampling)])


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (_admit(pb.Admit(tokens=b"\1")), "admit[1].tokens"),
        (_admit(pb.Admit(blocks=b"\1\2")), "admit[1].blocks"),
        (pb.StepPlan(extend=[pb.Extend(tokens=b"\1")]), "extend[0].tokens"),
        (_sampled(pb.Sampling(stop_ids=b"\1")), "admit[0].sampling.stop_ids"),
        (_sampled(pb.Sampling(allowed_ids=b"\1")), "admit[0].sampling.allowed_ids"),
        (_sampled(pb.Sampling(bias_ids=b"\1")), "admit[0].sampling.bias_ids"),
        (_sampled(pb.Sampling(bias_values=b"\1")), "admit[0].sampling.bias_values"),
        (_sampled(pb.Sampling(bias_values=b"\1\2\3\4")), "admit[0].sampling.bias_values"),
    ],
)
def test_nested_plan_column_is_named_with_its_path(message: pb.StepPlan, field: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        wire_plan.decode_plan(message)
    assert caught.value.field == field


ONE = b"\1\0\0\0"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.StepResult(mode=pb.STEP_MODE_NONE, tokens=b"\1"), "tokens"),
        (pb.StepResult(mode=pb.STEP_MODE_NONE, tokens=ONE), "tokens"),
        (pb.StepResult(mode=pb.STEP_MODE_NONE, emitted=b"\1"), "tokens"),
        (pb.StepResult(mode=pb.STEP_MODE_NONE, emitted=b"\3", counts=ONE, tokens=ONE), "counts"),
        (pb.StepResult(mode=pb.STEP_MODE_NONE, emitted=b"\1", accepted=ONE + ONE, tokens=ONE), "accepted"),
        (pb.StepResult(), "mode"),
        (pb.StepResult(mode=pb.STEP_MODE_NONE, row_errors=[pb.RowError()]), "row_errors[0].code"),
        (pb.StepResult(mode=pb.STEP_MODE_NONE, logprobs=pb.Logprobs(rows=ONE)), "logprobs.rows"),
        (pb.StepResult(mode=pb.STEP_MODE_NONE, logprobs=pb.Logprobs(top_ids=ONE)), "logprobs.top_ids"),
        (
            pb.StepResult(mode=pb.STEP_MODE_NONE, logprobs=pb.Logprobs(rows=ONE, chosen=ONE, top_counts=b"\2\0\0\0")),
            "logprobs.top_counts",
        ),
    ],
)
def test_malformed_result(message: pb.StepResult, field: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        wire_result.decode_result(message)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (wire.decode_to_executor, pb.ToExecutor()),
        (wire.decode_from_executor, pb.FromExecutor()),
        (wire_result.decode_plan_error, pb.PlanError()),
        (wire_result.decode_output_chunk, pb.OutputChunk()),
        (wire_handshake.decode_hello, pb.Hello(scheduler_id=b"x" * 16, epoch=1)),
        (wire_handshake.decode_hello, pb.Hello(scheduler_id=b"x" * 15, epoch=1, pipeline_depth=1)),
        (wire_handshake.decode_info, pb.ExecutorInfo()),
    ],
)
def test_other_malformed_messages(decode: Callable[[object], object], message: object) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(message)
    assert caught.value.field


@SETTINGS
@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    """Nothing but ProtocolError comes out of a message that protobuf itself could read."""
    for kind, decode in ((pb.ToExecutor, wire.decode_to_executor), (pb.FromExecutor, wire.decode_from_executor)):
        message = kind()
        try:
            message.ParseFromString(data)
        except Exception:  # noqa: BLE001 - not protobuf at all
            continue
        try:
            decode(message)  # type: ignore[arg-type]
        except ProtocolError as error:
            assert error.field


# -------------------------------------------------------------------------------------------------- what goes together


def test_enums_equal_the_protos() -> None:
    for ours, theirs, prefix in (
        (m.PlanErrorCode, pb.PlanErrorCode, "PLAN_ERROR_CODE_"),
        (m.RowErrorCode, pb.RowErrorCode, "ROW_ERROR_CODE_"),
        (m.StepMode, pb.StepMode, "STEP_MODE_"),
        (m.OutputKind, pb.OutputKind, "OUTPUT_KIND_"),
    ):
        expected = {name: value for name, value in theirs.items() if value}
        assert {prefix + member.name: member.value for member in ours} == expected


@pytest.mark.parametrize(
    ("ours", "theirs", "only_ours"),
    [
        (m.Hello, pb.Hello, set()),
        (m.Welcome, pb.Welcome, set()),
        (m.ExecutorInfo, pb.ExecutorInfo, set()),
        (m.Admit, pb.Admit, set()),
        (m.Fork, pb.Fork, set()),
        (m.Extend, pb.Extend, set()),
        (m.Logprobs, pb.Logprobs, set()),
        (m.Timings, pb.Timings, set()),
        (m.PlanError, pb.PlanError, set()),
        (m.OutputChunk, pb.OutputChunk, set()),
        (m.StepResult, pb.StepResult, {"outputs"}),
    ],
)
def test_no_field_is_forgotten(ours: type, theirs: object, only_ours: set[str]) -> None:
    names = {field.name for field in theirs.DESCRIPTOR.fields}  # type: ignore[attr-defined]
    mine = set(ours.__slots__) - only_ours  # type: ignore[attr-defined]
    assert {n.replace("emitted_rows", "emitted") for n in mine} == names


def test_a_steady_plan_is_small() -> None:
    """A decode step of 1,000 rows with a few grants, as docs/protocol.md promises."""
    rows = m.u32(range(1000))
    few = m.u32([7, 8])
    plan = m.StepPlan(7, 900, 10**15, 1000, decode_rows=rows, grant_rows=few, grant_indices=few, grant_blocks=few)
    assert len(wire.encode_to_executor(plan).SerializeToString()) < 200


def test_messages_are_frozen() -> None:
    """Those made at every step for mypy alone: it would report these ignores as unused if they were not."""
    m.StepPlan(1, 1, 0, 0).epoch = 2  # type: ignore[misc]
    m.StepResult(1, 1).epoch = 2  # type: ignore[misc]
    with pytest.raises(AttributeError):
        m.Hello(b"x" * 16, 1, 1, 0, 0).epoch = 2  # type: ignore[misc]


@SETTINGS
@given(st.lists(ROWS, max_size=30))
def test_a_remembered_bitmap_is_the_right_one(columns: list[m.U32]) -> None:
    for rows in (*columns, *reversed(columns)):
        assert np.array_equal(bitmaps.unpack_bitmap(bitmaps.pack_bitmap(rows)), rows)
