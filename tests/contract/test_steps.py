"""What single plans do: their order within a step, when a row samples, rows, blocks, copies, what comes back."""

from dataclasses import replace

import numpy as np
import pytest

from common.messages import Extend, Output, OutputKind, StepMode, u32
from tests.contract.conftest import Makers
from tests.contract.executors import NAN_TOKEN, VOCAB
from tests.contract.plans import GREEDY, Steps, admit, prefill, started, tokens_of
from tests.contract.same_tokens import clear_tokens

# Their tokens lie far apart with quantised weights too, see `clear_tokens`.
PROMPT = [31, 47, 51, 88, 39, 16, 61, 34, 10, 13]
OTHER = [65, 52, 11, 51]


def alone(make: Makers, tokens: list[int], count: int) -> list[int]:
    """What the executor generates after `tokens`, one chunk, then one token at a time; see `clear_tokens`."""
    return clear_tokens(make, tokens, count)


def test_info_names_what_plans_may_use(make: Makers) -> None:
    executor = make()
    assert executor.info.num_rows >= executor.info.max_num_seqs + 64
    assert executor.incarnation != 0
    assert executor.info.max_context <= executor.info.max_blocks_per_row * executor.info.block_size


def test_a_row_samples_exactly_at_its_last_known_token(make: Makers) -> None:
    want = alone(make, PROMPT, 1)
    steps = started(make())
    assert steps.run(admit=(admit(3, PROMPT, [5, 2, 9]),), **prefill((3, 0, 4))) == {}
    assert steps.run(**prefill((3, 4, 5))) == {}
    assert steps.run(**prefill((3, 9, 1))) == {3: want[0]}


def test_the_last_token_alone_may_come_by_decode(make: Makers) -> None:
    want = alone(make, PROMPT, 3)
    steps = started(make())
    assert steps.run(admit=(admit(3, PROMPT, [5, 2, 9, 11]),), **prefill((3, 0, 9))) == {}
    assert [steps.decode(3)[3] for _ in range(3)] == want


def test_plans_are_launched_before_results_are_known(make: Makers) -> None:
    want = alone(make, PROMPT, 5)
    steps = started(make())
    pending = [steps.launch(admit=(admit(1, PROMPT, [4, 3, 2, 1]),), **prefill((1, 0, 10)))]
    pending += [steps.launch(decode_rows=u32([1])) for _ in range(3)]
    got = [tokens_of(pending.pop(0).wait())[1]]
    pending.append(steps.launch(decode_rows=u32([1])))
    got += [tokens_of(step.wait())[1] for step in pending]
    assert got == want


def test_fields_apply_in_their_order(make: Makers) -> None:
    """One plan releases a row, admits into it, extends it, overwrites a block it was admitted with, and prefills."""
    want = alone(make, PROMPT, 2)
    steps = started(make())
    steps.run(admit=(admit(2, OTHER, [0, 1]),), **prefill((2, 0, 4)))
    got = steps.run(
        release=u32([2]),
        admit=(admit(2, PROMPT[:3], [0, 1], admission_id=77, length=10),),
        extend=(Extend(2, 3, u32(PROMPT[3:8])), Extend(2, 8, u32(PROMPT[8:]))),
        grant_rows=u32([2, 2, 2]),
        grant_indices=u32([1, 2, 2]),
        grant_blocks=u32([9, 1, 6]),
        **prefill((2, 0, 10)),
    )
    assert got == {2: want[0]}
    assert steps.decode(2) == {2: want[1]}


def test_released_rows_leave_the_others_alone(make: Makers) -> None:
    want, other = alone(make, PROMPT, 4), alone(make, OTHER, 2)
    steps = started(make())
    steps.run(
        admit=(admit(0, PROMPT, [0, 1, 2, 3]), admit(5, OTHER, [4, 5])), **prefill((0, 0, 10), (5, 0, 4))
    )  # fmt: skip
    assert steps.decode(0, 5) == {0: want[1], 5: other[1]}
    assert steps.run(release=u32([5]), decode_rows=u32([0])) == {0: want[2]}
    again = steps.run(
        admit=(admit(5, OTHER, [4, 5], admission_id=9),), decode_rows=u32([0]), **prefill((5, 0, 4))
    )  # fmt: skip
    assert again == {0: want[3], 5: other[0]}


