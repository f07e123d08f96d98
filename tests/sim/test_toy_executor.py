"""The toy refuses what makes no sense, whole and before anything changes; what it computes depends on its blocks."""

from dataclasses import replace

import pytest

from common.messages import Admit, Extend, Fork, Hello, PlanErrorCode, Sampling, StepPlan, u32
from executor_svc.step_executor import PlanRefused
from tests.fakes.toy_executor import ToyExecutor, crashed, toy_info
from tests.fakes.toy_tokens import expected_tokens

PROMPT = [10, 11, 12, 13, 14]
SAMPLING = Sampling(5, 6, temperature=0.7)
ADMIT = Admit(3, 1, u32(PROMPT), 5, 5, 0, u32([7, 9]), SAMPLING)
PREFILL = StepPlan(1, 1, 0, 5, admit=(ADMIT,), prefill_rows=u32([3]), prefill_starts=u32([0]), prefill_counts=u32([5]))
DECODE = StepPlan(1, 2, 0, 1, decode_rows=u32([3]))


def _toy(**fields: object) -> ToyExecutor:
    toy = ToyExecutor(toy_info(**fields))
    toy.begin_epoch(Hello(bytes(16), 1, 2, 0, 0))
    return toy


def _running() -> ToyExecutor:
    toy = _toy()
    toy.execute(PREFILL, 0).wait()
    return toy


def test_it_gives_the_oracle_s_tokens() -> None:
    toy = _toy()
    tokens = toy.execute(PREFILL, 0).wait().tokens.tolist()
    for step in range(2, 7):
        grant = {2: (2, 4)}.get(step)
        plan = replace(DECODE, step_id=step)
        if grant:
            plan = replace(plan, grant_rows=u32([3]), grant_indices=u32([grant[0]]), grant_blocks=u32([grant[1]]))
        tokens += toy.execute(plan, 0).wait().tokens.tolist()
    assert tokens == expected_tokens(PROMPT, SAMPLING, vocab_size=1000, eos_ids=(2,))
    assert toy.corrupt_reads == 0
    with pytest.raises(PlanRefused) as refused:
        toy.execute(replace(DECODE, step_id=7), 0)
    assert (refused.value.error.code, refused.value.error.limit) == (PlanErrorCode.BUDGET, 6)


BAD: list[tuple[str, StepPlan, PlanErrorCode, str]] = [
    ("gap", replace(DECODE, step_id=3), PlanErrorCode.STEP_GAP, ""),
    ("epoch", replace(DECODE, epoch=2), PlanErrorCode.STALE_EPOCH, ""),
    ("release", replace(DECODE, release=u32([4])), PlanErrorCode.UNKNOWN_ROW, "release[0]"),
    ("released", replace(DECODE, release=u32([3])), PlanErrorCode.UNKNOWN_ROW, "decode"),
    ("busy", replace(DECODE, admit=(replace(ADMIT, admission_id=2),)), PlanErrorCode.ROW_BUSY, "admit[0].row"),
    ("no row", replace(DECODE, admit=(replace(ADMIT, row=80),)), PlanErrorCode.UNKNOWN_ROW, "admit[0].row"),
    ("id again", replace(DECODE, admit=(replace(ADMIT, row=4),)), PlanErrorCode.MALFORMED, "admit[0].admission_id"),
    (
        "computed",
        replace(DECODE, admit=(replace(ADMIT, row=4, admission_id=2, computed_len=5),)),
        PlanErrorCode.MALFORMED,
        "admit[0].computed_len",
    ),
    (
        "block",
        replace(DECODE, admit=(replace(ADMIT, row=4, admission_id=2, blocks=u32([256])),)),
        PlanErrorCode.BLOCK_RANGE,
        "admit[0].blocks",
    ),
    (
        "grammar",
        replace(DECODE, admit=(replace(ADMIT, row=4, admission_id=2, sampling=replace(SAMPLING, grammar_kind="x")),)),
        PlanErrorCode.UNSUPPORTED,
        "admit[0].sampling.grammar_kind",
    ),
    ("fork", replace(DECODE, fork=(Fork(3, 4, 2, 5, 1),)), PlanErrorCode.UNSUPPORTED, "fork"),
    ("extend", replace(DECODE, extend=(Extend(3, 5, u32([1])),)), PlanErrorCode.MALFORMED, "extend[0]"),
    (
        "grant",
        replace(DECODE, grant_rows=u32([3]), grant_indices=u32([64]), grant_blocks=u32([1])),
        PlanErrorCode.BLOCK_RANGE,
        "grant_indices[0]",
    ),
    (
        "copy",
        replace(DECODE, copy_sources=u32([1]), copy_targets=u32([256])),
        PlanErrorCode.BLOCK_RANGE,
        "copy_targets",
    ),
    ("sum", replace(DECODE, num_tokens=2), PlanErrorCode.MALFORMED, "num_tokens"),
    ("unknown", replace(DECODE, decode_rows=u32([5])), PlanErrorCode.UNKNOWN_ROW, "decode"),
    (
        "chunk",
        StepPlan(1, 2, 0, 1, prefill_rows=u32([3]), prefill_starts=u32([4]), prefill_counts=u32([1])),
        PlanErrorCode.MALFORMED,
        "prefill_counts[0]",
    ),
    (
        "tokens",
        replace(DECODE, num_tokens=65, decode_rows=u32(range(65))),
        PlanErrorCode.BUDGET,
        "num_tokens",
    ),
    (
        "position",
        replace(DECODE, raw_logits_rows=u32([3]), raw_logits_positions=u32([5])),
        PlanErrorCode.MALFORMED,
        "raw_logits_positions[0]",
    ),
]


