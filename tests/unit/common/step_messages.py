"""Hypothesis strategies for every message of the step protocol, and equality that looks into columns."""

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st

from common import messages as m

U32S = st.integers(0, 2**32 - 1)
U64S = st.integers(0, 2**64 - 1)
I64S = st.integers(-(2**63), 2**63 - 1)
F32S = st.floats(width=32, allow_nan=False)
TEXTS = st.text(max_size=20)
ROWS = st.sets(st.integers(0, 300), max_size=20).map(lambda rows: m.u32(sorted(rows)))


def columns(*kinds: st.SearchStrategy[Any], max_size: int = 8) -> st.SearchStrategy[tuple[m.U32, ...]]:
    """Columns of one length."""
    tuples = st.lists(st.tuples(*kinds), max_size=max_size)
    return tuples.map(lambda items: tuple(m.u32([item[i] for item in items]) for i in range(len(kinds))))


def column(max_size: int = 8) -> st.SearchStrategy[m.U32]:
    return columns(U32S, max_size=max_size).map(lambda c: c[0])


samplings = st.builds(
    m.Sampling,
    seed=U64S,
    max_tokens=U32S,
    temperature=F32S,
    top_k=U32S,
    top_p=F32S,
    min_p=F32S,
    repetition_penalty=F32S,
    presence_penalty=F32S,
    frequency_penalty=F32S,
    min_tokens=U32S,
    stop_ids=st.lists(U32S, max_size=4).map(tuple),
    ignore_eos=st.booleans(),
    bias=st.lists(st.tuples(U32S, F32S), max_size=4).map(tuple),
    allowed_ids=st.lists(U32S, max_size=4).map(tuple),
    num_logprobs=U32S,
    num_prompt_logprobs=U32S,
    prompt_logprobs_from=U32S,
    grammar_kind=TEXTS,
    grammar=TEXTS,
    adapter_id=U32S,
)

admits = st.builds(
    m.Admit,
    row=U32S,
    admission_id=U64S,
    tokens=column(),
    length=U32S,
    prompt_len=U32S,
    computed_len=U32S,
    blocks=column(),
    sampling=samplings,
)


@st.composite
def plans(draw: st.DrawFn) -> m.StepPlan:
    grants, copies = draw(columns(U32S, U32S, U32S)), draw(columns(U32S, U32S))
    set_token, prefill = draw(columns(U32S, U32S)), draw(columns(U32S, U32S, U32S))
    draft, raw = draw(columns(U32S, U32S)), draw(columns(U32S, U32S))
    return m.StepPlan(
        epoch=draw(U64S),
        step_id=draw(U64S),
        sent_ns=draw(I64S),
        num_tokens=draw(U32S),
        trace_context=draw(st.binary(max_size=25)),
        release=draw(column()),
        admit=tuple(draw(st.lists(admits, max_size=2))),
        fork=tuple(draw(st.lists(st.builds(m.Fork, U32S, U32S, U64S, U32S, U64S), max_size=2))),
        extend=tuple(draw(st.lists(st.builds(m.Extend, U32S, U32S, column()), max_size=2))),
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
        decode_rows=draw(ROWS),
        draft_rows=draft[0],
        draft_counts=draft[1],
        raw_logits_rows=raw[0],
        raw_logits_positions=raw[1],
    )


@st.composite
def logprobs(draw: st.DrawFn) -> m.Logprobs:
    tops = draw(st.lists(st.lists(st.tuples(U32S, F32S), max_size=3), max_size=3))
    return m.Logprobs(
        rows=m.u32([draw(U32S) for _ in tops]),
        chosen=m.f32([draw(F32S) for _ in tops]),
        top_counts=m.u32([len(top) for top in tops]),
        top_ids=m.u32([i for top in tops for i, _ in top]),
        top_logprobs=m.f32([v for top in tops for _, v in top]),
    )


@st.composite
def results(draw: st.DrawFn) -> m.StepResult:
    rows = draw(ROWS)
    counts = m.u32([draw(st.integers(1, 3)) for _ in rows]) if draw(st.booleans()) else m.EMPTY_U32
    num_tokens = int(counts.sum()) if len(counts) else len(rows)
    return m.StepResult(
        epoch=draw(U64S),
        step_id=draw(U64S),
        emitted_rows=rows,
        tokens=m.u32([draw(U32S) for _ in range(num_tokens)]),
        counts=counts,
        accepted=m.u32([draw(U32S) for _ in rows]) if draw(st.booleans()) else m.EMPTY_U32,
        logprobs=draw(logprobs()),
        row_errors=tuple(
            draw(st.lists(st.builds(m.RowError, U32S, U64S, st.sampled_from(m.RowErrorCode), TEXTS), max_size=2))
        ),
        timings=draw(st.builds(m.Timings, *[I64S] * 11)),
        mode=draw(st.sampled_from(m.StepMode)),
        bucket=draw(U32S),
        output_bytes=draw(U32S),
    )


infos = st.builds(
    m.ExecutorInfo,
    model_id=TEXTS,
    model_hash=TEXTS,
    vocab_size=st.integers(1, 2**32 - 1),
    eos_ids=st.lists(U32S, max_size=3).map(tuple),
    num_rows=st.integers(1, 2**32 - 1),
    max_num_seqs=st.integers(1, 2**32 - 1),
    max_blocks_per_row=U32S,
    block_size=st.integers(1, 2**32 - 1),
    num_blocks=st.integers(1, 2**32 - 1),
    max_tokens_per_step=st.integers(1, 2**32 - 1),
    max_context=U32S,
    max_draft_tokens=U32S,
    buckets=st.lists(U32S, max_size=3).map(tuple),
    numerics=TEXTS,
    kv_dtype=TEXTS,
    world_size=U32S,
    features=st.lists(TEXTS, max_size=3).map(tuple),
    max_message_bytes=U32S,
    max_output_bytes=U32S,
    device=TEXTS,
    dtype=TEXTS,
)

hellos = st.builds(
    m.Hello,
    scheduler_id=st.binary(min_size=16, max_size=16),
    epoch=st.integers(1, 2**64 - 1),
    pipeline_depth=st.integers(1, 2**32 - 1),
    monotonic_ns=I64S,
    wall_ns=I64S,
    expected_model_hash=TEXTS,
    keep_kv=st.booleans(),
    known_incarnation=U64S,
    protocol_version=U32S,
)

welcomes = st.builds(
    m.Welcome,
    incarnation=U64S,
    info=infos,
    pipeline_depth=U32S,
    kv_kept=st.booleans(),
    monotonic_ns=I64S,
    wall_ns=I64S,
    protocol_version=U32S,
)

plan_errors = st.builds(
    m.PlanError,
    epoch=U64S,
    step_id=U64S,
    code=st.sampled_from(m.PlanErrorCode),
    text=TEXTS,
    field=TEXTS,
    row=st.none() | U32S,
    admission_id=U64S,
    limit=U64S,
)

to_executor = st.one_of(hellos, plans(), st.builds(m.Ping, U64S, I64S))
from_executor = st.one_of(
    welcomes,
    results(),
    plan_errors,
    st.builds(m.Pong, U64S, I64S, I64S, I64S),
    st.builds(m.Draining, TEXTS, I64S),
)


def same(left: object, right: object) -> bool:
    """Equal in type and value, columns element by element."""
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if dataclasses.is_dataclass(left) and not isinstance(left, type):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left))
    return left == right
