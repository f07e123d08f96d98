"""Step messages ↔ protobuf. Pure functions; the only module that knows both forms.

Decoding checks form only (column lengths, enum values, packed sizes) and raises ProtocolError naming the field; whether
a plan makes sense is the executor's question, whether a result does the scheduler's.
"""

from enum import IntEnum
from typing import TypeVar

import numpy as np

from common import messages as m
from common.errors import ProtocolError
from stepwire.executor.v1 import executor_pb2 as pb

E = TypeVar("E", bound=IntEnum)

_U32 = np.dtype("<u4")
_F32 = np.dtype("<f4")


def pack_u32(column: m.U32) -> bytes:
    return column.astype(_U32, copy=False).tobytes()


def pack_f32(column: m.F32) -> bytes:
    return column.astype(_F32, copy=False).tobytes()


def unpack_u32(data: bytes, field: str) -> m.U32:
    """A read-only view of `data`. Raises ProtocolError when it is not whole values."""
    if not data:
        return m.EMPTY_U32
    if len(data) % 4:
        raise ProtocolError(f"{field}: {len(data)} bytes are not whole uint32 values", field=field)
    return np.frombuffer(data, dtype=_U32)


def unpack_f32(data: bytes, field: str) -> m.F32:
    """A read-only view of `data`. Raises ProtocolError when it is not whole values."""
    if not data:
        return m.EMPTY_F32
    if len(data) % 4:
        raise ProtocolError(f"{field}: {len(data)} bytes are not whole float32 values", field=field)
    return np.frombuffer(data, dtype=_F32)