@pytest.mark.parametrize(("plan", "code", "field"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_plan_is_refused_and_ends_the_epoch(plan: StepPlan, code: PlanErrorCode, field: str) -> None:
    toy = _running()
    with pytest.raises(PlanRefused) as refused:
        toy.execute(plan, 0)
    assert (refused.value.error.code, refused.value.error.field) == (code, field)
    assert toy.rows_in_use == 1
    if code == PlanErrorCode.STALE_EPOCH:
        toy.execute(DECODE, 0).wait()  # another epoch's plan is not this one's fault
        return
    with pytest.raises(PlanRefused) as after:
        toy.execute(DECODE, 0)
    assert after.value.error.code == PlanErrorCode.EPOCH_ENDED


def test_too_many_plans_in_flight_are_refused() -> None:
    toy = _running()
    toy.execute(DECODE, 0)
    toy.execute(replace(DECODE, step_id=3), 0)
    with pytest.raises(PlanRefused) as refused:
        toy.execute(replace(DECODE, step_id=4), 0)
    assert (refused.value.error.code, refused.value.error.limit) == (PlanErrorCode.BUDGET, 2)


def test_a_wrong_block_changes_tokens() -> None:
    toy = _running()
    good = toy.execute(DECODE, 0).wait().tokens.tolist()
    wrong = _running()
    plan = replace(DECODE, grant_rows=u32([3]), grant_indices=u32([0]), grant_blocks=u32([33]))
    assert wrong.execute(plan, 0).wait().tokens.tolist() != good
    assert wrong.corrupt_reads == 1


def test_blocks_are_kept_only_when_both_agree() -> None:
    for keep, known, willing, kept in (
        (True, 0x70F, True, True),
        (False, 0x70F, True, False),
        (True, 1, True, False),
        (True, 0x70F, False, False),
    ):
        toy = _running()
        toy.keep_kv = willing
        hello = Hello(bytes(16), 2, 2, 0, 0, keep_kv=keep, known_incarnation=known)
        assert toy.begin_epoch(hello) is kept
        assert toy.rows_in_use == 0
    assert crashed(toy).incarnation != toy.incarnation


def test_a_dead_row_is_padding_until_released() -> None:
    toy = _running()
    toy.fail_rows.add(3)
    result = toy.execute(DECODE, 0).wait()
    assert [e.admission_id for e in result.row_errors] == [1] and not len(result.emitted_rows)
    again = toy.execute(replace(DECODE, step_id=3), 0).wait()
    assert not again.row_errors and not len(again.emitted_rows)