def test_prefill_and_decode_mix_in_one_step_in_any_rows(make: Makers) -> None:
    want, other = alone(make, PROMPT, 3), alone(make, OTHER, 3)
    steps = started(make())
    steps.run(admit=(admit(4, PROMPT, [0, 1, 2, 3]),), **prefill((4, 0, 10)))
    low = steps.run(admit=(admit(1, OTHER, [7, 6]),), decode_rows=u32([4]), **prefill((1, 0, 4)))
    assert low == {1: other[0], 4: want[1]}
    high = steps.run(admit=(admit(9, OTHER, [8, 9]),), decode_rows=u32([1, 4]), **prefill((9, 0, 4)))
    assert high == {1: other[1], 4: want[2], 9: other[0]}


def test_readmission_with_more_tokens_goes_on_where_it_was(make: Makers) -> None:
    want = alone(make, PROMPT, 6)
    steps = started(make())
    known = PROMPT + want[:3]
    got = steps.run(
        admit=(admit(6, known, [3, 1, 4, 2], prompt_len=len(PROMPT)),), **prefill((6, 0, len(known)))
    )  # fmt: skip
    assert got == {6: want[3]}
    assert [steps.decode(6)[6] for _ in range(2)] == want[4:]


def test_copied_blocks_hold_what_the_source_held(make: Makers) -> None:
    want = alone(make, PROMPT, 2)
    steps = started(make())
    steps.run(admit=(admit(0, PROMPT, [0, 1, 2]),), **prefill((0, 0, 10)))
    got = steps.run(
        admit=(admit(1, PROMPT, [0, 12, 13], computed_len=9),),
        copy_sources=u32([1, 2]),
        copy_targets=u32([12, 13]),
        **prefill((1, 9, 1)),
    )
    assert got == {1: want[0]}
    # The copies are apart: the first row's further tokens do not reach them.
    assert steps.decode(0, 1) == {0: want[1], 1: want[1]}


def test_cached_blocks_stand_for_their_tokens(make: Makers) -> None:
    steps = started(make())
    longer = [*PROMPT[:8], 60, 61]
    want = alone(make, longer, 2)
    steps.run(admit=(admit(0, PROMPT, [0, 1, 2]),), **prefill((0, 0, 10)))
    assert steps.run(admit=(admit(1, longer, [0, 1, 5], computed_len=8),), **prefill((1, 8, 2))) == {1: want[0]}
    assert steps.decode(1) == {1: want[1]}


def test_blocks_are_kept_over_epochs_when_both_sides_agree(make: Makers) -> None:
    executor = make()
    want = alone(make, PROMPT, 2)
    steps = started(executor)
    steps.run(admit=(admit(0, PROMPT, [0, 1, 2]),), **prefill((0, 0, 10)))
    again = Steps(executor, epoch=2)
    assert again.begin(keep_kv=True, known_incarnation=executor.incarnation)
    assert again.run(admit=(admit(0, PROMPT, [0, 1, 2], computed_len=9),), **prefill((0, 9, 1))) == {0: want[0]}
    stranger = Steps(executor, epoch=3)
    assert not stranger.begin(keep_kv=True, known_incarnation=executor.incarnation ^ 2)
    assert not Steps(executor, epoch=4).begin(keep_kv=False, known_incarnation=executor.incarnation)


def test_blocks_are_not_kept_when_another_scheduler_was_there(make: Makers) -> None:
    executor = make()
    started(executor)
    incarnation = executor.incarnation
    assert not Steps(executor, epoch=1).begin(keep_kv=True, known_incarnation=incarnation, scheduler_id=b"o" * 16)
    assert not Steps(executor, epoch=2).begin(keep_kv=True, known_incarnation=incarnation)
    assert Steps(executor, epoch=3).begin(keep_kv=True, known_incarnation=incarnation)


