"""What is built for AVX-512, without tile registers, on any processor with AVX2: what instructions it lacks are written
out (emulated/immintrin.h). A machine that has them runs the same through them, in test_step."""

from pathlib import Path

import pytest

from executor_svc.kernels_cpu.compile import LEVELS, Level, build, find_compiler
from executor_svc.kernels_cpu.library import Library
from executor_svc.kernels_cpu.packing import Format
from tests.unit.kernels_cpu import scene
from tests.unit.kernels_cpu.test_step import CASES, check_logits, check_products

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Skips where no kernels can be built or run."""
    scene.kernels()
    lowest = LEVELS[-1]
    level = Level("emulated", (*lowest.options, "-O1", f"-I{Path(__file__).with_name('emulated')}"), lowest.needs)
    path = tmp_path_factory.mktemp("emulated") / "step.so"
    build(find_compiler(), level, path)
    library = Library(path)
    assert library.instructions == "AVX-512"
    return library


@pytest.fixture(autouse=True)
def in_place(emulated: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene, "load_library", lambda: emulated)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_float32(name: str) -> None:
    check_logits(CASES[name])


@pytest.mark.parametrize("format_", [f for f in Format if f is not Format.DENSE])
@pytest.mark.parametrize("count", [1, 4, 5, 40])
def test_products_of_any_number_of_rows_are_those_of_floats(format_: Format, count: int) -> None:
    check_products(format_, count)
