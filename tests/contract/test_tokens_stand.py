"""The same tokens whatever the way to them: company, chunks, depth, preemption, late tokens, shared blocks."""

import random
from dataclasses import replace

import pytest

from common.messages import Sampling
from tests.contract.conftest import Makers
from tests.contract.driver import Driver, Options, Request
from tests.contract.executors import VOCAB
from tests.contract.same_tokens import assert_tokens_stand

GREEDY = Sampling(seed=1, max_tokens=9, temperature=0.0, ignore_eos=True)


def requests(sampling: Sampling, *, count: int = 7, seed: int = 3) -> list[Request]:
    """Prompts of 1 to 20 tokens, some with a common beginning, arriving over time."""
    rng = random.Random(seed)
    common = tuple(rng.randrange(VOCAB - 1) for _ in range(9))
    made = []
    for number in range(count):
        own = tuple(rng.randrange(VOCAB - 1) for _ in range(rng.randrange(1, 12)))
        prompt = common + own if number % 2 else own
        made.append(Request(prompt, replace(sampling, seed=sampling.seed + number), arrives=number))
    return made


WAYS = {
    "pipelined": Options(depth=2),
    "deep": Options(depth=4, chunk=5),
    "chunks of 1": Options(chunk=1),
    "chunks of 7": Options(depth=2, chunk=7),
    "two at once": Options(depth=2, batch=2),
    "preempted": Options(depth=2, preempt_every=4, seed=5),
    "preempted, deep": Options(depth=4, preempt_every=3, chunk=6, seed=6),
    "late tokens": Options(depth=2, piece=1, chunk=3),
    "shared blocks": Options(depth=3, share=True, preempt_every=7),
}


SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": replace(GREEDY, temperature=0.8),
    "filtered": replace(GREEDY, temperature=1.1, top_k=20, top_p=0.9, min_p=0.02),
    "penalised": replace(
        GREEDY, temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3
    ),
    "masked": replace(
        GREEDY, temperature=0.9, min_tokens=4, stop_ids=(5, 7), ignore_eos=False, bias=((3, 2.0), (8, -3.0)),
        allowed_ids=tuple(range(2, 40)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_stand(make: Makers, way: str) -> None:
    wanted = make.few(requests(GREEDY))
    alone = assert_tokens_stand(make, [WAYS[way]], wanted)
    assert [len(tokens) for tokens in alone] == [request.sampling.max_tokens for request in wanted]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampled_tokens_stand(make: Makers, name: str) -> None:
    ways = [WAYS[way] for way in ("deep", "preempted", "late tokens")]
    assert_tokens_stand(make, ways, make.few(requests(SAMPLINGS[name])))


def test_samplings_differ_and_seeds_count(make: Makers) -> None:
    seeded = replace(GREEDY, temperature=1.0)

    def tokens(sampling: Sampling) -> list[list[int]]:
        return Driver(make(), Options()).run(make.few(requests(sampling)))

    first = tokens(seeded)
    assert first == tokens(seeded)
    assert first != tokens(replace(seeded, seed=1000))
    assert first != tokens(GREEDY)


def test_randomness_hangs_on_seed_and_position_not_on_row_or_step(make: Makers) -> None:
    """The same request twice in one batch, at other times and in other rows: the same tokens."""
    seeded = replace(GREEDY, temperature=1.0, seed=77)
    twins = [Request((4, 9, 1), seeded, arrives=at) for at in (0, 0, 3, 5)]
    tokens = Driver(make(), Options(depth=2)).run(make.few(twins))
    assert all(own == tokens[0] for own in tokens)


def test_min_tokens_and_allowed_ids_are_kept(make: Makers) -> None:
    masked = SAMPLINGS["masked"]
    for tokens in Driver(make(), Options(depth=2)).run(make.few(requests(masked))):
        assert not {2, 5, 7} & set(tokens[:4])
        assert set(tokens) <= set(masked.allowed_ids)


def test_one_executor_serves_epoch_after_epoch(make: Makers) -> None:
    executor, wanted = make(), make.few(requests(GREEDY))
    way = Options(depth=3, chunk=4, seed=9)
    first = Driver(executor, Options(depth=2), epoch=1).run(wanted)
    second = Driver(executor, way, epoch=2).run(wanted)
    # Where bits hang on the batch, an executor that has served nothing yet says what the second epoch should give.
    assert second == (first if make.has_fixed_bits else Driver(make(), way).run(wanted))
