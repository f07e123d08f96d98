"""The executor alone: replayed plans are a service's, every token of them comes out, what is told adds up."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import executor, executor_steps
from bench.executor_cases import CASES, STEPS, Samples, Turns
from bench.executor_loads import SERVICE_DEPTH, LoadReplayer, Planned, Taken, calls_of, service_config
from bench.gpu_shapes import write_shape
from bench.load import INTRUDER_OUTPUT, SETTLED, Workload
from bench.plans import plans_of
from bench.step_work import Work
from common.messages import Hello, StepPlan, StepResult
from executor_svc.kernels_cpu.decoder import NativeDecoder
from executor_svc.runner import Runner

LOADS = {
    "asked again": Workload(concurrency=3, requests=7, prompt=20, output=9),
    "intruder": Workload(concurrency=2, requests=2, prompt=20, output=SETTLED + 20, intruder=700),
}
TORCH, NATIVE = "torch", "auto"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights; sizes the CPU kernels take."""
    return write_shape("tiny", tmp_path_factory.mktemp("model"), head_dim=32)


@pytest.fixture(scope="module", params=[TORCH, NATIVE])
def runner(request: pytest.FixtureRequest, model: Path) -> Iterator[Runner]:
    made = executor_steps.build(str(model), weights=request.param, load_format="dummy", num_blocks=256)
    if request.param == NATIVE and not isinstance(made.model, NativeDecoder):
        made.close()
        pytest.skip("the CPU kernels can not be had here")
    yield made
    made.close()


def number_bytes(model: Path) -> int:
    """Of each key and value that torch holds here: 4 where the processor does not multiply bfloat16."""
    made = executor_steps.build(str(model), weights=TORCH, load_format="dummy", num_blocks=8)
    made.close()
    return made.cache.data.element_size()


def replayed(runner: Runner, load: Workload, depth: int = SERVICE_DEPTH) -> tuple[Planned, Taken]:
    planned, taken = Planned.of(runner.info, load, depth), Taken()
    replayer = LoadReplayer(runner, depth)
    replayer.warm_up(planned)
    replayer.replay(planned, taken)
    return planned, taken


@pytest.mark.parametrize("name", LOADS)
def test_every_planned_token_comes_out(runner: Runner, name: str) -> None:
    load = LOADS[name]
    planned, taken = replayed(runner, load)
    outputs = load.requests * load.output + (INTRUDER_OUTPUT if load.intruder else 0)
    prompts = load.requests * load.prompt + load.intruder
    assert sum(planned.outputs) == outputs == sum(work.outputs for work in taken.works)
    # The last token of each is never computed on.
    assert sum(work.tokens for work in taken.works) == prompts + outputs - len(planned.outputs)
    found = taken.summarise()
    assert found["all"]["steps"] == found["decode"]["steps"] + found["prompts"]["steps"] == len(taken.works)
    for rates in found.values():
        assert 0 < rates["p50_ms"] <= rates["p95_ms"] <= rates["p99_ms"]
    moved = Work.sum(taken.works)
    assert moved.num_bytes > 0 and moved.flops > 0


@pytest.mark.parametrize("depth", [1, SERVICE_DEPTH])
@pytest.mark.parametrize("name", LOADS)
def test_plans_do_not_depend_on_the_tokens(runner: Runner, name: str, depth: int) -> None:
    """Made with the executor's own results they are those made without it."""
    planned = Planned.of(runner.info, LOADS[name], depth)
    runner.begin_epoch(Hello(b"plans".ljust(16), 1, depth, 0, 0))

    def execute(plan: StepPlan) -> StepResult:
        return runner.execute(plan, 0).wait()

    calls = calls_of(LOADS[name], runner.info.vocab_size)
    made = plans_of(runner.info, service_config(depth), calls, execute)
    assert [repr(plan) for plan in made] == [repr(plan) for plan in planned.plans]


def test_a_token_that_does_not_come_is_no_result(runner: Runner) -> None:
    planned = Planned.of(runner.info, LOADS["asked again"], 1)
    short = Planned(planned.plans, [10, *planned.outputs[1:]])
    with pytest.raises(RuntimeError, match=r"got \[9, 9"):
        LoadReplayer(runner, 1).replay(short, Taken())


def test_too_few_blocks_are_no_load(model: Path) -> None:
    small = executor_steps.build(str(model), weights=TORCH, load_format="dummy", num_blocks=8)
    with pytest.raises(RuntimeError, match="are 8 blocks too few"):
        Planned.of(small.info, Workload(concurrency=3, requests=3, prompt=20, output=40), 1)
    small.close()