def test_steps_in_flight_when_an_epoch_begins_change_nothing_in_it(make: Makers) -> None:
    executor = make()
    want = alone(make, PROMPT, 3)
    steps = started(executor)
    steps.launch(admit=(admit(0, OTHER, [0, 1, 2]),), **prefill((0, 0, 4)))
    steps.launch(decode_rows=u32([0]))
    again = Steps(executor, epoch=2)
    again.begin()
    got = again.run(admit=(admit(0, PROMPT, [2, 1, 0, 3]),), **prefill((0, 0, 10)))
    assert [got[0], again.decode(0)[0], again.decode(0)[0]] == want


def test_an_empty_plan_has_an_empty_result(make: Makers) -> None:
    result = started(make()).launch().wait()
    assert (result.epoch, result.step_id, result.mode) == (1, 1, StepMode.NONE)
    assert len(result.emitted_rows) == 0
    assert result.timings.received_ns == 5


def test_every_time_of_a_step_is_told(make: Makers) -> None:
    steps = started(make())
    steps.run(admit=(admit(0, PROMPT, [0, 1, 2]),), **prefill((0, 0, 10)))
    steps.decode(0)
    t = steps.results[-1].timings
    order = [t.prepare_start_ns, t.prepare_end_ns, t.launched_ns]
    device = [t.copy_in_start_ns, t.copy_in_end_ns, t.device_start_ns, t.device_end_ns, t.copy_out_end_ns]
    assert all(order) and order == sorted(order)
    assert all(device) and device == sorted(device)
    assert t.device_idle_ns >= 0


def test_row_errors_kill_one_row_until_it_is_released(make: Makers) -> None:
    executor = make(nan_token=True)
    steps = started(executor)
    bad = [8, NAN_TOKEN, 9, 4]
    healthy = PROMPT
    first = steps.launch(
        admit=(admit(1, bad, [0, 1], admission_id=501), admit(2, healthy, [2, 3, 4, 5])),
        **prefill((1, 0, 4), (2, 0, 10)),
    )
    second = steps.launch(decode_rows=u32([1, 2]))
    result, after = first.wait(), second.wait()
    assert [(e.row, e.admission_id) for e in result.row_errors] == [(1, 501)]
    assert result.emitted_rows.tolist() == [2]
    assert after.row_errors == () and after.emitted_rows.tolist() == [2]
    # Its blocks serve another sequence, whose masked slots lie where the NaN was.
    got = steps.run(release=u32([1]), admit=(admit(1, [8], [0], admission_id=502),), **prefill((1, 0, 1)))
    clean = started(make(nan_token=True))
    assert got == clean.run(admit=(admit(1, [8], [0]),), **prefill((1, 0, 1)))


@pytest.mark.parametrize("collected", [True, False])
def test_blocks_kept_over_epochs_bring_no_nan_along(make: Makers, collected: bool) -> None:
    """The row was not released, and nobody may have heard that it failed."""
    executor = make(nan_token=True)
    steps = started(executor)
    failing = steps.launch(admit=(admit(1, [8, NAN_TOKEN, 9, 4], [0, 1]),), **prefill((1, 0, 4)))
    if collected:
        assert [e.row for e in failing.wait().row_errors] == [1]
    again = Steps(executor, epoch=2)
    assert again.begin(keep_kv=True, known_incarnation=executor.incarnation)
    got = again.run(admit=(admit(1, [8], [0]),), **prefill((1, 0, 1)))
    clean = started(make(nan_token=True))
    assert got == clean.run(admit=(admit(1, [8], [0]),), **prefill((1, 0, 1)))


def test_a_nan_in_an_early_chunk_is_told_with_that_chunk(make: Makers) -> None:
    steps = started(make(nan_token=True))
    bad = [NAN_TOKEN, 9, 4, 1, 1, 1]
    steps.run(admit=(admit(1, bad, [0, 1]),), **prefill((1, 0, 3)))
    assert [e.row for e in steps.results[-1].row_errors] == [1]
    assert steps.run(**prefill((1, 3, 3))) == {}
    assert steps.results[-1].row_errors == ()


