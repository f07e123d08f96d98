"""Hello, Welcome and ExecutorInfo ↔ protobuf. Pure functions."""

from common import messages as m
from common.errors import ProtocolError
from common.wire_columns import pack_u32, unpack_u32
from stepwire.executor.v1 import executor_pb2 as pb


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
    "decode_step_ns",
    "decode_row_ns",
    "prefill_token_ns",
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
