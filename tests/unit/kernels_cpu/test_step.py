"""The CPU kernels against torch in float32, and against themselves, bit for bit."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deploy.requirements import ROOT
from executor_svc.kernels_cpu import compile as build
from executor_svc.kernels_cpu import library
from executor_svc.kernels_cpu.compile import LEVELS, Level
from executor_svc.kernels_cpu.decoder import NativeDecoder
from executor_svc.kernels_cpu.packing import Format
from tests.unit.kernels_cpu.scene import Case, Scene, Side, Work, kernels, kernels_level, relative_error

CASES = {
    "grouped": Case(),
    "alone": Case(heads=4, kv_heads=4, head_dim=32),
    "biases and norms": Case(extras=True),
    "window": Case(window=21),
    "small blocks": Case(block_size=12, window=50),
    "wide heads": Case(heads=20, kv_heads=1, head_dim=96, block_size=32),
    "int8": Case(format=Format.INT8),
    "int4": Case(format=Format.INT4, extras=True),
    "int4_0": Case(format=Format.INT4_0),
    "int4_k": replace(Case.of(Format.INT4_K), extras=True),
    "int5_k": replace(Case.of(Format.INT5_K), extras=True),
    "int6_k": replace(Case.of(Format.INT6_K), extras=True),
}
# bfloat16 keeps 8 bits: three layers of it stay well within this of float32.
CLOSE = 0.02


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 500, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def history(side: Side, tables: torch.Tensor) -> list[torch.Tensor]:
    """Chunks, a mixed step, decoding of three rows."""
    a, b, c = ids(190, 1), ids(60, 2), ids(12, 3)
    return [
        side.step([Work(0, 0, a[:100])], tables),
        side.step([Work(0, 100, a[100:170]), Work(1, 0, b[:37])], tables),
        side.step([Work(0, 170, a[170:171], True), Work(1, 37, b[37:38], True), Work(2, 0, c[:7])], tables),
        *(
            side.step([Work(0, 171 + n, a[171 + n : 172 + n], True), Work(1, 38 + n, b[38 + n : 39 + n], True),
                       Work(2, 7 + n, c[7 + n : 8 + n], True)], tables)
            for n in range(3)
        ),
    ]  # fmt: skip


@pytest.fixture(params=LEVELS, ids=lambda level: str(level.name))
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Level:
    """The kernels of this level are what `kernels()` gives. Skips where this machine can not run them."""
    own, best = request.param, kernels_level()
    if LEVELS.index(own) < LEVELS.index(best):
        pytest.skip("the processor lacks it")
    for module in (build, library):
        monkeypatch.setattr(module, "own_level", lambda: own)
    assert isinstance(own, Level)
    return own


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_float32(name: str, level: Level) -> None:
    check_logits(CASES[name])


def check_logits(case: Case) -> None:
    scene = Scene(case)
    want = history(scene.torch_side, scene.tables)
    got = history(scene.native_side, scene.tables)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.shape == theirs.shape
        assert relative_error(mine, theirs) < CLOSE


@pytest.mark.parametrize("format_", list(Format))
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_in_company_of_any_number_stay_close_to_themselves_alone(
    format_: Format, threads: int, level: Level
) -> None:
    """A row's bits depend on its own tokens where products of few and of many rows take one way: dense weights."""
    tokens = ids(150, 7)
    pieces = {}
    for chunk in (1, 3, 16, 33, 150):
        scene = Scene(Case.of(format_), threads=threads)
        pieces[chunk] = torch.cat(
            [
                scene.native_side.step([Work(0, at, tokens[at : at + chunk])], scene.tables)
                for at in range(0, 150, chunk)
            ]
        )
    for chunk in (1, 3, 16, 33):
        if format_ is Format.DENSE:
            assert torch.equal(pieces[chunk], pieces[150]), chunk
        assert relative_error(pieces[chunk], pieces[150]) < CLOSE


@pytest.mark.parametrize("case", [Case(), Case(window=300), Case(block_size=12, window=300)], ids=repr)
def test_a_long_row_decodes_to_the_bits_of_its_prompt(case: Case, level: Level) -> None:
    """A decoding row reads several groups of keys at once, a chunk one: the sums are the same."""
    tokens = ids(700, 11)
    scene = Scene(case)
    side, tables = scene.native_side, scene.tables
    whole = torch.cat([side.step([Work(0, at, tokens[at : at + 350])], tables) for at in (0, 350)])
    for at in (129, 300, 511, 513, 699):
        alone = side.step([Work(0, at, tokens[at : at + 1], True), Work(1, 0, ids(3, 1))], tables)
        assert torch.equal(alone[0], whole[at]), at