def pack_bitmap(rows: m.U32) -> bytes:
    """Bitmap with the bits of `rows` (ascending) set; as short as it can be."""
    if not len(rows):
        return b""
    bits = np.zeros(int(rows[-1]) + 1, dtype=np.uint8)
    bits[rows] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def unpack_bitmap(data: bytes) -> m.U32:
    """Ascending rows whose bit is set."""
    if not data:
        return m.EMPTY_U32
    return m.u32(np.flatnonzero(np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little")))


def _same_length(field: str, *columns: m.U32 | m.F32) -> None:
    lengths = {len(c) for c in columns}
    if len(lengths) > 1:
        raise ProtocolError(f"{field}: columns differ in length: {[len(c) for c in columns]}", field=field)


def _enum(kind: type[E], value: int, field: str) -> E:
    try:
        return kind(value)
    except ValueError:
        raise ProtocolError(f"{field}: unknown value {value}", field=field) from None


# ---------------------------------------------------------------------------------------------------------------- plan


def encode_sampling(s: m.Sampling) -> pb.Sampling:
    return pb.Sampling(
        temperature=s.temperature,
        top_k=s.top_k,
        top_p=s.top_p,
        min_p=s.min_p,
        seed=s.seed,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        min_tokens=s.min_tokens,
        max_tokens=s.max_tokens,
        stop_ids=pack_u32(m.u32(s.stop_ids)),
        ignore_eos=s.ignore_eos,
        bias_ids=pack_u32(m.u32([i for i, _ in s.bias])),
        bias_values=pack_f32(m.f32([v for _, v in s.bias])),
        allowed_ids=pack_u32(m.u32(s.allowed_ids)),
        num_logprobs=s.num_logprobs,
        num_prompt_logprobs=s.num_prompt_logprobs,
        prompt_logprobs_from=s.prompt_logprobs_from,
        grammar_kind=s.grammar_kind,
        grammar=s.grammar,
        adapter_id=s.adapter_id,
    )


def decode_sampling(p: pb.Sampling, field: str) -> m.Sampling:
    ids, values = unpack_u32(p.bias_ids, f"{field}.bias_ids"), unpack_f32(p.bias_values, f"{field}.bias_values")
    _same_length(f"{field}.bias_values", ids, values)
    return m.Sampling(
        temperature=p.temperature,
        top_k=p.top_k,
        top_p=p.top_p,
        min_p=p.min_p,
        seed=p.seed,
        repetition_penalty=p.repetition_penalty,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
        min_tokens=p.min_tokens,
        max_tokens=p.max_tokens,
        stop_ids=tuple(unpack_u32(p.stop_ids, f"{field}.stop_ids").tolist()),
        ignore_eos=p.ignore_eos,
        bias=tuple(zip(ids.tolist(), values.tolist(), strict=True)),
        allowed_ids=tuple(unpack_u32(p.allowed_ids, f"{field}.allowed_ids").tolist()),
        num_logprobs=p.num_logprobs,
        num_prompt_logprobs=p.num_prompt_logprobs,
        prompt_logprobs_from=p.prompt_logprobs_from,
        grammar_kind=p.grammar_kind,
        grammar=p.grammar,
        adapter_id=p.adapter_id,
    )


def encode_plan(plan: m.StepPlan) -> pb.StepPlan:
    return pb.StepPlan(
        epoch=plan.epoch,
        step_id=plan.step_id,
        sent_ns=plan.sent_ns,
        trace_context=plan.trace_context,
        release=pack_u32(plan.release),
        admit=[
            pb.Admit(
                row=a.row,
                admission_id=a.admission_id,
                tokens=pack_u32(a.tokens),
                length=a.length,
                prompt_len=a.prompt_len,
                computed_len=a.computed_len,
                blocks=pack_u32(a.blocks),
                sampling=encode_sampling(a.sampling),
            )
            for a in plan.admit
        ],
        fork=[
            pb.Fork(source_row=f.source_row, row=f.row, admission_id=f.admission_id, length=f.length, seed=f.seed)
            for f in plan.fork
        ],
        extend=[pb.Extend(row=e.row, offset=e.offset, tokens=pack_u32(e.tokens)) for e in plan.extend],
        grant_rows=pack_u32(plan.grant_rows),
        grant_indices=pack_u32(plan.grant_indices),
        grant_blocks=pack_u32(plan.grant_blocks),
        copy_sources=pack_u32(plan.copy_sources),
        copy_targets=pack_u32(plan.copy_targets),
        set_token_rows=pack_u32(plan.set_token_rows),
        set_token_tokens=pack_u32(plan.set_token_tokens),
        prefill_rows=pack_u32(plan.prefill_rows),
        prefill_starts=pack_u32(plan.prefill_starts),
        prefill_counts=pack_u32(plan.prefill_counts),
        decode=pack_bitmap(plan.decode_rows),
        draft_rows=pack_u32(plan.draft_rows),
        draft_counts=pack_u32(plan.draft_counts),
        raw_logits_rows=pack_u32(plan.raw_logits_rows),
        raw_logits_positions=pack_u32(plan.raw_logits_positions),
        num_tokens=plan.num_tokens,
    )


def _decode_admit(p: pb.Admit, field: str) -> m.Admit:
    return m.Admit(
        row=p.row,
        admission_id=p.admission_id,
        tokens=unpack_u32(p.tokens, f"{field}.tokens"),
        length=p.length,
        prompt_len=p.prompt_len,
        computed_len=p.computed_len,
        blocks=unpack_u32(p.blocks, f"{field}.blocks"),
        sampling=decode_sampling(p.sampling, f"{field}.sampling"),
    )


def decode_plan(p: pb.StepPlan) -> m.StepPlan:
    """Raises ProtocolError naming the field whose form is wrong."""
    grants = [unpack_u32(getattr(p, n), n) for n in ("grant_rows", "grant_indices", "grant_blocks")]
    copies = [unpack_u32(getattr(p, n), n) for n in ("copy_sources", "copy_targets")]
    set_token = [unpack_u32(getattr(p, n), n) for n in ("set_token_rows", "set_token_tokens")]
    prefill = [unpack_u32(getattr(p, n), n) for n in ("prefill_rows", "prefill_starts", "prefill_counts")]
    draft = [unpack_u32(getattr(p, n), n) for n in ("draft_rows", "draft_counts")]
    raw = [unpack_u32(getattr(p, n), n) for n in ("raw_logits_rows", "raw_logits_positions")]
    for name, columns in (
        ("grant_rows", grants),
        ("copy_sources", copies),
        ("set_token_rows", set_token),
        ("prefill_rows", prefill),
        ("draft_rows", draft),
        ("raw_logits_rows", raw),
    ):
        _same_length(name, *columns)
    return m.StepPlan(
        epoch=p.epoch,
        step_id=p.step_id,
        sent_ns=p.sent_ns,
        num_tokens=p.num_tokens,
        trace_context=p.trace_context,
        release=unpack_u32(p.release, "release"),
        admit=tuple(_decode_admit(a, f"admit[{i}]") for i, a in enumerate(p.admit)),
        fork=tuple(m.Fork(f.source_row, f.row, f.admission_id, f.length, f.seed) for f in p.fork),
        extend=tuple(
            m.Extend(e.row, e.offset, unpack_u32(e.tokens, f"extend[{i}].tokens")) for i, e in enumerate(p.extend)
        ),
        grant_rows=grants[0],
        grant_indices=grants[1],
        grant_blocks=grants[2],
        copy_sources=copies[0],
        copy_targets=copies[1],
        set_token_rows=set_token[0],
        set_token_tokens=set_token[1],
        prefill_rows=prefill[0],
        prefill_starts=prefill[1],
        prefill_counts=prefill[2],
        decode_rows=unpack_bitmap(p.decode),
        draft_rows=draft[0],
        draft_counts=draft[1],
        raw_logits_rows=raw[0],
        raw_logits_positions=raw[1],
    )


# -------------------------------------------------------------------------------------------------------------- result


def encode_result(r: m.StepResult) -> pb.StepResult:
    """`outputs` are not part of it: see `output_chunks`."""
    t, lp = r.timings, r.logprobs
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
        timings=pb.Timings(
            received_ns=t.received_ns,
            prepare_start_ns=t.prepare_start_ns,
            prepare_end_ns=t.prepare_end_ns,
            copy_in_start_ns=t.copy_in_start_ns,
            copy_in_end_ns=t.copy_in_end_ns,
            launched_ns=t.launched_ns,
            device_start_ns=t.device_start_ns,
            device_end_ns=t.device_end_ns,
            copy_out_end_ns=t.copy_out_end_ns,
            sent_ns=t.sent_ns,
            device_idle_ns=t.device_idle_ns,
        ),
        mode=pb.StepMode.ValueType(r.mode),
        bucket=r.bucket,
        output_bytes=r.output_bytes,
    )


def decode_result(p: pb.StepResult) -> m.StepResult:
    """Raises ProtocolError naming the field whose form is wrong."""
    emitted, counts = unpack_bitmap(p.emitted), unpack_u32(p.counts, "counts")
    tokens, accepted = unpack_u32(p.tokens, "tokens"), unpack_u32(p.accepted, "accepted")
    if len(counts):
        _same_length("counts", emitted, counts)
    if len(accepted):
        _same_length("accepted", emitted, accepted)
    wanted = int(counts.sum()) if len(counts) else len(emitted)
    if len(tokens) != wanted:
        raise ProtocolError(f"tokens: {len(tokens)} where counts say {wanted}", field="tokens")
    t = p.timings
    return m.StepResult(
        epoch=p.epoch,
        step_id=p.step_id,
        emitted_rows=emitted,
        tokens=tokens,
        counts=counts,
        accepted=accepted,
        logprobs=_decode_logprobs(p.logprobs) if p.HasField("logprobs") else m.Logprobs(),
        row_errors=tuple(
            m.RowError(e.row, e.admission_id, _enum(m.RowErrorCode, e.code, f"row_errors[{i}].code"), e.text)
            for i, e in enumerate(p.row_errors)
        ),
        timings=m.Timings(
            received_ns=t.received_ns,
            prepare_start_ns=t.prepare_start_ns,
            prepare_end_ns=t.prepare_end_ns,
            copy_in_start_ns=t.copy_in_start_ns,
            copy_in_end_ns=t.copy_in_end_ns,
            launched_ns=t.launched_ns,
            device_start_ns=t.device_start_ns,
            device_end_ns=t.device_end_ns,
            copy_out_end_ns=t.copy_out_end_ns,
            sent_ns=t.sent_ns,
            device_idle_ns=t.device_idle_ns,
        ),
        mode=_enum(m.StepMode, p.mode, "mode"),
        bucket=p.bucket,
        output_bytes=p.output_bytes,
    )


def _decode_logprobs(p: pb.Logprobs) -> m.Logprobs:
    lp = m.Logprobs(
        rows=unpack_u32(p.rows, "logprobs.rows"),
        chosen=unpack_f32(p.chosen, "logprobs.chosen"),
        top_counts=unpack_u32(p.top_counts, "logprobs.top_counts"),
        top_ids=unpack_u32(p.top_ids, "logprobs.top_ids"),
        top_logprobs=unpack_f32(p.top_logprobs, "logprobs.top_logprobs"),
    )
    _same_length("logprobs.rows", lp.rows, lp.chosen, lp.top_counts)
    _same_length("logprobs.top_ids", lp.top_ids, lp.top_logprobs)
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
        code=_enum(m.PlanErrorCode, p.code, "plan_error.code"),
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
        kind=_enum(m.OutputKind, p.kind, "output_chunk.kind"),
        row=p.row,
        admission_id=p.admission_id,
        position=p.position,
        count=p.count,
        offset=p.offset,
        total_bytes=p.total_bytes,
        data=p.data,
    )


