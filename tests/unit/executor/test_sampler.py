"""Sampling on its own: each rule against the plainest way to say it, each row apart from its company."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import Sampling
from executor_svc.buffers import RowState
from executor_svc.cpu_device import CpuDevice
from executor_svc.rows import RowNeeds, needs_of
from executor_svc.sampler import (
    PURPOSE_SAMPLE,
    SamplePlan,
    commit,
    sample,
    seed_to_int64,
    top_logprobs,
    uniform,
)

VOCAB = 50


def splitmix(seed: int, position: int, purpose: int) -> float:
    """The same numbers with Python's integers."""
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    stream = mix((seed + 0xD1B54A32D192ED03 * (purpose + 1)) & mask)
    return (mix((stream + (position + 1) * 0x9E3779B97F4A7C15) & mask) >> 11) / (1 << 53)


class Rows:
    """Row state for samplings given in order, each row `length` long."""

    def __init__(self, samplings: list[Sampling], lengths: list[int] | None = None) -> None:
        device = CpuDevice(threads=1)
        self.state = RowState(device, len(samplings), 4, 9, VOCAB)
        device.close()
        self.samplings = samplings
        self.needs = RowNeeds.NONE
        for row, s in enumerate(samplings):
            self.needs |= needs_of(s) & ~RowNeeds.MIN_TOKENS
            self.state.ints[row] = torch.tensor([seed_to_int64(s.seed), s.top_k])
            penalties = [s.repetition_penalty, s.presence_penalty, s.frequency_penalty]
            self.state.floats[row] = torch.tensor([s.temperature, s.top_p, s.min_p, *penalties])
            self.state.length[row] = lengths[row] if lengths else 5

    def draw(
        self, logits: torch.Tensor, rows: list[int] | None = None, masked: torch.Tensor | None = None
    ) -> list[int]:
        which = torch.tensor(rows if rows is not None else list(range(len(logits))))
        chosen: list[int] = sample(logits, which, self.state, self.plan(which.tolist(), masked)).tolist()
        return chosen

    def plan(self, rows: list[int], masked: torch.Tensor | None = None) -> SamplePlan:
        filtered = [at for at, row in enumerate(rows) if needs_of(self.samplings[row]) & RowNeeds.FILTER]
        return SamplePlan(self.needs, torch.tensor(filtered) if filtered else None, masked)


def logits_for(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


@given(
    seed=st.integers(0, (1 << 64) - 1),
    position=st.integers(0, 1 << 20),
    purpose=st.integers(0, 5),
)  # fmt: skip
def test_uniform_is_the_documented_function(seed: int, position: int, purpose: int) -> None:
    got = uniform(torch.tensor([seed_to_int64(seed)]), torch.tensor([position]), purpose)
    assert got.dtype is torch.float64
    assert float(got) == splitmix(seed, position, purpose)


def test_uniform_is_uniform_over_positions_and_over_seeds() -> None:
    many = torch.arange(20_000)
    for draws in (
        uniform(torch.full_like(many, 7), many, PURPOSE_SAMPLE),
        uniform(many, torch.full_like(many, 7), PURPOSE_SAMPLE),
    ):
        counts = torch.histc(draws.float(), 20, 0, 1)
        assert float(((counts - 1000) ** 2 / 1000).sum()) < 50  # chi-square, 19 degrees: 50 is passed once in 10^4


def test_frequencies_are_the_probabilities() -> None:
    logits = logits_for(1)[:, :8].repeat(20_000, 1)
    samplings = [Sampling(seed=1, max_tokens=9, temperature=0.7)]
    rows = Rows(samplings)
    # One row at many positions: draws differ by position alone.
    state = rows.state
    draws = []
    for position in range(200):
        state.length[0] = position
        draws += rows.draw(logits[:1])
    counts = np.bincount(draws, minlength=8)
    expected = (logits[0] / 0.7).softmax(-1).numpy() * 200
    assert float((((counts - expected) ** 2) / expected).sum()) < 30  # chi-square, 7 degrees


def test_greedy_takes_the_first_of_the_best() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 30]] = 3.0
    assert Rows([Sampling(seed=1, max_tokens=1, temperature=0.0)]).draw(logits) == [7]


