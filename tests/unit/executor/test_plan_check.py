"""Validation changes nothing and lets nothing through that the books could not take: any plan at all may come."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import Admit, ExecutorInfo, Extend, PlanErrorCode, Sampling, StepPlan, u32
from executor_svc.input_batch import make_batch
from executor_svc.plan_check import PlanCheck
from executor_svc.rows import NO_BLOCK, RowBook
from executor_svc.step_executor import PlanRefused

INFO = ExecutorInfo(
    model_id="m",
    model_hash="h",
    vocab_size=20,
    eos_ids=(2,),
    num_rows=6,
    max_num_seqs=4,
    max_blocks_per_row=4,
    block_size=4,
    num_blocks=10,
    max_tokens_per_step=12,
    max_context=16,
)
SAMPLING = Sampling(seed=1, max_tokens=8)

rows = st.integers(0, 6)
blocks = st.integers(0, 10)
tokens = st.lists(st.integers(0, 20), min_size=0, max_size=8)


@st.composite
def admits(draw: st.DrawFn) -> Admit:
    known = draw(tokens)
    length = draw(st.sampled_from([len(known), len(known) + 2, 17]))
    return Admit(
        draw(rows),
        draw(st.integers(0, 4)),
        u32(known),
        length,
        draw(st.integers(0, max(1, length))),
        draw(st.sampled_from([0, 0, 3, max(0, length - 1), length])),
        u32(draw(st.lists(blocks, max_size=5))),
        replace(
            SAMPLING,
            temperature=draw(st.sampled_from([0.0, 1.0, -1.0, float("nan")])),
            max_tokens=draw(st.integers(0, 9)),
            num_prompt_logprobs=draw(st.sampled_from([0, 0, 2])),
            prompt_logprobs_from=draw(st.integers(0, 2)),
        ),
    )


def columns(*kinds: st.SearchStrategy[int], max_size: int = 3) -> st.SearchStrategy[list[tuple[int, ...]]]:
    return st.lists(st.tuples(*kinds), max_size=max_size)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    grants = draw(columns(rows, st.integers(0, 4), blocks))
    prefill = sorted(draw(columns(rows, st.integers(0, 8), st.integers(0, 9))))
    decode = sorted(draw(st.lists(rows, max_size=4)))
    raw = draw(columns(rows, st.integers(0, 9), max_size=1))
    total = sum(count for _, _, count in prefill) + len(decode)
    return StepPlan(
        1,
        1,
        0,
        num_tokens=draw(st.sampled_from([total, total, total, total + 1])),
        release=u32(draw(st.lists(rows, max_size=2))),
        admit=tuple(draw(st.lists(admits(), max_size=3))),
        extend=tuple(Extend(r, o, u32([1, 2])) for r, o in draw(columns(rows, st.integers(0, 9), max_size=2))),
        grant_rows=u32(r for r, _, _ in grants),
        grant_indices=u32(i for _, i, _ in grants),
        grant_blocks=u32(b for _, _, b in grants),
        copy_sources=u32(draw(st.lists(blocks, max_size=1))),
        copy_targets=u32(draw(st.lists(blocks, max_size=1))),
        prefill_rows=u32(r for r, _, _ in prefill),
        prefill_starts=u32(s for _, s, _ in prefill),
        prefill_counts=u32(c for _, _, c in prefill),
        decode_rows=u32(decode),
        raw_logits_rows=u32(r for r, _ in raw),
        raw_logits_positions=u32(p for _, p in raw),
    )


def book() -> RowBook:
    """Row 0: prompt of 5 computed, one token sampled. Row 1: 3 of 6 computed. Row 2: tokens still to come."""
    made = RowBook(INFO.num_rows, INFO.max_blocks_per_row, INFO.block_size, INFO.max_context)
    made.admit(Admit(0, 90, u32([1, 2, 3, 4, 5]), 5, 5, 0, u32([0, 1]), SAMPLING))
    made.computed[0], made.length[0] = 5, 6
    made.admit(Admit(1, 91, u32([1, 2, 3, 4, 5, 6]), 6, 6, 3, u32([2, 3]), SAMPLING))
    made.admit(Admit(2, 92, u32([1, 2]), 6, 6, 0, u32([4, 5]), SAMPLING))
    return made


def snapshot(made: RowBook) -> list[Any]:
    filled = [None if row is None else (row.admission_id, row.filled, row.tokens.tolist()) for row in made.rows]
    arrays = (made.occupied, made.length, made.computed, made.complete, made.max_length, made.needs, made.tables)
    return [filled, *(array.tolist() for array in arrays), sorted(made.admissions)]


def apply(plan: StepPlan, made: RowBook) -> None:
    """What the stager does with the book."""
    for row in plan.release.tolist():
        made.release(row)
    for admit in plan.admit:
        made.admit(admit)
    for extend in plan.extend:
        made.extend(extend)
    for row, index, block in zip(plan.grant_rows, plan.grant_indices, plan.grant_blocks, strict=True):
        made.tables[row, index] = block


@settings(max_examples=600, deadline=None)
@given(plan=plans())
def test_any_plan_is_refused_whole_or_leaves_sound_books(plan: StepPlan) -> None:
    made = book()
    before = snapshot(made)
    try:
        PlanCheck(INFO, made, plan).run()
    except PlanRefused as refusal:
        error = refusal.error
        assert error.code in PlanErrorCode and error.text and error.field
        assert snapshot(made) == before
        return
    assert snapshot(made) == before
    apply(plan, made)
    check_sound(plan, made)


def check_sound(plan: StepPlan, made: RowBook) -> None:
    batch = make_batch(plan, made)
    assert batch.num_tokens == plan.num_tokens <= INFO.max_tokens_per_step
    assert batch.num_rows <= INFO.max_num_seqs
    ends = batch.starts + batch.counts
    assert (ends <= batch.lengths).all()
    assert (batch.samples == (ends == batch.lengths)).all()
    assert (np.diff(batch.rows) > 0).all()
    for row, start, end in zip(batch.rows.tolist(), batch.starts.tolist(), ends.tolist(), strict=True):
        state = made.row(row)
        assert start == made.computed[row]
        needed = range(start // INFO.block_size, (end - 1) // INFO.block_size + 1)
        assert all(made.tables[row, index] != NO_BLOCK for index in needed)
        # Every token computed is known, or is the one the device sampled last.
        assert end <= state.filled or (state.filled == len(state.tokens) and start == end - 1 == made.length[row] - 1)
        assert not batch.samples[batch.rows == row].any() or made.length[row] < INFO.max_context
    assert len({state.admission_id for state in made.rows if state is not None}) == int(made.occupied.sum())


def test_decodes_alone_take_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of nothing but decodes is decided by array operations, however many rows."""
    made = book()
    steady = StepPlan(1, 1, 0, num_tokens=1, decode_rows=u32([0]))
    check = PlanCheck(INFO, made, steady)
    calls: list[int] = []
    monkeypatch.setattr(check, "_check_decode_row", calls.append)
    check.run()
    assert not calls