# ----------------------------------------------------------------------------------------------------------- handshake


def encode_hello(h: m.Hello) -> pb.Hello:
    return pb.Hello(
        protocol_version=h.protocol_version,
        scheduler_id=h.scheduler_id,
        epoch=h.epoch,
        pipeline_depth=h.pipeline_depth,
        expected_model_hash=h.expected_model_hash,
        monotonic_ns=h.monotonic_ns,
        wall_ns=h.wall_ns,
        keep_kv=h.keep_kv,
        known_incarnation=h.known_incarnation,
    )


def decode_hello(p: pb.Hello) -> m.Hello:
    """Raises ProtocolError for a scheduler_id that is not 16 bytes, or an epoch or depth of 0."""
    if len(p.scheduler_id) != 16:
        raise ProtocolError(f"hello.scheduler_id: {len(p.scheduler_id)} bytes, not 16", field="hello.scheduler_id")
    if not p.epoch:
        raise ProtocolError("hello.epoch: must be at least 1", field="hello.epoch")
    if not p.pipeline_depth:
        raise ProtocolError("hello.pipeline_depth: must be at least 1", field="hello.pipeline_depth")
    return m.Hello(
        scheduler_id=p.scheduler_id,
        epoch=p.epoch,
        pipeline_depth=p.pipeline_depth,
        monotonic_ns=p.monotonic_ns,
        wall_ns=p.wall_ns,
        expected_model_hash=p.expected_model_hash,
        keep_kv=p.keep_kv,
        known_incarnation=p.known_incarnation,
        protocol_version=p.protocol_version,
    )


