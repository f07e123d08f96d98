"""The kernels of backend "triton" in whole runs, small enough for Triton's interpreter."""

from dataclasses import replace

import pytest

from common.messages import StepMode
from tests.contract.conftest import CAN_INTERPRET
from tests.contract.driver import Driver, Options
from tests.contract.executors import Maker
from tests.contract.plans import admit, prefill, started
from tests.contract.test_tokens_stand import GREEDY, SAMPLINGS, requests

FEW = [replace(request, sampling=replace(request.sampling, max_tokens=3)) for request in requests(GREEDY, count=3)]


@pytest.mark.skipif(not CAN_INTERPRET, reason="needs Triton's interpreter")
@pytest.mark.parametrize("kind", ["triton", "triton exact"])
def test_tokens_are_those_of_the_other_backends(kind: str) -> None:
    """In another batch, in chunks, preempted, on blocks with a past; both numerics have the one answer here."""
    plain = Maker("exact")()
    want = Driver(plain, Options(batch=1)).run(FEW)
    plain.close()
    executor = Maker(kind)()
    assert Driver(executor, Options(depth=2, chunk=5, preempt_every=4, share=True, seed=5)).run(FEW) == want
    executor.close()


@pytest.mark.skipif(not CAN_INTERPRET, reason="needs Triton's interpreter")
def test_every_way_to_sample_is_in_the_graph() -> None:
    """Rows that want quite different things decode in one replay; each gets what it gets from torch's operators."""
    names = ("greedy", "filtered", "penalised", "masked")
    samplings = [replace(SAMPLINGS[name], max_tokens=4) for name in names]
    tokens = {}
    for kind in ("fast", "triton"):
        executor = Maker(kind)()
        steps = started(executor)
        admits = tuple(
            admit(row, [4 + row, 9, 1], [2 * row, 2 * row + 1], sampling=sampling)
            for row, sampling in enumerate(samplings)
        )
        tokens[kind] = [steps.run(admit=admits, **prefill(*((row, 0, 3) for row in range(len(admits)))))]
        tokens[kind] += [steps.decode(*range(len(admits))) for _ in range(2)]
        modes = {result.mode for result in steps.results[1:]}
        executor.close()
    assert tokens["triton"] == tokens["fast"]
    assert modes == {StepMode.GRAPH}