@settings(deadline=None, max_examples=60)
@given(
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 1 << 32),
)
def test_filters_keep_what_they_say(temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> None:
    logits = logits_for(1, seed % 7)
    sampling = Sampling(seed=seed, max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    (token,) = Rows([sampling]).draw(logits)
    scaled = logits[0].double() / temperature
    order = sorted(range(VOCAB), key=lambda i: -float(scaled[i]))
    rank = order.index(token)
    assert not top_k or rank < top_k
    kept = order[: top_k or VOCAB]
    weights = [math.exp(float(scaled[i] - scaled[order[0]])) for i in kept]
    before = sum(weights[:rank]) / sum(weights)
    assert rank == 0 or before < top_p + 1e-5
    assert weights[rank] >= min_p - 1e-5


def test_a_rows_token_does_not_depend_on_its_company() -> None:
    samplings = [
        Sampling(seed=n, max_tokens=9, temperature=0.3 * (n % 4), top_k=(0, 5)[n % 2], top_p=(1.0, 0.8)[n % 3 == 0])
        for n in range(12)
    ]
    rows = Rows(samplings, lengths=list(range(3, 15)))
    logits = logits_for(12)
    together = rows.draw(logits)
    for count in (1, 2, 5, 11):
        for first in range(0, 12 - count, 3):
            which = list(range(first, first + count))
            assert rows.draw(logits[first : first + count], which) == together[first : first + count]
    # Alone, with no more than its own needs.
    for row, sampling in enumerate(samplings):
        rows.needs = needs_of(sampling)
        alone = rows.plan([row])
        assert sample(logits[row : row + 1], torch.tensor([row]), rows.state, alone).tolist() == [together[row]]


def test_penalties_are_those_of_the_definition() -> None:
    sampling = Sampling(
        seed=1, max_tokens=9, temperature=0.0, repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.5
    )
    rows = Rows([sampling])
    counts, in_prompt = rows.state.ensure_penalties()
    counts[0, 4], counts[0, 9], in_prompt[0, 11] = 3, 1, True
    logits = logits_for(1)
    expected = logits[0].clone()
    for token in (4, 9, 11):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    expected[4] -= 3 * 0.5 + 0.25
    expected[9] -= 0.5 + 0.25
    for token in (4, 9, 11, 20):
        # Whoever is lifted just over the rest is chosen, just under is not.
        for lift, wins in ((1e-3, True), (-1e-3, False)):
            raised = logits.clone()
            others = expected.clone()
            others[token] = -math.inf
            factor = {4: (1.5, 1.75), 9: (1.5, 0.75), 11: (1.5, 0.0)}.get(token, (1.0, 0.0))
            target = float(others.max()) + lift + factor[1]
            raised[0, token] = target * factor[0] if target > 0 else target / factor[0]
            assert (rows.draw(raised) == [token]) is wins


def test_sampled_tokens_count_for_penalties_and_become_the_last_token() -> None:
    rows = Rows([Sampling(seed=1, max_tokens=9, frequency_penalty=0.5), Sampling(seed=2, max_tokens=9)])
    counts, _ = rows.state.ensure_penalties()
    commit(torch.tensor([7, 8, 0]), torch.tensor([0, 1, 2]), rows.state, SamplePlan(rows.needs))
    assert counts[0, 7] == 1 and counts[0].sum() == 1
    assert rows.state.last_token.tolist() == [7, 8, 0]
    assert rows.state.length.tolist() == [6, 6, 1]


def test_bias_allowed_ids_and_masked_stops() -> None:
    rows = Rows([Sampling(seed=1, max_tokens=9, temperature=0.0)] * 2)
    state = rows.state
    bias, stops = state.ensure_masks()
    logits = torch.zeros(2, VOCAB)
    logits[:, 3], logits[:, 5] = 2.0, 1.0
    before = logits.clone()
    masked = torch.tensor([1])
    state.changes[1] = int(RowNeeds.BIAS)
    bias[:, 5] = 1.5
    assert rows.draw(logits, masked=masked) == [3, 5], "only the row that has a bias"
    bias[:] = -torch.inf
    bias[:, [5, 9]] = 0.0
    assert rows.draw(logits, masked=masked) == [3, 5]
    state.changes[1] = int(RowNeeds.MIN_TOKENS)
    stops[:, 3] = True
    state.min_length[:] = 6
    assert rows.draw(logits, masked=masked) == [3, 5], "a row that is too short"
    state.length[1] = 6
    assert rows.draw(logits, masked=masked) == [3, 3]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("num_top", [0, 3])
def test_top_logprobs(num_top: int) -> None:
    logits = logits_for(2)
    chosen, ids, values = top_logprobs(logits, torch.tensor([4, 9]), num_top)
    expected = logits.double().log_softmax(-1)
    assert chosen.tolist() == pytest.approx([float(expected[0, 4]), float(expected[1, 9])], abs=1e-5)
    assert ids.shape == values.shape == (2, num_top)
    if num_top:
        assert ids[0].tolist() == expected[0].argsort(descending=True)[:3].tolist()


@pytest.mark.parametrize("top_p", [0.5, 0.999, 1.0])
@pytest.mark.parametrize("top_k", [0, 3, 700])
def test_how_many_logits_are_put_in_order_does_not_matter(top_p: float, top_k: int) -> None:
    """Flat logits need more than the few best, peaked ones do not; each row alone and both together agree."""
    vocab = 2000
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(3)) * torch.tensor([[0.01], [4.0]])
    logits = (logits * 8).round() / 8  # with many ties
    sampling = Sampling(seed=5, max_tokens=9, temperature=1.0, top_k=top_k, top_p=top_p, min_p=0.0001)
    rows = Rows([sampling, sampling])
    for length in range(40):
        rows.state.length[:2] = length
        both = rows.draw(logits)
        assert both == [rows.draw(logits[:1], [0])[0], rows.draw(logits[1:], [1])[0]]
        for row, token in enumerate(both):
            ordered = logits[row].sort(descending=True).values
            assert not top_k or logits[row, token] >= ordered[top_k - 1]
