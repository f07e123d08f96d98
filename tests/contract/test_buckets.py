"""Batch sizes around the edges of buckets: the bucket that runs, and that its padding touches nothing (vllm#43810)."""

import numpy as np
import pytest

from common.messages import StepMode, u32
from executor_svc.runner import Runner
from tests.contract.conftest import Makers
from tests.contract.executors import MAX_SEQS
from tests.contract.kinds import RUNNERS
from tests.contract.plans import GREEDY, Steps, admit, prefill, tokens_of

BUCKETS = (2, 4, 6)
EXPECTED = {1: 2, 2: 2, 3: 4, 4: 4, 5: 6, 6: 6, 7: 0, 8: 0}


# Each but one that differs from another in its buckets alone.
pytestmark = pytest.mark.parametrize("make", [kind for kind in RUNNERS if kind != "graphs"], indirect=True)


@pytest.fixture
def runners(make: Makers) -> tuple[Runner, Runner]:
    """With buckets, and without."""
    return make.runner(buckets=BUCKETS), make.runner(buckets=())


def prompts(count: int) -> list[list[int]]:
    return [[(7 * n + 3 * i) % 90 for i in range(2 + n % 5)] for n in range(count)]


def generate(
    runner: Runner, count: int, rows: list[int], temperature: float = 0.0
) -> tuple[list[dict[int, int]], Steps]:
    steps = Steps(runner)
    steps.begin()
    sampling = GREEDY if not temperature else type(GREEDY)(seed=9, max_tokens=30, temperature=temperature)
    todo = list(zip(rows, prompts(count), strict=True))
    admits = tuple(
        admit(row, tokens, [3 * n, 3 * n + 1, 3 * n + 2], sampling=sampling) for n, (row, tokens) in enumerate(todo)
    )
    chunks = prefill(*sorted((row, 0, len(tokens)) for row, tokens in todo))
    out = [steps.run(admit=admits, **chunks)]
    out += [steps.decode(*sorted(rows)) for _ in range(4)]
    return out, steps


@pytest.mark.parametrize("count", range(1, MAX_SEQS + 1))
def test_each_batch_size_around_the_edges(runners: tuple[Runner, Runner], count: int) -> None:
    rows = [5 * n + 1 for n in range(count)]
    padded, steps = generate(runners[0], count, rows)
    plain, plain_steps = generate(runners[1], count, rows)
    assert padded == plain
    modes = {(result.mode, result.bucket) for result in steps.results[1:]}
    bucket = EXPECTED[count]
    assert modes == {(StepMode.GRAPH if bucket else StepMode.EAGER, bucket)}
    assert {(r.mode, r.bucket) for r in plain_steps.results} == {(StepMode.EAGER, 0)}


@pytest.mark.parametrize("count", [1, 3, 5, 7])
def test_sampling_splits_the_graph_or_is_in_it(make: Makers, runners: tuple[Runner, Runner], count: int) -> None:
    """The kernels sample in the graph; torch's operators must be told by the host which rows want what."""
    rows = list(range(count))
    padded, steps = generate(runners[0], count, rows, temperature=0.9)
    assert padded == generate(runners[1], count, rows, temperature=0.9)[0]
    in_bucket = StepMode.GRAPH if make.kind.is_interpreted and make.kind.numerics == "fast" else StepMode.SPLIT
    assert {r.mode for r in steps.results[1:]} == {in_bucket if EXPECTED[count] else StepMode.EAGER}


def test_padding_writes_nowhere(runners: tuple[Runner, Runner]) -> None:
    """A decode step of three rows in a bucket of four changes three slots of the cache and three rows of state."""
    runner = runners[0]
    _, steps = generate(runner, 3, [0, 1, 2])
    cache, state = runner.cache, runner.state
    before = cache.data.clone()
    lengths, last = state.length.clone(), state.last_token.clone()
    steps.decode(0, 1, 2)
    changed = (
        (cache.data[:, :, : cache.num_blocks] != before[:, :, : cache.num_blocks]).flatten(4).any(-1).any(0).any(0)
    )
    assert int(changed.sum()) == 3
    assert not bool(cache.data[:, :, cache.null_block].any())
    assert (state.length - lengths).tolist() == [1, 1, 1] + [0] * (state.num_rows - 2)
    assert (state.last_token[3:] == last[3:]).all()
    assert int(state.length[state.pad_row]) == 1


def test_a_failed_row_is_padding_and_writes_nowhere(make: Makers) -> None:
    runner = make.runner(nan_token=True, buckets=BUCKETS)
    steps = Steps(runner)
    steps.begin()
    steps.run(
        admit=(admit(0, [96, 4], [0, 1]), admit(1, [3, 4], [2, 3])), **prefill((0, 0, 2), (1, 0, 2))
    )  # fmt: skip
    before = runner.cache.data[:, :, :2].float()
    result = steps.launch(decode_rows=u32([0, 1])).wait()
    assert list(tokens_of(result)) == [1] and result.row_errors == ()
    assert np.array_equal(runner.cache.data[:, :, :2].float().numpy(), before.numpy(), equal_nan=True)