def test_logprobs_are_of_the_models_logits(make: Makers) -> None:
    sampling = replace(GREEDY, temperature=0.9, num_logprobs=4, top_k=5)
    steps = started(make())
    tokens = steps.run(
        admit=(admit(0, PROMPT, [0, 1, 2]), admit(1, OTHER, [3, 4], sampling=sampling)),
        raw_logits_rows=u32([1]),
        raw_logits_positions=u32([4]),
        **prefill((0, 0, 10), (1, 0, 4)),
    )
    result = steps.results[-1]
    logprobs = log_softmax(only(result.outputs, OutputKind.RAW_LOGITS).data)
    columns = result.logprobs
    assert columns.rows.tolist() == [1] and columns.top_counts.tolist() == [3]
    assert columns.chosen[0] == pytest.approx(logprobs[tokens[1]], abs=1e-5)
    best = np.argsort(-logprobs, kind="stable")[:3]
    assert columns.top_ids.tolist() == best.tolist()
    assert columns.top_logprobs == pytest.approx(logprobs[best], abs=1e-5)


def test_raw_logits_choose_the_greedy_token_in_every_kind_of_step(make: Makers) -> None:
    steps = started(make())
    tokens = steps.run(
        admit=(admit(3, PROMPT, [0, 1, 2, 3], admission_id=1003),),
        raw_logits_rows=u32([3]),
        raw_logits_positions=u32([10]),
        **prefill((3, 0, 10)),
    )
    output = only(steps.results[-1].outputs, OutputKind.RAW_LOGITS)
    assert (output.row, output.admission_id, output.position, output.count) == (3, 1003, 10, 1)
    assert int(np.frombuffer(output.data, "<f4").argmax()) == tokens[3]
    assert steps.results[-1].output_bytes == VOCAB * 4
    tokens = steps.run(decode_rows=u32([3]), raw_logits_rows=u32([3]), raw_logits_positions=u32([11]))
    output = only(steps.results[-1].outputs, OutputKind.RAW_LOGITS)
    assert output.position == 11
    assert int(np.frombuffer(output.data, "<f4").argmax()) == tokens[3]


def test_prompt_logprobs_are_the_same_in_chunks(make: Makers) -> None:
    sampling = replace(GREEDY, num_prompt_logprobs=3, prompt_logprobs_from=2)
    whole = started(make())
    whole.run(admit=(admit(0, PROMPT, [0, 1, 2], sampling=sampling),), **prefill((0, 0, 10)))
    once = only(whole.results[-1].outputs, OutputKind.PROMPT_LOGPROBS)
    assert (once.position, once.count, len(once.data)) == (2, 8, 8 * (4 + 2 * 8))
    pieces = started(make())
    outputs: list[Output] = []
    pieces.run(admit=(admit(4, PROMPT, [5, 6, 7], sampling=sampling),), **prefill((4, 0, 1)))
    assert pieces.results[-1].outputs == ()
    for start, count in ((1, 3), (4, 4), (8, 2)):
        pieces.run(**prefill((4, start, count)))
        outputs.extend(pieces.results[-1].outputs)
    assert [(o.position, o.count) for o in outputs] == [(2, 3), (5, 4), (9, 1)]
    got, want = records(b"".join(o.data for o in outputs)), records(once.data)
    if make.has_fixed_bits:
        assert got == pytest.approx(want, abs=1e-5)
    else:  # which token is second may hang on rounding, how likely the first and the second are does not
        assert logprobs_of(got) == pytest.approx(logprobs_of(want), abs=0.1)


def only(outputs: tuple[Output, ...], kind: OutputKind) -> Output:
    (output,) = [o for o in outputs if o.kind is kind]
    return output


def log_softmax(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    logits = np.frombuffer(data, "<f4").astype(np.float64)
    shifted: np.ndarray[tuple[int], np.dtype[np.float64]] = logits - logits.max()
    shifted -= np.log(np.exp(shifted).sum())
    return shifted


def logprobs_of(values: list[float]) -> list[float]:
    """Of `records`, without the ids."""
    return [value for at, value in enumerate(values) if at % 5 not in (1, 2)]


def records(data: bytes) -> list[float]:
    """Records of n = 3, flattened: chosen, two ids, two logprobs."""
    dtype = np.dtype([("chosen", "<f4"), ("ids", "<u4", 2), ("tops", "<f4", 2)])
    return [float(v) for r in np.frombuffer(data, dtype) for v in (r["chosen"], *r["ids"], *r["tops"])]
