"""`make` makes executors, of each kind in turn. FULL_CONTRACT=1 runs every test on every kind.

Else, of kernels in Triton's interpreter, which takes a second for what others do in a hundredth, a sample runs: those
tests that attention and the cache have a say in, and of one with parameters the first set.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import pytest

from executor_svc.environment import prepare_environment

prepare_environment("exact")

import torch  # noqa: E402

from executor_svc.runner import Runner  # noqa: E402
from executor_svc.step_executor import StepExecutor  # noqa: E402
from executor_svc.streams import Device  # noqa: E402
from tests.contract.driver import Request  # noqa: E402
from tests.contract.kinds import KINDS, RUNNERS, Kind, make_executor  # noqa: E402

torch.set_num_threads(1)

E = TypeVar("E", bound=StepExecutor)

INTERPRETED = {
    "test_an_executor_is_what_its_kind_says",
    "test_cached_blocks_stand_for_their_tokens",
    "test_copied_blocks_hold_what_the_source_held",
    "test_every_way_to_sample_is_in_the_graph",
    "test_padding_writes_nowhere",
    "test_prefill_and_decode_mix_in_one_step_in_any_rows",
    "test_row_errors_kill_one_row_until_it_is_released",
    "test_tokens_are_those_of_the_other_backends",
    "test_with_all_fences_lateness_changes_nothing",
}
INTERPRETED_EXACT = {"test_an_executor_is_what_its_kind_says", "test_tokens_are_those_of_the_other_backends"}

IS_FULL = os.environ.get("FULL_CONTRACT") == "1"


class Makers:
    """Makes executors of one kind and closes them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._made: list[StepExecutor] = []

    def __call__(self, *, nan_token: bool = False) -> StepExecutor:
        return self._kept(make_executor(self.name, nan_token=nan_token))

    @property
    def kind(self) -> Kind:
        """For tests whose `make` is one of RUNNERS."""
        return RUNNERS[self.name]

    def few(self, requests: list[Request]) -> list[Request]:
        """As many of them, and of their tokens, as there is patience for. Not the first: alone with a long prompt, one
        that is thrown out every third step would never get to its end."""
        if self.name not in RUNNERS or not self.kind.is_interpreted:
            return requests
        return [
            replace(request, sampling=replace(request.sampling, max_tokens=min(4, request.sampling.max_tokens)))
            for request in requests[1:4]
        ]

    @property
    def has_fixed_bits(self) -> bool:
        return self.name not in RUNNERS or self.kind.has_fixed_bits

    def runner(
        self,
        *,
        nan_token: bool = False,
        device: Device | None = None,
        depth: int = 4,
        buckets: tuple[int, ...] | None = None,
    ) -> Runner:
        """For tests whose `make` is one of RUNNERS."""
        return self._kept(self.kind.make(nan_token=nan_token, device=device, depth=depth, buckets=buckets))

    def close(self) -> None:
        for executor in self._made:
            executor.close()

    def _kept(self, executor: E) -> E:
        self._made.append(executor)
        return executor


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [] if IS_FULL else list(_beyond_sample(items))
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def _beyond_sample(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    seen: set[tuple[str, str]] = set()
    for item in items:
        call = getattr(item, "callspec", None)
        name = None if call is None else call.params.get("make")
        if not isinstance(name, str) or name not in RUNNERS:
            continue
        kind = RUNNERS[name]
        if not kind.is_interpreted:
            continue
        test = item.nodeid.partition("[")[0]
        if (test, name) in seen or not _is_in_sample(kind, test.rpartition("::")[2]):
            yield item
        seen.add((test, name))


def _is_in_sample(kind: Kind, test: str) -> bool:
    return test in (INTERPRETED_EXACT if kind.numerics == "exact" else INTERPRETED)


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.gpu if kind == "cuda" else ()) for kind in KINDS])
def make(request: pytest.FixtureRequest) -> Iterator[Makers]:
    makers = Makers(request.param)
    yield makers
    makers.close()
