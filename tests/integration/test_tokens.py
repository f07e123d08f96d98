"""The tokens themselves: what `numerics=exact` promises, on the real model, with the real scheduler core and runner.

Hugging Face transformers in float32 is the judge of greedy tokens: twenty prompts, 64 tokens each, of the two long ones
16. Among our own configurations nothing may differ by a single token, greedy or seeded; that part runs on a sample of
the prompts, for fewer tokens. FULL_TOKENS=1: all prompts, 64 tokens, everywhere.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch

from common.messages import Sampling
from executor_svc.build import build_runner, make_device
from executor_svc.loader.load import load_model
from executor_svc.models.decoder import Decoder
from executor_svc.numerics import ExactOps, Products
from executor_svc.runner import Runner
from scheduler_svc.choice_seed import choice_seed
from scheduler_svc.tokenizer import load_tokenizer
from tests.integration.offline import Generation, Request, generate
from tests.integration.prompts import PROMPTS
from tests.reference import default_files, greedy_differences

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1800)]

FULL = os.environ.get("FULL_TOKENS") == "1"
NUM_TOKENS = 64
# Beside a long context the rows of all others are padded to it: each of its tokens costs as much as several of theirs.
LONG = (18, 19)
LONG_TOKENS = NUM_TOKENS if FULL else 16
# Of the sample: short, a list, code, Chinese, Arabic, emoji, a letter, and one of the long ones.
SAMPLE = tuple(range(len(PROMPTS))) if FULL else (0, 3, 5, 11, 14, 16, 17, 18)
SAMPLE_TOKENS = NUM_TOKENS if FULL else 12
SAMPLE_LONG_TOKENS = NUM_TOKENS if FULL else 4
CONTEXT = 1024
GREEDY = Sampling(seed=1, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
SEEDED = Sampling(seed=11, max_tokens=NUM_TOKENS, temperature=0.9, top_k=50, top_p=0.95, min_p=0.02, ignore_eos=True)


class SettledOnce(ExactOps):
    """Chooses its products for the first runner; the others are of the same model."""

    def __init__(self) -> None:
        super().__init__()
        self._shapes: set[tuple[int, int]] = set()

    def settle(self, shapes: Iterable[tuple[int, int]], device: torch.device) -> Products:
        wanted = set(shapes)
        if wanted != self._shapes:
            super().settle(wanted, device)
            self._shapes = wanted
        return self.products


@cache
def exact_model() -> tuple[Decoder, ExactOps]:
    ops = SettledOnce()
    files = default_files()
    return load_model(files, dtype=torch.float32, device=torch.device("cpu"), ops=ops, max_positions=CONTEXT), ops


@cache
def prompt_ids() -> tuple[tuple[int, ...], ...]:
    tokenizer = load_tokenizer(default_files())
    assert tokenizer is not None
    return tuple(tuple(tokenizer.encode(text)) for text in PROMPTS)


@cache
def sample() -> tuple[Request, ...]:
    """Every prompt of the sample twice: greedy, and with a seed of its own."""
    return tuple(
        (
            prompt_ids()[i],
            replace(sampling, seed=sampling.seed + i, max_tokens=SAMPLE_LONG_TOKENS if i in LONG else SAMPLE_TOKENS),
        )
        for i in SAMPLE
        for sampling in (GREEDY, SEEDED)
    )


def exact_runner(block_size: int = 16, num_blocks: int = 0) -> Runner:
    model, ops = exact_model()
    return build_runner(
        model,
        ops=ops,
        device=make_device("cpu"),
        block_size=block_size,
        num_blocks=num_blocks or 24 * CONTEXT // block_size,
        max_num_seqs=16,
        max_tokens_per_step=1024,
        max_context=CONTEXT,
        eos_ids=default_files().description.eos_ids,
    )


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """One executor for all tests that need no other shape; each leaves it drained."""
    runner = exact_runner()
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def wanted(runner: Runner) -> Generation:
    """Every request of the sample, sixteen at once: the tokens that everything else must repeat."""
    got = generate(runner, sample(), depth=2, prefill_chunk=0, prefix_cache=False)
    assert got.most_sequences == 16
    return got


def test_tokens_are_those_of_transformers(
    runner: Runner, wanted: Generation, capsys: pytest.CaptureFixture[str]
) -> None:
    """All twenty prompts, greedy, sixteen at once. Those of the sample begin alike, and the longest also in chunks."""
    counts = [LONG_TOKENS if i in LONG else NUM_TOKENS for i in range(len(PROMPTS))]
    requests = [(ids, replace(GREEDY, max_tokens=count)) for ids, count in zip(prompt_ids(), counts, strict=True)]
    together = generate(runner, requests)
    assert together.most_sequences == 16
    near_ties = 0
    for ids, tokens, count in zip(prompt_ids(), together.tokens, counts, strict=True):
        assert len(tokens) == count
        differences = greedy_differences(ids, tokens)
        assert all(d.is_near_tie for d in differences), differences
        near_ties += len(differences)
    for i, tokens in zip(SAMPLE, wanted.tokens[::2], strict=True):
        assert tokens == together.tokens[i][: len(tokens)]
    longest = (prompt_ids()[-1], replace(GREEDY, max_tokens=3))
    assert generate(runner, [longest], prefill_chunk=64).tokens == (together.tokens[-1][:3],)
    with capsys.disabled():
        told = f"{len(PROMPTS)} prompts, {sum(counts)} tokens"
        sys.stdout.write(f"\n{told}: {near_ties} differences from transformers, all near-ties\n")


def test_one_at_a_time_and_sixteen_at_once_are_the_same(runner: Runner, wanted: Generation) -> None:
    """Unless FULL_TOKENS=1 every prompt is alone once, greedy and seeded by turns."""
    picked = range(len(sample())) if FULL else [2 * i + i % 2 for i in range(len(SAMPLE))]
    alone = generate(runner, [sample()[i] for i in picked], at_once=1, depth=1, prefix_cache=False)
    assert alone.most_sequences == 1
    assert alone.tokens == tuple(wanted.tokens[i] for i in picked)


@pytest.mark.parametrize(
    ("depth", "prefill_chunk", "prefix_cache"),
    [(2, 64, True), (4, 16, True), (1, 64, False)],
)
def test_chunks_depth_and_cache_change_nothing(
    runner: Runner, wanted: Generation, depth: int, prefill_chunk: int, prefix_cache: bool
) -> None:
    got = generate(runner, sample(), depth=depth, prefill_chunk=prefill_chunk, prefix_cache=prefix_cache)
    assert got.most_sequences == 16
    assert got.tokens == wanted.tokens


def test_a_warm_prefix_cache_changes_nothing(runner: Runner, wanted: Generation) -> None:
    """The second half finds the blocks that the first half, the same requests, has left behind. Of the sample the last
    eight, the long prompt among them."""
    again = sample() if FULL else sample()[-8:]
    got = generate(runner, [*again, *again], at_once=min(16, len(again)))
    assert got.cached_tokens > 0
    assert got.tokens == wanted.tokens[-len(again) :] * 2


def test_block_size_changes_nothing(wanted: Generation) -> None:
    runner = exact_runner(block_size=8)
    try:
        assert generate(runner, sample(), prefill_chunk=16).tokens == wanted.tokens
    finally:
        runner.close()


def test_forced_preemption_changes_nothing(wanted: Generation) -> None:
    longest = max(len(ids) + sampling.max_tokens for ids, sampling in sample())
    # So few tokens fill few blocks of 16: nobody would be in anybody's way.
    block_size, others = (16, 4) if FULL else (4, 28)
    runner = exact_runner(block_size=block_size, num_blocks=-(-longest // block_size) + others)
    try:
        got = generate(runner, sample())
    finally:
        runner.close()
    assert got.preemptions > 0
    assert got.tokens == wanted.tokens


def test_an_executor_lost_in_the_middle_changes_nothing(runner: Runner, wanted: Generation) -> None:
    assert generate(runner, sample(), lose_executor_after=SAMPLE_TOKENS // 2).tokens == wanted.tokens


@pytest.fixture(scope="module")
def choices_apart(runner: Runner) -> tuple[list[Request], Generation]:
    """Three prompts, seeded, and for each three requests of their own with the seeds its choices would have."""
    requests = [(ids, replace(sampling, max_tokens=8)) for ids, sampling in (sample()[3], sample()[5], sample()[-1])]
    apart = [(ids, replace(s, seed=choice_seed(s.seed, k))) for ids, s in requests for k in range(3)]
    return requests, generate(runner, apart, at_once=1 if FULL else 16, depth=1, prefix_cache=False)


@pytest.mark.parametrize(("prefix_cache", "prefill_chunk"), [(True, 0), (False, 16)])
def test_choices_of_one_request_are_those_of_requests_with_their_seeds(
    runner: Runner, choices_apart: tuple[list[Request], Generation], prefix_cache: bool, prefill_chunk: int
) -> None:
    """Forked choices read shared blocks and a copied one; their tokens tell nothing of it."""
    requests, apart = choices_apart
    got = generate(runner, requests, num_choices=3, prefix_cache=prefix_cache, prefill_chunk=prefill_chunk)
    assert got.tokens == apart.tokens
    assert len(set(got.tokens)) > len(requests), "choices differ"
