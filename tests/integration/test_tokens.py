"""The tokens themselves: what `numerics=exact` promises, on the real model, with the real scheduler core and runner.

Twenty prompts, 64 greedy tokens each. Hugging Face transformers in float32 is the judge; among our own configurations
nothing may differ by a single token.
"""

import sys
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from common.messages import Sampling
from executor_svc.build import build_runner, make_device, make_ops
from executor_svc.loader.load import load_model
from executor_svc.models.decoder import Decoder
from executor_svc.numerics import ExactOps, FastOps
from executor_svc.runner import Runner
from scheduler_svc.tokenizer import load_tokenizer
from tests.integration.offline import Generation, generate
from tests.integration.prompts import PROMPTS
from tests.reference import default_files, greedy_differences

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_TOKENS = 64
GREEDY = Sampling(seed=1, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
SEEDED = Sampling(seed=11, max_tokens=NUM_TOKENS, temperature=0.9, top_k=50, top_p=0.95, min_p=0.02, ignore_eos=True)
CONTEXT = 1024


@cache
def exact_model() -> tuple[Decoder, FastOps | ExactOps]:
    ops = make_ops("exact")
    files = default_files()
    return load_model(files, dtype=torch.float32, device=torch.device("cpu"), ops=ops, max_positions=CONTEXT), ops


@cache
def prompt_ids() -> tuple[tuple[int, ...], ...]:
    tokenizer = load_tokenizer(default_files())
    assert tokenizer is not None
    return tuple(tuple(tokenizer.encode(text)) for text in PROMPTS)


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
def alone(runner: Runner) -> Generation:
    """Every prompt on its own: the tokens everything else must repeat."""
    return generate(runner, prompt_ids(), GREEDY, at_once=1, depth=1, prefix_cache=False)


@pytest.fixture(scope="module")
def alone_seeded(runner: Runner) -> Generation:
    """The same with seeded sampling."""
    return generate(runner, prompt_ids(), SEEDED, at_once=1, depth=1, prefix_cache=False)


def test_tokens_are_those_of_transformers(alone: Generation, capsys: pytest.CaptureFixture[str]) -> None:
    near_ties = 0
    for ids, tokens in zip(prompt_ids(), alone.tokens, strict=True):
        assert len(tokens) == NUM_TOKENS
        differences = greedy_differences(ids, tokens)
        assert all(d.is_near_tie for d in differences), differences
        near_ties += len(differences)
    with capsys.disabled():
        count = f"{len(PROMPTS)} prompts x {NUM_TOKENS} tokens"
        sys.stdout.write(f"\n{count}: {near_ties} differences from transformers, all near-ties\n")


@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
@pytest.mark.parametrize(
    ("depth", "prefill_chunk", "prefix_cache"),
    [(2, 0, False), (2, 64, True), (4, 16, True), (1, 64, False)],
)
def test_sixteen_at_once_change_nothing(
    runner: Runner,
    request: pytest.FixtureRequest,
    sampling: str,
    depth: int,
    prefill_chunk: int,
    prefix_cache: bool,
) -> None:
    expected: Generation = request.getfixturevalue("alone" if sampling == "greedy" else "alone_seeded")
    wanted = GREEDY if sampling == "greedy" else SEEDED
    got = generate(runner, prompt_ids(), wanted, depth=depth, prefill_chunk=prefill_chunk, prefix_cache=prefix_cache)
    assert got.most_sequences == 16
    assert got.tokens == expected.tokens


def test_a_warm_prefix_cache_changes_nothing(runner: Runner, alone: Generation) -> None:
    twice = generate(runner, prompt_ids() * 2, GREEDY, at_once=20)
    assert twice.cached_tokens > 0
    assert twice.tokens == alone.tokens * 2


def test_block_size_changes_nothing(alone: Generation, alone_seeded: Generation) -> None:
    runner = exact_runner(block_size=8)
    try:
        assert generate(runner, prompt_ids(), GREEDY).tokens == alone.tokens
        assert generate(runner, prompt_ids(), SEEDED, prefill_chunk=16).tokens == alone_seeded.tokens
    finally:
        runner.close()


@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
def test_forced_preemption_changes_nothing(request: pytest.FixtureRequest, sampling: str) -> None:
    expected: Generation = request.getfixturevalue("alone" if sampling == "greedy" else "alone_seeded")
    wanted = GREEDY if sampling == "greedy" else SEEDED
    longest = max(map(len, prompt_ids())) + NUM_TOKENS
    runner = exact_runner(num_blocks=-(-longest // 16) + 4)
    try:
        got = generate(runner, prompt_ids(), wanted)
    finally:
        runner.close()
    assert got.preemptions > 0
    assert got.tokens == expected.tokens


@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
def test_an_executor_lost_in_the_middle_changes_nothing(
    runner: Runner, request: pytest.FixtureRequest, sampling: str
) -> None:
    expected: Generation = request.getfixturevalue("alone" if sampling == "greedy" else "alone_seeded")
    wanted = GREEDY if sampling == "greedy" else SEEDED
    assert generate(runner, prompt_ids(), wanted, lose_executor_after=30).tokens == expected.tokens
