"""Executors that compute in float32 have the one answer: each attention backend's tokens are every other's."""

from dataclasses import replace

import pytest

from common.messages import StepMode
from tests.contract.conftest import Makers
from tests.contract.driver import Driver, Options
from tests.contract.executors import tiny_runner
from tests.contract.kinds import RUNNERS
from tests.contract.plans import admit, prefill, started
from tests.contract.test_tokens_stand import GREEDY, SAMPLINGS, requests

FEW = [replace(request, sampling=replace(request.sampling, max_tokens=3)) for request in requests(GREEDY, count=3)]


IN_FLOAT32 = [name for name, kind in RUNNERS.items() if not kind.is_native]


@pytest.mark.parametrize("make", IN_FLOAT32, indirect=True)
def test_tokens_are_those_of_the_other_backends(make: Makers) -> None:
    """In another batch, in chunks, preempted, on blocks with a past."""
    plain = tiny_runner(num_layers=make.kind.num_layers)
    want = Driver(plain, Options(batch=1)).run(FEW)
    plain.close()
    assert Driver(make(), Options(depth=2, chunk=5, preempt_every=4, share=True, seed=5)).run(FEW) == want


@pytest.mark.parametrize("make", ["triton"], indirect=True)
def test_every_way_to_sample_is_in_the_graph(make: Makers) -> None:
    """Rows that want quite different things decode in one replay; each gets what it gets from torch's operators."""
    names = ("greedy", "filtered", "penalised", "masked")
    samplings = [replace(SAMPLINGS[name], max_tokens=4) for name in names]
    tokens = []
    for executor in (tiny_runner(numerics="fast", num_layers=make.kind.num_layers), make()):
        steps = started(executor)
        admits = tuple(
            admit(row, [4 + row, 9, 1], [2 * row, 2 * row + 1], sampling=sampling)
            for row, sampling in enumerate(samplings)
        )
        own = [steps.run(admit=admits, **prefill(*((row, 0, 3) for row in range(len(admits)))))]
        tokens.append([*own, *(steps.decode(*range(len(admits))) for _ in range(2))])
    assert tokens[0] == tokens[1]
    assert {result.mode for result in steps.results[1:]} == {StepMode.GRAPH}
