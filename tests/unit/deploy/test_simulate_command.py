"""`stepwire simulate` as a person or a script calls it."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from deploy.cli import run
from scheduler_svc.simulate.fit import write_steps
from scheduler_svc.simulate.step_model import load_model
from tests.unit.simulate.scenes import SHAPE

Capture = pytest.CaptureFixture[str]
BARE = ["simulate", "--step-model", "h200-l1b", "--rate", "100"]
SMALL = [*BARE, "--requests", "40", "--output-tokens", "uniform:1,20"]


def result(capsys: Capture, *flags: str, begin: Sequence[str] = SMALL) -> dict[str, dict[str, object]]:
    assert run([*begin, "--json", *flags]) == 0
    found: dict[str, dict[str, object]] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_json_is_one_object_with_conditions_and_results(capsys: Capture) -> None:
    found = result(capsys, "--seed", "7", "--num-executors", "3")
    assert found["results"]["finished"] == 40
    assert found["conditions"]["workload"]["seed"] == 7  # type: ignore[index]
    assert found["conditions"]["setup"]["num_executors"] == 3  # type: ignore[index]
    assert found["conditions"]["step_model"]["origin"] == "derived"  # type: ignore[index]
    assert found == result(capsys, "--seed", "7", "--num-executors", "3")


def test_every_setting_of_the_scheduler_is_taken(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text("scheduler:\n  max_num_seqs: 5\n  policy: priority\n")
    monkeypatch.setenv("STEPWIRE_PIPELINE_DEPTH", "1")
    core = result(capsys, "--config", str(tmp_path / "config.yaml"), "--max-prefill-chunk", "64")["conditions"]["core"]
    assert isinstance(core, dict)
    wanted = {"max_num_seqs": 5, "policy": "priority", "pipeline_depth": 1, "max_prefill_chunk": 64}
    assert {name: core[name] for name in wanted} == wanted


def test_the_executor_can_be_made_smaller(capsys: Capture) -> None:
    found = result(capsys, "--num-blocks", "60", "--max-context", "512", "--executor-max-num-seqs", "9")
    shape = found["conditions"]["step_model"]["executor"]  # type: ignore[index]
    assert (shape["num_blocks"], shape["max_context"], shape["max_num_seqs"]) == (60, 512, 9)


def test_a_folder_and_a_list_of_steps(capsys: Capture, tmp_path: Path) -> None:
    assert run([*SMALL, "--tenants", "a=2,b", "--out", str(tmp_path / "r"), "--steps", str(tmp_path / "s.csv")]) == 0
    out = capsys.readouterr().out
    assert "p99_ttft_ms" in out and "tenant" in out
    assert "stepwire simulate --step-model h200-l1b" in (tmp_path / "r" / "report.md").read_text()
    assert (tmp_path / "r" / "tenants.svg").is_file() and (tmp_path / "s.csv").stat().st_size > 100


def test_without_the_plots_library_nothing_is_simulated(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "leather", None)
    assert run([*SMALL, "--out", str(tmp_path / "r")]) == 2
    captured = capsys.readouterr()
    assert "extra `simulate`" in captured.err and not captured.out and not (tmp_path / "r").exists()
    assert run([*SMALL, "--json"]) == 0


def test_capacity_prints_each_probe(capsys: Capture) -> None:
    assert run([*SMALL, "--find-capacity", "p99_ttft_ms<=20", "--json"]) == 0
    captured = capsys.readouterr()
    capacity = json.loads(captured.out.splitlines()[-1])["capacity"]
    assert capacity["requests_per_s"] > 0 and len(capacity["probes"]) == captured.err.count(" requests/s ")


def test_arrivals_from_a_file(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"arrival_s": {i}, "prompt_tokens": 9, "output_tokens": 3}}\n' for i in range(4)))
    numbers = result(capsys, "--arrivals", str(path), begin=BARE)["results"]
    assert numbers["output_tokens"] == 12
    assert numbers["duration_s"] == pytest.approx(0.03, rel=0.2)  # squeezed to --rate 100
    for flag, value in {"--requests": "3", "--prompt-tokens": "7", "--tenants": "a,b", "--concurrency": "2"}.items():
        assert run([*BARE, "--arrivals", str(path), flag, value]) == 2
        assert flag[2:].replace("-", "_") in capsys.readouterr().err


def test_fit_prints_and_saves_a_model(capsys: Capture, tmp_path: Path) -> None:
    steps = [
        {"decode_tokens": n, "prefill_tokens": n % 3, "context_tokens": n * n, "duration_us": 50.0 + 2 * n}
        for n in range(1, 40)
    ]
    write_steps(tmp_path / "m.jsonl", {"conditions": {"device": "x"}, "executor": SHAPE.model_dump()}, steps)
    model = tmp_path / "fitted.json"
    assert run(["simulate", "--fit", str(tmp_path / "m.jsonl"), "--save-model", str(model)]) == 0
    assert "p95_error" in capsys.readouterr().out
    assert load_model(str(model)).costs[0].decode_row_us == pytest.approx(2, rel=0.01)
    assert run(["simulate", "--fit", str(tmp_path / "m.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"]["base_us"] == pytest.approx(50, rel=0.01)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--rat", "3"], "--rat"),
        (["--max-num-seq", "3"], "--max-num-seqs"),
        (["--policy", "fair-ish"], "policy"),
        (["--step-model", "nope"], "h200-l1b"),
        (["--prompt-tokens", "many"], "prompt_tokens"),
        (["--prompt-tokens", "inf"], "prompt_tokens"),
        (["--output-tokens", "lognormal:inf,1"], "output_tokens"),
        (["--burst", "3"], "burst"),
        (["--burst", "inf,1"], "burst"),
        (["--tenants", "a=nan"], "tenants"),
        (["--deadline-s", "inf"], "deadline_s"),
        (["--network-us", "nan"], "network_us"),
        (["--rate", "0"], "rate"),
        (["--rate", "inf"], "rate"),
        (["--concurrency", "3"], "rate"),
        (["--tenants", "a=x"], "tenants"),
        (["--tenants", "a=0"], "tenants"),
        (["--priorities", "high=1"], "priorities"),
        (["--num-executors", "65"], "num_executors"),
        (["--num-blocks", "0"], "num_blocks"),
        (["--find-capacity", "p99"], "find_capacity"),
        (["--find-capacity", "p98_ttft_ms<=3"], "did you mean"),
        (["--steps", "/tmp/steps.txt"], "jsonl"),
    ],
)
def test_what_is_wrong_is_one_line(capsys: Capture, flags: list[str], named: str) -> None:
    status = run([*SMALL, *flags])
    captured = capsys.readouterr()
    assert status == 2
    assert captured.err.startswith("stepwire: ") and captured.err.count("\n") == 1 and named in captured.err


def test_a_file_of_arrivals_that_is_not_there_is_named(capsys: Capture) -> None:
    assert run([*BARE, "--arrivals", "/nowhere/a.jsonl"]) == 1
    assert "/nowhere/a.jsonl" in capsys.readouterr().err


def test_help_lists_the_flags(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as left:
        run(["simulate", "--help"])
    assert left.value.code == 0
    assert "--find-capacity" in capsys.readouterr().out