_INFO_PLAIN = (
    "model_id",
    "model_hash",
    "vocab_size",
    "num_rows",
    "max_num_seqs",
    "max_blocks_per_row",
    "block_size",
    "num_blocks",
    "max_tokens_per_step",
    "max_context",
    "max_draft_tokens",
    "numerics",
    "kv_dtype",
    "world_size",
    "max_message_bytes",
    "max_output_bytes",
    "device",
    "dtype",
)


def encode_info(i: m.ExecutorInfo) -> pb.ExecutorInfo:
    info = pb.ExecutorInfo(
        eos_ids=pack_u32(m.u32(i.eos_ids)), buckets=pack_u32(m.u32(i.buckets)), features=list(i.features)
    )
    for name in _INFO_PLAIN:
        setattr(info, name, getattr(i, name))
    return info


def decode_info(p: pb.ExecutorInfo) -> m.ExecutorInfo:
    """Raises ProtocolError for an executor without rows, blocks or budget."""
    for name in ("vocab_size", "num_rows", "max_num_seqs", "block_size", "num_blocks", "max_tokens_per_step"):
        if not getattr(p, name):
            raise ProtocolError(f"info.{name}: must be at least 1", field=f"info.{name}")
    return m.ExecutorInfo(
        eos_ids=tuple(unpack_u32(p.eos_ids, "info.eos_ids").tolist()),
        buckets=tuple(unpack_u32(p.buckets, "info.buckets").tolist()),
        features=tuple(p.features),
        **{name: getattr(p, name) for name in _INFO_PLAIN},
    )


