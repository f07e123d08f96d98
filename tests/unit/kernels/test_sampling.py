"""The sampling kernels choose the tokens, and leave the row state, of executor_svc/sampler.py."""

import dataclasses

import pytest
import torch

from common.messages import Sampling
from executor_svc.buffers import RowState
from executor_svc.build import make_device
from executor_svc.kernels.sampling import sample_step
from executor_svc.rows import RowNeeds, needs_of
from executor_svc.sampler import SamplePlan, commit, sample, seed_to_int64
from tests.interpreter import DEVICE

VOCAB = 300
FAILED, FINE, PADDING = 0, 1, 2

BASE = Sampling(seed=1, max_tokens=9, temperature=0.0)
SAMPLINGS = [
    BASE,
    dataclasses.replace(BASE, temperature=0.7, seed=2),
    dataclasses.replace(BASE, temperature=1.3, top_k=5, seed=(1 << 64) - 3),
    dataclasses.replace(BASE, temperature=1.0, top_k=1000, seed=4),
    dataclasses.replace(BASE, temperature=1.0, top_p=0.6, seed=5),
    dataclasses.replace(BASE, temperature=0.9, top_k=40, top_p=0.8, min_p=0.05, seed=6),
    dataclasses.replace(BASE, temperature=1.5, min_p=0.2, seed=7),
    dataclasses.replace(BASE, temperature=1.0, top_p=0.0, seed=8),
]
# Penalised or not, biased or not, too short to stop or not.
CHANGED = [
    BASE,
    dataclasses.replace(BASE, bias=((1, 0.5),)),
    dataclasses.replace(BASE, temperature=1.0, top_k=1000, bias=((1, 0.5),), seed=2),
    dataclasses.replace(BASE, temperature=1.0, top_p=0.9, min_tokens=100, seed=3),
    dataclasses.replace(BASE, min_tokens=2),
    dataclasses.replace(BASE, temperature=0.7, repetition_penalty=1.5, bias=((1, 0.5),), min_tokens=100, seed=5),
]
PENALISED = [
    dataclasses.replace(s, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3) for s in SAMPLINGS[:6]
]


def make_state(samplings: list[Sampling], vocab: int, *, penalties: bool) -> RowState:
    device = make_device(DEVICE.type)
    state = RowState(device, len(samplings) + 1, 4, 9, vocab)
    device.close()
    for row, s in enumerate(samplings):
        state.ints[row] = torch.tensor([seed_to_int64(s.seed), s.top_k])
        rest = [s.repetition_penalty, s.presence_penalty, s.frequency_penalty]
        state.floats[row] = torch.tensor([s.temperature, s.top_p, s.min_p, *rest])
        state.length[row] = 5 + row
        state.min_length[row] = s.min_tokens
        state.changes[row] = int(needs_of(s) & (RowNeeds.PENALTIES | RowNeeds.BIAS | RowNeeds.MIN_TOKENS))
    if any(needs_of(s) & (RowNeeds.BIAS | RowNeeds.MIN_TOKENS) for s in samplings):
        bias, stops = state.ensure_masks()
        generator = torch.Generator().manual_seed(4)
        bias.copy_(torch.randn(bias.shape, generator=generator) * 2)
        bias.masked_fill_(torch.rand(bias.shape, generator=generator).to(DEVICE) < 0.5, float("-inf"))
        stops.copy_(torch.rand(stops.shape, generator=generator) < 0.3)
    if penalties:
        counts, in_prompt = state.ensure_penalties()
        generator = torch.Generator().manual_seed(3)
        counts.copy_((torch.rand(counts.shape, generator=generator) < 0.1).int() * 2)
        in_prompt.copy_(torch.rand(in_prompt.shape, generator=generator) < 0.2)
    return state


def fields(state: RowState) -> dict[str, torch.Tensor]:
    """What both must leave alike: all of the rows, counts of those that have penalties."""
    real = {name: getattr(state, name)[: state.num_rows].cpu() for name in ("last_token", "length")}
    if state.output_counts is not None:
        penalised = (state.changes & int(RowNeeds.PENALTIES)) != 0
        real["output_counts"] = state.output_counts[penalised].cpu()
    return real


