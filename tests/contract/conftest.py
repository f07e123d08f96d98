"""One thread per operation, and the environment of exact numerics where torch is not loaded yet."""

import os
from collections.abc import Iterator
from importlib.util import find_spec

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


# Triton's interpreter takes a tenth of a second for a launch, so the kernels on the CPU meet the part of the contract
# that attention and the cache have a say in. On a GPU they meet all of it, as "cuda".
INTERPRETED = {
    "test_prefill_and_decode_mix_in_one_step_in_any_rows",
    "test_copied_blocks_hold_what_the_source_held",
    "test_cached_blocks_stand_for_their_tokens",
    "test_row_errors_kill_one_row_until_it_is_released",
}


CAN_INTERPRET = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not _is_left_out(item)]


def _is_left_out(item: pytest.Item) -> bool:
    call = getattr(item, "callspec", None)
    return call is not None and call.params.get("make") == "triton" and item.originalname not in INTERPRETED  # type: ignore[attr-defined]


@pytest.fixture(params=[*KINDS, pytest.param("cuda", marks=pytest.mark.gpu)])
def make(request: pytest.FixtureRequest) -> Iterator[Makers]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if request.param == "triton" and not CAN_INTERPRET:
        pytest.skip("needs Triton's interpreter")
    makers = Makers(request.param)
    yield makers
    makers.close()
