"""What an executor answers ↔ protobuf: StepResult, PlanError, bulk outputs. Pure functions."""

from operator import attrgetter

from common import messages as m
from common.bitmaps import pack_bitmap, unpack_bitmap
from common.errors import ProtocolError
from common.wire_columns import (
    check_lengths,
    enum_of,
    pack_f32,
    pack_u32,
    unpack_f32,
    unpack_u32,
)
from stepwire.executor.v1 import executor_pb2 as pb

_TIMINGS = tuple(m.Timings.__dataclass_fields__)  # named as in the proto, both in order
_timings_of = attrgetter(*_TIMINGS)
_MODES = {int(mode): mode for mode in m.StepMode}


def encode_result(r: m.StepResult) -> pb.StepResult:
    """`outputs` are not part of it: see `output_chunks`."""
    lp = r.logprobs
    return pb.StepResult(
        epoch=r.epoch,
        step_id=r.step_id,
        emitted=pack_bitmap(r.emitted_rows),
        counts=pack_u32(r.counts),
        tokens=pack_u32(r.tokens),
        accepted=pack_u32(r.accepted),
        logprobs=pb.Logprobs(
            rows=pack_u32(lp.rows),
            chosen=pack_f32(lp.chosen),
            top_counts=pack_u32(lp.top_counts),
            top_ids=pack_u32(lp.top_ids),
            top_logprobs=pack_f32(lp.top_logprobs),
        )
        if len(lp.rows)
        else None,
        row_errors=[
            pb.RowError(row=e.row, admission_id=e.admission_id, code=pb.RowErrorCode.ValueType(e.code), text=e.text)
            for e in r.row_errors
        ],
        timings=pb.Timings(**dict(zip(_TIMINGS, _timings_of(r.timings), strict=True))),
        mode=pb.StepMode.ValueType(r.mode),
        bucket=r.bucket,
        output_bytes=r.output_bytes,
    )


def decode_result(p: pb.StepResult) -> m.StepResult:
    """Raises ProtocolError naming the field whose form is wrong."""
    emitted, counts = unpack_bitmap(p.emitted), unpack_u32(p.counts, "counts")
    tokens, accepted = unpack_u32(p.tokens, "tokens"), unpack_u32(p.accepted, "accepted")
    if len(counts):
        check_lengths("counts", emitted, counts)
    if len(accepted):
        check_lengths("accepted", emitted, accepted)
    wanted = int(counts.sum()) if len(counts) else len(emitted)
    if len(tokens) != wanted:
        raise ProtocolError(f"tokens: {len(tokens)} where counts say {wanted}", field="tokens")
    return m.StepResult(
        epoch=p.epoch,
        step_id=p.step_id,
        emitted_rows=emitted,
        tokens=tokens,
        counts=counts,
        accepted=accepted,
        logprobs=_decode_logprobs(p.logprobs) if p.HasField("logprobs") else m.NO_LOGPROBS,
        row_errors=_decode_row_errors(p) if p.row_errors else (),
        timings=m.Timings(*_timings_of(p.timings)),
        mode=_MODES[p.mode] if p.mode in _MODES else enum_of(m.StepMode, p.mode, "mode"),
        bucket=p.bucket,
        output_bytes=p.output_bytes,
    )


def _decode_row_errors(p: pb.StepResult) -> tuple[m.RowError, ...]:
    return tuple(
        m.RowError(e.row, e.admission_id, enum_of(m.RowErrorCode, e.code, f"row_errors[{i}].code"), e.text)
        for i, e in enumerate(p.row_errors)
    )


def _decode_logprobs(p: pb.Logprobs) -> m.Logprobs:
    lp = m.Logprobs(
        rows=unpack_u32(p.rows, "logprobs.rows"),
        chosen=unpack_f32(p.chosen, "logprobs.chosen"),
        top_counts=unpack_u32(p.top_counts, "logprobs.top_counts"),
        top_ids=unpack_u32(p.top_ids, "logprobs.top_ids"),
        top_logprobs=unpack_f32(p.top_logprobs, "logprobs.top_logprobs"),
    )
    check_lengths("logprobs.rows", lp.rows, lp.chosen, lp.top_counts)
    check_lengths("logprobs.top_ids", lp.top_ids, lp.top_logprobs)
    if int(lp.top_counts.sum()) != len(lp.top_ids):
        raise ProtocolError("logprobs.top_counts: do not add up to top_ids", field="logprobs.top_counts")
    return lp


def encode_plan_error(e: m.PlanError) -> pb.PlanError:
    return pb.PlanError(
        epoch=e.epoch,
        step_id=e.step_id,
        code=pb.PlanErrorCode.ValueType(e.code),
        field=e.field,
        row=e.row,
        admission_id=e.admission_id,
        limit=e.limit,
        text=e.text,
    )


def decode_plan_error(p: pb.PlanError) -> m.PlanError:
    return m.PlanError(
        epoch=p.epoch,
        step_id=p.step_id,
        code=enum_of(m.PlanErrorCode, p.code, "plan_error.code"),
        field=p.field,
        row=p.row if p.HasField("row") else None,
        admission_id=p.admission_id,
        limit=p.limit,
        text=p.text,
    )


def output_chunks(epoch: int, output: m.Output) -> list[pb.OutputChunk]:
    """The output cut into chunks of at most MAX_OUTPUT_CHUNK_BYTES, in order of offset."""
    size = m.MAX_OUTPUT_CHUNK_BYTES
    return [
        pb.OutputChunk(
            epoch=epoch,
            step_id=output.step_id,
            kind=pb.OutputKind.ValueType(output.kind),
            row=output.row,
            admission_id=output.admission_id,
            position=output.position,
            count=output.count,
            offset=offset,
            total_bytes=len(output.data),
            data=output.data[offset : offset + size],
        )
        for offset in range(0, max(len(output.data), 1), size)
    ]


def decode_output_chunk(p: pb.OutputChunk) -> m.OutputChunk:
    return m.OutputChunk(
        epoch=p.epoch,
        step_id=p.step_id,
        kind=enum_of(m.OutputKind, p.kind, "output_chunk.kind"),
        row=p.row,
        admission_id=p.admission_id,
        position=p.position,
        count=p.count,
        offset=p.offset,
        total_bytes=p.total_bytes,
        data=p.data,
    )