def test_output_bytes_have_a_budget() -> None:
    tight = replace(INFO, max_output_bytes=INFO.vocab_size * 4 - 1)
    plan = StepPlan(
        1, 1, 0, num_tokens=1, decode_rows=u32([0]), raw_logits_rows=u32([0]), raw_logits_positions=u32([6])
    )  # fmt: skip
    PlanCheck(INFO, book(), plan).run()
    try:
        PlanCheck(tight, book(), plan).run()
    except PlanRefused as refusal:
        assert refusal.error.code is PlanErrorCode.BUDGET
        assert refusal.error.limit == tight.max_output_bytes
    else:
        raise AssertionError("logits over the budget were let through")


@pytest.mark.parametrize(("first", "positions"), [(1, 8), (6, 3), (9, 0)])
def test_prompt_positions_nobody_wants_take_nothing_of_the_budget(first: int, positions: int) -> None:
    """A prompt of nine whose logprobs are wanted from `first` on, in one chunk."""
    sampling = replace(SAMPLING, num_prompt_logprobs=3, prompt_logprobs_from=first)
    plan = StepPlan(
        1, 1, 0, num_tokens=9, admit=(Admit(5, 99, u32(range(9)), 9, 9, 0, u32([7, 8, 9]), sampling),),
        prefill_rows=u32([5]), prefill_starts=u32([0]), prefill_counts=u32([9]),
    )  # fmt: skip
    needed = positions * (4 + 2 * 8)
    PlanCheck(replace(INFO, max_output_bytes=needed), book(), plan).run()
    if needed:
        with pytest.raises(PlanRefused):
            PlanCheck(replace(INFO, max_output_bytes=needed - 1), book(), plan).run()