def test_callers_ask_again_and_the_intruder_comes_once_all_decode(runner: Runner) -> None:
    planned = Planned.of(runner.info, LOADS["asked again"], SERVICE_DEPTH)
    admitted = [len(plan.admit) for plan in planned.plans]
    assert sum(admitted[:3]) == 3 and sum(admitted) == 7 and max(admitted) <= 3
    planned = Planned.of(runner.info, LOADS["intruder"], SERVICE_DEPTH)
    (at,) = [i for i, plan in enumerate(planned.plans) if any(admit.length == 700 for admit in plan.admit)]
    assert sum(len(plan.decode_rows) > 0 for plan in planned.plans[:at]) >= SETTLED - 1
    assert len(planned.plans[at].decode_rows) == 2, "the others go on beside it"


def test_cases_by_hand(runner: Runner) -> None:
    samples = {case: Samples() for case in ("decode-2", "decode-1-40", "prefill-128", "mixed-1-16", "serve-2-30-20")}
    turns = Turns(runner)
    for case, own in samples.items():
        turns.run(case, own)
    assert [work.outputs for work in samples["decode-2"].works] == [2] * STEPS
    # Keys and values of 2 layers and 2 heads of 32. Where torch can not multiply bfloat16 its numbers take 4 bytes.
    key_and_value = 2 * 2 * 2 * 32 * runner.cache.data.element_size()
    assert [work.kv_read_bytes for work in samples["decode-2"].works] == [
        2 * (129 + step) * key_and_value for step in range(STEPS)
    ]
    assert {work.tokens for work in samples["prefill-128"].works} == {128}
    assert {work.tokens for work in samples["mixed-1-16"].works} == {17}
    assert {(work.tokens, work.outputs) for work in samples["serve-2-30-20"].works} == {(32, 3)}


def test_what_is_told(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--model", str(model), "--load-format", "dummy", "--threads", "1", "--seconds", "0", "--load", "W1"]
    command += ["--case", "decode-2"]
    assert executor.main([*command, "--weights", "auto,torch", "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["conditions"]["pipeline_depth"] == {"loads": SERVICE_DEPTH, "cases": 1}
    loads, limits = told["results"]["loads"]["W1"], told["conditions"]["machine"]
    assert loads.keys() == {"auto", "torch"}
    whole = loads["torch"]["all"]
    assert whole["steps"] == 4 * 128, "one request after the other"
    # Decodes read from 129 to 255 tokens, keys and values of 2 layers and 2 heads of 32; the step before them 128.
    mean = sum(range(128, 256)) / 128 * 2 * 2 * 2 * 32 * number_bytes(model)
    assert whole["kv_read_mb"] == pytest.approx(mean / 1e6, abs=1e-3)
    case = told["results"]["cases"]["decode-2"]["torch"]
    reread = told["conditions"]["executors"]["torch"]["reread_gb_s"]
    for found in (whole, case):
        assert found["of_read"] == pytest.approx(found["gb_s"] / limits["read_gb_s"]["median"], abs=1e-3)
        assert found["of_reread"] == pytest.approx(found["gb_s"] / reread["median"], abs=1e-3)
        assert found["of_bf16"] == pytest.approx(found["gflop_s"] / limits["bf16_gflop_s"]["median"], abs=1e-3)
    assert executor.main(command) == 0
    lines = capsys.readouterr().out
    assert "W1 all, 512" in lines and "W1 decode, 508" in lines and "decode-2, " in lines


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--load", "W9"], "--load: W9"),
        (["--weights", "int2"], "--weights: int2"),
        *((["--case", f"decode-1,{case}"], f"--case: {case}") for case in (
            "decoed-8", "decode", "decode-", "decode-x", "decode-0", "decode-1-2-3", "prefill-1-2", "mixed-8",
            "serve-1-2",
        )),
        (["--load", "", "--case", ""], "nothing to measure"),
        (["--weights", ""], "nothing to measure"),
    ],
)  # fmt: skip
def test_what_can_not_be_measured_is_refused(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        executor.main(given)
    assert told in capsys.readouterr().err


def test_every_usual_case_is_one() -> None:
    assert executor.parse([]).case == list(CASES)
    assert [executor.parse(["--case", case]).case for case in CASES] == [[case] for case in CASES]
