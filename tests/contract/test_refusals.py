"""Plans an executor must refuse: with the right code, the field and the row; with nothing changed; ending the epoch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from common.messages import Extend, Fork, PlanErrorCode, Sampling, u32
from executor_svc.step_executor import PlanRefused
from tests.contract.conftest import Makers
from tests.contract.executors import MAX_CONTEXT, MAX_SEQS, MAX_TOKENS, NUM_BLOCKS, VOCAB
from tests.contract.plans import GREEDY, Steps, admit, prefill, started

PROMPT = [11, 42, 7, 90, 3, 66]
Code = PlanErrorCode
Fields = dict[str, Any]


@dataclass(frozen=True)
class Bad:
    """A plan to refuse after row 0 (PROMPT, blocks 0 and 1) was prefilled and has sampled one token. "field" is how
    PlanError.field begins."""

    name: str
    code: PlanErrorCode
    field: str
    make: Callable[[], Fields]


def sampling(**changes: Any) -> Fields:
    return {"admit": (admit(3, PROMPT, [4, 5], sampling=replace(GREEDY, **changes)),)}


def chunk(row: int = 3, start: int = 0, count: int = 6, **admission: Any) -> Fields:
    return {"admit": (admit(3, PROMPT, [4, 5], **admission),), **prefill((row, start, count))}


BAD = [
    Bad("release of an empty row", Code.UNKNOWN_ROW, "release", lambda: {"release": u32([5])}),
    Bad("release twice", Code.UNKNOWN_ROW, "release", lambda: {"release": u32([0, 0])}),
    Bad("release past the rows", Code.UNKNOWN_ROW, "release", lambda: {"release": u32([9999])}),
    Bad("admit into a busy row", Code.ROW_BUSY, "admit[0].row", lambda: {"admit": (admit(0, PROMPT, [4, 5]),)}),
    Bad(
        "admit twice",
        Code.ROW_BUSY,
        "admit[1].row",
        lambda: {"admit": (admit(3, PROMPT, [4, 5]), admit(3, PROMPT, [6, 7]))},
    ),
    Bad("admit past the rows", Code.UNKNOWN_ROW, "admit[0].row", lambda: {"admit": (admit(9999, PROMPT, [4]),)}),
    Bad("no such block", Code.BLOCK_RANGE, "admit[0].blocks", lambda: {"admit": (admit(3, PROMPT, [NUM_BLOCKS]),)}),
    Bad(
        "computed without blocks",
        Code.BLOCK_RANGE,
        "admit[0].blocks",
        lambda: {"admit": (admit(3, PROMPT, [4], computed_len=5),)},
    ),
    Bad(
        "all computed",
        Code.MALFORMED,
        "admit[0].computed_len",
        lambda: {"admit": (admit(3, PROMPT, [4, 5], computed_len=6),)},
    ),
    Bad(
        "prompt longer than known",
        Code.MALFORMED,
        "admit[0].prompt_len",
        lambda: {"admit": (admit(3, PROMPT, [4, 5], prompt_len=7),)},
    ),
    Bad("unknown token", Code.MALFORMED, "admit[0].tokens", lambda: {"admit": (admit(3, [VOCAB], [4]),)}),
    Bad("context too long", Code.BUDGET, "admit[0].length", lambda: {"admit": (admit(3, [1] * MAX_CONTEXT, [4]),)}),
    Bad(
        "an admission id that lives",
        Code.MALFORMED,
        "admit[0].admission_id",
        lambda: {"admit": (admit(3, PROMPT, [4, 5], admission_id=71),)},
    ),
    Bad("negative temperature", Code.MALFORMED, "admit[0].sampling.temperature", lambda: sampling(temperature=-1.0)),
    Bad("NaN temperature", Code.MALFORMED, "admit[0].sampling.temperature", lambda: sampling(temperature=float("nan"))),
    Bad("top_p of 0", Code.MALFORMED, "admit[0].sampling.top_p", lambda: sampling(top_p=0.0)),
    Bad("min_p over 1", Code.MALFORMED, "admit[0].sampling.min_p", lambda: sampling(min_p=1.5)),
    Bad("no tokens left", Code.MALFORMED, "admit[0].sampling.max_tokens", lambda: sampling(max_tokens=0)),
    Bad("a grammar", Code.UNSUPPORTED, "admit[0].sampling.grammar", lambda: sampling(grammar_kind="json")),
    Bad("an adapter", Code.UNSUPPORTED, "admit[0].sampling.adapter_id", lambda: sampling(adapter_id=3)),
    Bad("a fork", Code.UNSUPPORTED, "fork", lambda: {"fork": (Fork(0, 1, 9, 3, 0),)}),
    Bad("set_token", Code.UNSUPPORTED, "set_token", lambda: {"set_token_rows": u32([0]), "set_token_tokens": u32([1])}),
    Bad("a draft", Code.UNSUPPORTED, "draft", lambda: {"draft_rows": u32([0]), "draft_counts": u32([1])}),
    Bad("extend of an empty row", Code.UNKNOWN_ROW, "extend[0].row", lambda: {"extend": (Extend(5, 0, u32([1])),)}),
    Bad("extend past the announced", Code.MALFORMED, "extend[0]", lambda: {"extend": (Extend(0, 6, u32([1])),)}),
    Bad(
        "extend with a gap",
        Code.MALFORMED,
        "extend[0]",
        lambda: {"admit": (admit(3, PROMPT[:2], [4, 5], length=6),), "extend": (Extend(3, 3, u32([1])),)},
    ),
    Bad(
        "grant to an empty row",
        Code.UNKNOWN_ROW,
        "grant_rows",
        lambda: {"grant_rows": u32([5]), "grant_indices": u32([0]), "grant_blocks": u32([1])},
    ),
    Bad(
        "grant past the table",
        Code.BLOCK_RANGE,
        "grant_indices",
        lambda: {"grant_rows": u32([0]), "grant_indices": u32([999]), "grant_blocks": u32([1])},
    ),
    Bad(
        "grant of no block",
        Code.BLOCK_RANGE,
        "grant_blocks",
        lambda: {"grant_rows": u32([0]), "grant_indices": u32([2]), "grant_blocks": u32([NUM_BLOCKS])},
    ),
    Bad(
        "copy from no block",
        Code.BLOCK_RANGE,
        "copy_sources",
        lambda: {"copy_sources": u32([NUM_BLOCKS]), "copy_targets": u32([4])},
    ),
    Bad(
        "copy to no block",
        Code.BLOCK_RANGE,
        "copy_targets",
        lambda: {"copy_sources": u32([0]), "copy_targets": u32([NUM_BLOCKS])},
    ),
    Bad("prefill of an empty row", Code.UNKNOWN_ROW, "prefill_rows", lambda: prefill((5, 0, 1))),
    Bad("prefill that leaves a gap", Code.MALFORMED, "prefill_", lambda: chunk(start=1, count=2)),
    Bad("prefill past the known", Code.MALFORMED, "prefill_", lambda: chunk(count=7)),
    Bad(
        "prefill of what was not sent",
        Code.MALFORMED,
        "prefill_",
        lambda: {"admit": (admit(3, PROMPT[:2], [4, 5], length=6),), **prefill((3, 0, 3))},
    ),
    Bad(
        "prefill without blocks",
        Code.BLOCK_RANGE,
        "prefill_",
        lambda: {"admit": (admit(3, PROMPT, [4]),), **prefill((3, 0, 6))},
    ),
    Bad(
        "prefill in falling rows",
        Code.MALFORMED,
        "prefill_rows",
        lambda: {"admit": (admit(3, PROMPT, [4, 5]), admit(4, PROMPT, [6, 7])), **prefill((4, 0, 6), (3, 0, 6))},
    ),
    Bad("decode of an empty row", Code.UNKNOWN_ROW, "decode", lambda: {"decode_rows": u32([5])}),
    Bad("decode of a released row", Code.UNKNOWN_ROW, "decode", lambda: {"release": u32([0]), "decode_rows": u32([0])}),
    Bad(
        "decode before the prompt is computed",
        Code.MALFORMED,
        "decode",
        lambda: {"admit": (admit(3, PROMPT, [4, 5]),), "decode_rows": u32([3])},
    ),
    Bad(
        "decode and prefill of one row",
        Code.MALFORMED,
        "decode",
        lambda: {**prefill((0, 7, 1)), "decode_rows": u32([0])},
    ),
    Bad("a wrong sum", Code.MALFORMED, "num_tokens", lambda: {"decode_rows": u32([0]), "num_tokens": 2}),
    Bad(
        "too many tokens",
        Code.BUDGET,
        "num_tokens",
        lambda: {"admit": (admit(3, [1] * (MAX_TOKENS + 1), list(range(4, 13))),), **prefill((3, 0, MAX_TOKENS + 1))},
    ),
    Bad(
        "too many rows",
        Code.BUDGET,
        "decode",
        lambda: {
            "admit": tuple(admit(r, [1], [r]) for r in range(10, 11 + MAX_SEQS)),
            **prefill(*((r, 0, 1) for r in range(10, 11 + MAX_SEQS))),
        },
    ),
    Bad(
        "logits nobody makes",
        Code.MALFORMED,
        "raw_logits_positions",
        lambda: {"decode_rows": u32([0]), "raw_logits_rows": u32([0]), "raw_logits_positions": u32([3])},
    ),
]


def first_step(steps: Steps) -> int:
    return steps.run(
        admit=(admit(0, PROMPT, [0, 1], admission_id=steps.epoch * 1000 + 71 - 1000),), **prefill((0, 0, 6))
    )[0]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_refused_with_nothing_changed(make: Makers, bad: Bad) -> None:
    healthy = started(make())
    want = [first_step(healthy), healthy.decode(0)[0], healthy.decode(0)[0]]
    executor = make()
    steps = started(executor)
    assert first_step(steps) == want[0]
    good = steps.launch(decode_rows=u32([0]))
    with pytest.raises(PlanRefused) as refusal:
        steps.launch(**bad.make())
    error = refusal.value.error
    assert (error.code, error.epoch, error.step_id) == (bad.code, 1, steps.next_id)
    assert error.field.startswith(bad.field), error.field
    assert error.text
    # What was launched before stands; what comes after is not run.
    result = good.wait()
    assert result.tokens.tolist() == [want[1]]
    with pytest.raises(PlanRefused) as late:
        steps.launch(decode_rows=u32([0]))
    assert late.value.error.code is Code.EPOCH_ENDED
    # The blocks are as they were: the next epoch goes on with them.
    again = Steps(executor, epoch=2)
    assert again.begin(keep_kv=True, known_incarnation=executor.incarnation)
    known = [*PROMPT, *want[:2]]
    resumed = admit(9, known, [0, 1], prompt_len=len(PROMPT), computed_len=len(known) - 1)
    assert again.run(admit=(resumed,), **prefill((9, len(known) - 1, 1))) == {9: want[2]}


def test_step_ids_rise_by_one(make: Makers) -> None:
    steps = started(make())
    steps.run()
    steps.next_id += 1
    with pytest.raises(PlanRefused) as refusal:
        steps.launch()
    assert (refusal.value.error.code, refusal.value.error.limit) == (Code.STEP_GAP, 2)


def test_plans_of_another_epoch_are_stale_and_end_nothing(make: Makers) -> None:
    executor = make()
    steps = started(executor)
    steps.run()
    with pytest.raises(PlanRefused) as refusal:
        Steps(executor, epoch=9).launch()
    assert refusal.value.error.code is Code.STALE_EPOCH
    steps.run()


def test_max_tokens_and_context_end_a_row(make: Makers) -> None:
    two = replace(GREEDY, max_tokens=2)
    steps = started(make())
    steps.run(admit=(admit(0, PROMPT, [0, 1], sampling=two),), **prefill((0, 0, 6)))
    steps.decode(0)
    with pytest.raises(PlanRefused) as refusal:
        steps.decode(0)
    assert (refusal.value.error.code, refusal.value.error.row) == (Code.BUDGET, 0)
    longest = [1 + i % 50 for i in range(MAX_CONTEXT - 1)]
    steps = started(make())
    steps.run(
        admit=(admit(0, longest, list(range(16)), sampling=Sampling(1, 99, temperature=0.0)),), **prefill((0, 0, 32))
    )
    steps.run(**prefill((0, 32, len(longest) - 32)))
    with pytest.raises(PlanRefused) as refusal:
        steps.decode(0)
    assert refusal.value.error.code is Code.BUDGET


def test_refusals_name_row_admission_and_limit(make: Makers) -> None:
    steps = started(make())
    with pytest.raises(PlanRefused) as refusal:
        steps.launch(admit=(admit(3, [VOCAB], [4], admission_id=815),))
    assert (refusal.value.error.row, refusal.value.error.admission_id) == (3, 815)
    steps = started(make())
    with pytest.raises(PlanRefused) as refusal:
        steps.launch(
            admit=(admit(3, [1] * (MAX_TOKENS + 1), list(range(4, 13))),), **prefill((3, 0, MAX_TOKENS + 1))
        )  # fmt: skip
    assert refusal.value.error.limit == MAX_TOKENS
