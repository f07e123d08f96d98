"""Copies of blocks, as forks use them: when a copy reads, what it overwrites, and against steps in flight."""

from dataclasses import replace

import pytest

from common.messages import Sampling, u32
from tests.contract.conftest import Makers
from tests.contract.executors import NAN_TOKEN
from tests.contract.plans import GREEDY, admit, prefill, started, tokens_of
from tests.contract.same_tokens import clear_tokens

# Two blocks of 4 and two tokens more; greedy tokens lie far apart with quantised weights too, see `clear_tokens`.
PROMPT = [31, 47, 51, 88, 39, 16, 61, 34, 10, 13]
SEEDED = replace(GREEDY, temperature=0.9)


def alone(make: Makers, count: int, seed: int = 1) -> list[int]:
    return clear_tokens(make, PROMPT, count, sampled(make, seed))


def sampled(make: Makers, seed: int = 1) -> Sampling:
    """Greedy where bits hang on the batch: a drawn token may be one of two too close to call."""
    return replace(SEEDED if make.has_fixed_bits else GREEDY, seed=seed)


def test_a_copy_sees_what_steps_in_flight_write_before_it(make: Makers) -> None:
    """Prompt, forks and decodes are all launched before the first result is looked at; the leader writes on in its
    block while its copies are made and used."""
    want = [alone(make, 4, seed) for seed in (1, 2, 3)]
    steps = started(make())
    sampling = [sampled(make, seed) for seed in (1, 2, 3)]
    pending = [steps.launch(admit=(admit(4, PROMPT, [9, 8, 7, 4], sampling=sampling[0]),), **prefill((4, 0, 10)))]
    pending.append(
        steps.launch(
            admit=(
                admit(2, PROMPT, [9, 8, 5, 3], computed_len=9, sampling=sampling[1]),
                admit(6, PROMPT, [9, 8, 6, 2], computed_len=9, sampling=sampling[2]),
            ),
            copy_sources=u32([7, 7]),
            copy_targets=u32([5, 6]),
            decode_rows=u32([4]),
            **prefill((2, 9, 1), (6, 9, 1)),
        )
    )
    pending += [steps.launch(decode_rows=u32([2, 4, 6])) for _ in range(2)]
    got = [tokens_of(step.wait()) for step in pending]
    assert [tokens[4] for tokens in got] == want[0]
    assert [tokens[2] for tokens in got[1:]] == want[1][:3]
    assert [tokens[6] for tokens in got[1:]] == want[2][:3]


def test_a_copy_comes_before_what_the_same_step_writes(make: Makers) -> None:
    """The leader leaves in the plan that forks it, and another row takes over the block that is copied."""
    want = alone(make, 3)
    other = [60, 61, 62]
    steps = started(make())
    steps.run(admit=(admit(0, PROMPT, [0, 1, 2], sampling=sampled(make)),), **prefill((0, 0, 10)))
    fork = admit(1, PROMPT, [0, 1, 5], computed_len=9, sampling=sampled(make))
    got = steps.run(
        release=u32([0]),
        admit=(fork, admit(3, other, [2, 6])),
        copy_sources=u32([2]),
        copy_targets=u32([5]),
        **prefill((1, 9, 1), (3, 0, 3)),
    )
    assert [got[1], steps.decode(1, 3)[1], steps.decode(1, 3)[1]] == want


def test_copies_follow_one_another(make: Makers) -> None:
    want = alone(make, 3)
    steps = started(make())
    steps.run(admit=(admit(0, PROMPT, [0, 1, 2], sampling=sampled(make)),), **prefill((0, 0, 10)))
    steps.run(copy_sources=u32([2, 12, 1]), copy_targets=u32([12, 11, 12]))
    fork = admit(1, PROMPT, [0, 12, 11], computed_len=9, sampling=sampled(make))
    got = steps.run(admit=(fork,), **prefill((1, 9, 1)))
    assert [got[1], steps.decode(1)[1], steps.decode(1)[1]] == want


def test_a_copy_covers_what_a_failed_row_left_behind(make: Makers) -> None:
    """Numbers that are not finite stay in no slot of the target, not even in those nobody reads."""
    want = alone(make, 3)
    steps = started(make(nan_token=True))
    steps.run(
        admit=(admit(0, PROMPT, [0, 1, 2], sampling=sampled(make)), admit(3, [8, NAN_TOKEN, 9, 4, 1, 6], [4, 5])),
        **prefill((0, 0, 10), (3, 0, 6)),
    )
    got = steps.run(
        release=u32([3]),
        admit=(admit(1, PROMPT, [0, 1, 4, 5], computed_len=9, sampling=sampled(make)),),
        copy_sources=u32([2]),
        copy_targets=u32([4]),
        **prefill((1, 9, 1)),
    )
    assert [got[1], steps.decode(1)[1], steps.decode(1)[1]] == want


@pytest.mark.parametrize("num_forks", [1, 7, 15])
def test_one_block_is_copied_to_many(make: Makers, num_forks: int) -> None:
    want = alone(make, 2)
    executor = make()
    num_forks = min(num_forks, executor.info.max_num_seqs - 1)
    steps = started(executor)
    steps.run(admit=(admit(0, PROMPT, [0, 1, 2], sampling=sampled(make)),), **prefill((0, 0, 10)))
    rows, blocks = range(1, num_forks + 1), range(3, num_forks + 3)
    got = steps.run(
        admit=tuple(
            admit(r, PROMPT, [0, 1, b], computed_len=9, sampling=sampled(make))
            for r, b in zip(rows, blocks, strict=True)
        ),
        copy_sources=u32([2] * num_forks),
        copy_targets=u32(blocks),
        **prefill(*((row, 9, 1) for row in rows)),
    )
    assert got == dict.fromkeys(rows, want[0])
    assert steps.decode(*rows) == dict.fromkeys(rows, want[1])


def test_a_leader_that_fails_later_takes_no_fork_with_it(make: Makers) -> None:
    """The leader's first token makes it compute numbers that are not finite, in the block that is copied after that."""
    want = alone(make, 3)
    steps = started(make(nan_token=True))
    doomed = replace(SEEDED, allowed_ids=(NAN_TOKEN,))
    pending = [steps.launch(admit=(admit(0, PROMPT, [0, 1, 2, 3], sampling=doomed),), **prefill((0, 0, 10)))]
    pending.append(steps.launch(decode_rows=u32([0])))
    fork = admit(1, PROMPT, [0, 1, 5], computed_len=9, sampling=sampled(make))
    pending.append(
        steps.launch(admit=(fork,), copy_sources=u32([2]), copy_targets=u32([5]), **prefill((1, 9, 1)))
    )  # fmt: skip
    results = [step.wait() for step in pending]
    assert [error.row for error in results[1].row_errors] == [0]
    assert not results[2].row_errors
    assert [tokens_of(results[2])[1], steps.decode(1)[1], steps.decode(1)[1]] == want
