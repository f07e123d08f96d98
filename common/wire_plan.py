"""StepPlan ↔ protobuf. Pure functions."""

from common import messages as m
from common.wire_columns import check_lengths, pack_bitmap, pack_f32, pack_u32, unpack_bitmap, unpack_f32, unpack_u32
from stepwire.executor.v1 import executor_pb2 as pb


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
        check_lengths(name, *columns)
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
