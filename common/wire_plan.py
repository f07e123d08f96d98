"""StepPlan ↔ protobuf. Pure functions."""

from operator import attrgetter

from common import messages as m
from common.bitmaps import pack_bitmap, unpack_bitmap
from common.wire_columns import check_lengths, pack_f32, pack_u32, unpack_f32, unpack_u32
from stepwire.executor.v1 import executor_pb2 as pb

# Fields that are zero in most requests.
_RARE = (
    "top_k", "min_p", "presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos", "num_logprobs",
    "num_prompt_logprobs", "prompt_logprobs_from", "grammar_kind", "grammar", "adapter_id",
)  # fmt: skip
_rare_of = attrgetter(*_RARE)


def encode_sampling(s: m.Sampling, p: pb.Sampling) -> None:
    """Writes `s` into the empty `p`. Touches only what is there: a zero is what an absent field says."""
    p.SetInParent()
    p.seed = s.seed
    p.max_tokens = s.max_tokens
    p.temperature = s.temperature
    p.top_p = s.top_p
    p.repetition_penalty = s.repetition_penalty
    if any(rare := _rare_of(s)):
        for name, value in zip(_RARE, rare, strict=True):
            if value:
                setattr(p, name, value)
    if s.stop_ids:
        p.stop_ids = pack_u32(m.u32(s.stop_ids))
    if s.bias:
        p.bias_ids = pack_u32(m.u32(i for i, _ in s.bias))
        p.bias_values = pack_f32(m.f32(v for _, v in s.bias))
    if s.allowed_ids:
        p.allowed_ids = pack_u32(m.u32(s.allowed_ids))


def decode_sampling(p: pb.Sampling, field: str) -> m.Sampling:
    ids, values = unpack_u32(p.bias_ids, f"{field}.bias_ids"), unpack_f32(p.bias_values, f"{field}.bias_values")
    check_lengths(f"{field}.bias_values", ids, values)
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


_COLUMNS = (
    "release", "grant_rows", "grant_indices", "grant_blocks", "copy_sources", "copy_targets", "set_token_rows",
    "set_token_tokens", "prefill_rows", "prefill_starts", "prefill_counts", "draft_rows", "draft_counts",
    "raw_logits_rows", "raw_logits_positions",
)  # fmt: skip
_columns_of = attrgetter(*_COLUMNS)


def encode_plan(plan: m.StepPlan, p: pb.StepPlan) -> None:
    """Writes `plan` into the empty `p`. Touches only what is there: of a steady step that is five fields of 25."""
    p.epoch = plan.epoch
    p.step_id = plan.step_id
    p.sent_ns = plan.sent_ns
    p.num_tokens = plan.num_tokens
    p.trace_context = plan.trace_context
    p.decode = pack_bitmap(plan.decode_rows)
    for name, column in zip(_COLUMNS, _columns_of(plan), strict=True):
        if column is not m.EMPTY_U32 and len(column):
            setattr(p, name, pack_u32(column))
    for a in plan.admit:
        added = p.admit.add()
        added.row = a.row
        added.admission_id = a.admission_id
        added.tokens = pack_u32(a.tokens)
        added.length = a.length
        added.prompt_len = a.prompt_len
        added.computed_len = a.computed_len
        added.blocks = pack_u32(a.blocks)
        encode_sampling(a.sampling, added.sampling)
    for f in plan.fork:
        p.fork.add(source_row=f.source_row, row=f.row, admission_id=f.admission_id, length=f.length, seed=f.seed)
    for e in plan.extend:
        p.extend.add(row=e.row, offset=e.offset, tokens=pack_u32(e.tokens))


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


# Columns that belong together.
_GROUPS = (
    ("grant_rows", "grant_indices", "grant_blocks"),
    ("copy_sources", "copy_targets"),
    ("set_token_rows", "set_token_tokens"),
    ("prefill_rows", "prefill_starts", "prefill_counts"),
    ("draft_rows", "draft_counts"),
    ("raw_logits_rows", "raw_logits_positions"),
)


def decode_plan(p: pb.StepPlan) -> m.StepPlan:
    """Raises ProtocolError naming the field whose form is wrong."""
    columns = {name: unpack_u32(data, name) for name, data in zip(_COLUMNS, _columns_of(p), strict=True) if data}
    for names in _GROUPS if columns else ():
        check_lengths(names[0], *(columns.get(name, m.EMPTY_U32) for name in names))
    return m.StepPlan(
        epoch=p.epoch,
        step_id=p.step_id,
        sent_ns=p.sent_ns,
        num_tokens=p.num_tokens,
        trace_context=p.trace_context,
        admit=tuple(_decode_admit(a, f"admit[{i}]") for i, a in enumerate(p.admit)),
        fork=tuple(m.Fork(f.source_row, f.row, f.admission_id, f.length, f.seed) for f in p.fork),
        extend=tuple(
            m.Extend(e.row, e.offset, unpack_u32(e.tokens, f"extend[{i}].tokens")) for i, e in enumerate(p.extend)
        ),
        decode_rows=unpack_bitmap(p.decode),
        **columns,
    )
