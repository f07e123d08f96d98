"""One thread per operation, and the environment of exact numerics where torch is not loaded yet."""

from collections.abc import Iterator

import pytest

from executor_svc.environment import prepare_environment

prepare_environment("exact")

import torch  # noqa: E402

from executor_svc.step_executor import StepExecutor  # noqa: E402
from tests.contract.executors import KINDS, Maker  # noqa: E402

torch.set_num_threads(1)


class Makers:
    """Makes executors of one kind and closes them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._make = Maker(kind)
        self._made: list[StepExecutor] = []

    def __call__(self, *, nan_token: bool = False) -> StepExecutor:
        executor = self._make(nan_token=nan_token)
        self._made.append(executor)
        return executor

    def close(self) -> None:
        for executor in self._made:
            executor.close()


@pytest.fixture(params=[*KINDS, pytest.param("cuda", marks=pytest.mark.gpu)])
def make(request: pytest.FixtureRequest) -> Iterator[Makers]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    makers = Makers(request.param)
    yield makers
    makers.close()