def test_the_most_likely_token_is_the_least_of_the_best(level: Level) -> None:
    scene = Scene(Case(format=Format.INT8))
    side, tables = scene.native_side, scene.tables
    model = side.model
    assert isinstance(model, NativeDecoder)
    side.step([Work(0, 0, [1])], tables)  # binds the model to its cache
    hidden = torch.randn(40, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    hidden[7] = 0
    hidden[9, 3] = torch.nan
    hidden[11] = torch.inf
    tokens, is_finite = model.greedy(hidden)
    want = model.logits(hidden)
    assert is_finite.tolist() == [row not in (9, 11) for row in range(40)]
    assert tokens[is_finite].tolist() == want[is_finite].argmax(-1).tolist()
    assert tokens[7] == 0


@pytest.mark.parametrize("format_", [f for f in Format if f is not Format.DENSE])
@pytest.mark.parametrize("count", [1, 4, 5, 30, 40, 100])
def test_products_of_any_number_of_rows_are_those_of_floats(format_: Format, count: int, level: Level) -> None:
    """Each number of rows has its way through quantised weights; what is not finite stays so in all of them."""
    check_products(format_, count)


def check_products(format_: Format, count: int) -> None:
    scene = Scene(Case.of(format_))
    side, tables = scene.native_side, scene.tables
    model, reference = side.model, scene.torch_side.model
    side.step([Work(0, 0, [1])], tables)  # binds the model to its cache
    hidden = torch.randn(count, scene.case.hidden, generator=torch.Generator().manual_seed(count)).bfloat16()
    hidden[0] *= 1e-20
    got, want = model.logits(hidden), reference.logits(hidden.float())
    for row in range(count):
        # Few rows lose less than the weights in bfloat16 do.
        assert relative_error(got[row], want[row]) < (2e-4 if count <= 4 else 5e-3)
    hidden[-1, 40] = torch.nan
    assert model.logits(hidden)[-1].isnan().all()


def test_a_row_that_is_not_finite_leaves_the_others_alone() -> None:
    scene = Scene(Case())
    side, tables = scene.native_side, scene.tables
    tokens = ids(20, 9)
    want = side.step([Work(0, 0, tokens)], tables)
    weights = side.model.weights  # type: ignore[attr-defined]
    weights.embedding[499] = torch.nan
    both = side.step([Work(0, 0, tokens), Work(1, 0, [1, 499, 2])], tables)
    assert torch.equal(both[:20], want)
    # Its own earlier tokens may be lost with it: the row as a whole is refused.
    assert both[21:].isnan().all()


def test_steps_take_no_more_memory_once_the_largest_was_seen() -> None:
    import psutil

    scene = Scene(Case())
    side, tables = scene.native_side, scene.tables

    def some() -> None:
        side.step([Work(0, 0, ids(128, 1))], tables)
        for n in range(100):
            side.step([Work(0, 128 + n % 8, [n + 1], True), Work(1, 0, [n + 2], True)], tables)

    some()
    before = psutil.Process().memory_info().rss
    for _ in range(5):
        some()
    assert psutil.Process().memory_info().rss - before < 8 << 20


def test_threads_that_are_not_to_be_had_are_an_error_not_an_abort() -> None:
    kernels()
    script = """
import resource, psutil
from tests.unit.kernels_cpu.scene import Case, Scene, Work
scene = Scene(Case(), threads=600)
room = psutil.Process().memory_info().vms + (200 << 20)
resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
try:
    scene.native_side.step([Work(0, 0, [1])], scene.tables)
except MemoryError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert "600 threads" in done.stdout, done.stderr


def test_members_keep_to_their_processors_and_the_caller_is_left_alone() -> None:
    before = os.sched_getaffinity(0)
    tasks = Path("/proc/self/task")
    threads = {int(task.name) for task in tasks.iterdir()}
    mine = max(before)
    scene = Scene(Case(), threads=3, cpus=(mine, mine, min(before)))
    scene.native_side.step([Work(0, 0, ids(10, 1))], scene.tables)
    members = sorted({int(task.name) for task in tasks.iterdir()} - threads)
    assert [os.sched_getaffinity(member) for member in members] == [{mine}, {min(before)}]
    assert os.sched_getaffinity(0) == before