def encode_welcome(w: m.Welcome) -> pb.Welcome:
    return pb.Welcome(
        protocol_version=w.protocol_version,
        incarnation=w.incarnation,
        info=encode_info(w.info),
        pipeline_depth=w.pipeline_depth,
        kv_kept=w.kv_kept,
        monotonic_ns=w.monotonic_ns,
        wall_ns=w.wall_ns,
    )


def decode_welcome(p: pb.Welcome) -> m.Welcome:
    return m.Welcome(
        incarnation=p.incarnation,
        info=decode_info(p.info),
        pipeline_depth=p.pipeline_depth,
        kv_kept=p.kv_kept,
        monotonic_ns=p.monotonic_ns,
        wall_ns=p.wall_ns,
        protocol_version=p.protocol_version,
    )


# ------------------------------------------------------------------------------------------------------------- streams


def encode_to_executor(message: m.ToExecutor) -> pb.ToExecutor:
    match message:
        case m.StepPlan():
            return pb.ToExecutor(plan=encode_plan(message))
        case m.Ping():
            return pb.ToExecutor(ping=pb.Ping(id=message.id, sent_ns=message.sent_ns))
        case m.Hello():
            return pb.ToExecutor(hello=encode_hello(message))


def decode_to_executor(p: pb.ToExecutor) -> m.ToExecutor:
    match p.WhichOneof("message"):
        case "plan":
            return decode_plan(p.plan)
        case "ping":
            return m.Ping(p.ping.id, p.ping.sent_ns)
        case "hello":
            return decode_hello(p.hello)
        case _:
            raise ProtocolError("message: empty or unknown", field="message")


def encode_from_executor(message: m.FromExecutor) -> pb.FromExecutor:
    match message:
        case m.StepResult():
            return pb.FromExecutor(result=encode_result(message))
        case m.Pong():
            return pb.FromExecutor(
                pong=pb.Pong(
                    id=message.id,
                    ping_sent_ns=message.ping_sent_ns,
                    received_ns=message.received_ns,
                    sent_ns=message.sent_ns,
                )
            )
        case m.PlanError():
            return pb.FromExecutor(plan_error=encode_plan_error(message))
        case m.Welcome():
            return pb.FromExecutor(welcome=encode_welcome(message))
        case m.Draining():
            return pb.FromExecutor(draining=pb.Draining(reason=message.reason, deadline_ms=message.deadline_ms))


def decode_from_executor(p: pb.FromExecutor) -> m.FromExecutor:
    match p.WhichOneof("message"):
        case "result":
            return decode_result(p.result)
        case "pong":
            return m.Pong(p.pong.id, p.pong.ping_sent_ns, p.pong.received_ns, p.pong.sent_ns)
        case "plan_error":
            return decode_plan_error(p.plan_error)
        case "welcome":
            return decode_welcome(p.welcome)
        case "draining":
            return m.Draining(p.draining.reason, p.draining.deadline_ms)
        case _:
            raise ProtocolError("message: empty or unknown", field="message")