@pytest.mark.parametrize(
    ("kind", "repeat"), [("greedy", 0), ("random", 1), ("random", 2), ("penalised", 0), ("changed", 3)]
)
def test_tokens_and_state_are_the_samplers(kind: str, repeat: int) -> None:
    samplings = {"greedy": [BASE] * 4, "random": SAMPLINGS, "penalised": PENALISED, "changed": CHANGED}[kind]
    needs = RowNeeds.NONE
    for s in samplings:
        needs |= needs_of(s)
    penalties = bool(needs & RowNeeds.PENALTIES)
    mine, theirs = (make_state(samplings, VOCAB, penalties=penalties) for _ in range(2))
    rows = torch.randperm(len(samplings), generator=torch.Generator().manual_seed(repeat)).to(DEVICE)
    logits = (torch.randn(len(samplings), VOCAB, generator=torch.Generator().manual_seed(repeat)) * 3).to(DEVICE)
    logits[0, 40] = logits[0, 7] = 20.0  # the first of two equal ones
    filtered, masked = (
        torch.tensor([at for at, row in enumerate(rows.tolist()) if needs_of(samplings[row]) & wanted]).to(DEVICE)
        for wanted in (RowNeeds.FILTER, RowNeeds.BIAS | RowNeeds.MIN_TOKENS)
    )
    plan = SamplePlan(needs, filtered if len(filtered) else None, masked if len(masked) else None)
    want = sample(logits, rows, theirs, plan)
    commit(want, rows, theirs, plan)
    status = torch.full((len(samplings),), FINE, device=DEVICE)
    ring = torch.full((3, 2, 9), -7, device=DEVICE)
    tokens, out = sample_step(
        logits, rows, status, mine, is_random=bool(needs & RowNeeds.RANDOM), has_penalties=bool(int(needs) & 0b11100),
        out=(ring, torch.tensor([1], device=DEVICE)),
    )  # fmt: skip
    assert tokens.tolist() == want.tolist()
    assert (out == FINE).all()
    assert torch.equal(ring[1, :, : len(samplings)], torch.stack((tokens, out)))
    assert int((ring == -7).sum()) == ring.numel() - 2 * len(samplings)
    for name, value in fields(theirs).items():
        assert torch.equal(fields(mine)[name], value), name


def test_padding_keeps_its_state_and_failed_rows_die() -> None:
    state = make_state([BASE, SAMPLINGS[1], BASE], VOCAB, penalties=False)
    state.length[state.pad_row], state.last_token[state.pad_row] = 1, 0
    rows = torch.tensor([state.pad_row, 0, 1, state.pad_row, 2], device=DEVICE)
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    logits[1, 17], logits[2, 299] = torch.nan, torch.inf
    status = torch.tensor([PADDING, FINE, FINE, PADDING, FINE], device=DEVICE)
    tokens, out = sample_step(logits, rows, status, state, is_random=True, has_penalties=False)
    assert out.tolist() == [PADDING, FAILED, FAILED, PADDING, FINE]
    assert state.dead.tolist() == [1, 1, 0, 0, 0]
    assert (int(state.length[state.pad_row]), int(state.last_token[state.pad_row])) == (1, 0)
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
    assert tokens[4] == logits[4].argmax()


def test_a_large_vocabulary_in_parts() -> None:
    vocab = 9000
    state = make_state([BASE, SAMPLINGS[5]], vocab, penalties=False)
    theirs = make_state([BASE, SAMPLINGS[5]], vocab, penalties=False)
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    logits[0, 5000] = logits[0, 8999] = 9.0
    rows = torch.arange(2, device=DEVICE)
    plan = SamplePlan(needs_of(SAMPLINGS[5]), rows[1:])
    status = torch.full((2,), FINE, device=DEVICE)
    tokens, _ = sample_step(logits, rows, status, state, is_random=True, has_penalties=False)
    assert tokens.tolist() == sample(logits, rows, theirs, plan).tolist()
    assert tokens[0] == 5000
