"""Another's schedulers beside ours: the turns, what is reported, ratios. Nothing here has vLLM."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import scheduler, scheduler_peer
from bench.scheduler_peer import VllmSchedulers, beside, missing, recorded_table, steps_in_turns, table


def _case(p50: float, p99: float, schedule: float = 1.0, update: float = 2.0, waiting: int = 0) -> dict[str, Any]:
    parts = {"schedule": {"p50_us": schedule, "p99_us": 9.0}, "update": {"p50_us": update, "p99_us": 9.5}}
    return {"p50_us": p50, "p99_us": p99, "parts": parts, "steps": 20, "ended": 3, "waiting": waiting}


REPORT = {
    "conditions": {"vllm": "1.2.3"},
    "results": {
        "Scheduler": {"steady": _case(400, 1000, 300, 100), "churn": _case(500, 2000)},
        "AsyncScheduler": {
            "steady": _case(800, 1000),
            "churn": _case(1000, 2000),
            "queued": _case(4000, 9000, waiting=7),
        },
    },
}
OURS = {"steady": _case(40, 500), "spread": _case(41, 501), "churn": _case(50, 500), "queued": _case(60, 600)}

PEER = """
import json, sys
flags = dict(zip(sys.argv[1:-1:2], sys.argv[2:-1:2]))
assert sys.argv[-1] == "--in-turns" and sys.flags.isolated
print("a package says something while it is imported")
turns = []
while True:
    print("ready", flush=True)
    steps = int(sys.stdin.readline())
    if not steps:
        break
    turns.append(steps)
print(json.dumps({"conditions": flags, "results": turns}), flush=True)
"""


def test_results_have_the_shape_of_ours_and_ratios_under_one_where_ours_is_cheaper() -> None:
    found = beside(OURS, REPORT)
    assert found.keys() == {"vllm 1.2.3 Scheduler", "vllm 1.2.3 AsyncScheduler"}
    one, other = found.values()
    assert (one["p50_us"], one["p99_us"], one["schedule_us"], one["update_us"]) == (400, 1000, 300, 100)
    assert one["ours_to_theirs"] == {"p50": 0.1, "p99": 0.5}
    assert one["churn"]["ours_to_theirs"] == {"p50": 0.1, "p99": 0.25}
    assert "queued" not in one and "steady" not in one and "spread" not in one
    assert other["queued"]["ours_to_theirs"] == {"p50": 0.015, "p99": 0.0667}


def test_the_table_has_a_line_for_each_case_and_says_what_is_compared() -> None:
    first, _, *lines = table(beside(OURS, REPORT)).splitlines()
    assert "no wire" in first
    assert [line.split()[3] for line in lines] == ["steady", "churn", "steady", "churn", "queued"]
    assert "400 / 1000" in lines[0] and "0.1 / 0.5" in lines[0]
    assert lines[-1].split()[-3:] == ["20", "3", "7"]


@pytest.mark.parametrize(
    ("rows", "steps", "turns", "each"), [(32, 1000, 20, 50), (1024, 1000, 20, 10), (9999, 50, 1, 20)]
)
def test_a_dear_step_is_measured_less_often(rows: int, steps: int, turns: int, each: int) -> None:
    assert steps_in_turns(rows, steps, turns) == each


def test_turns_are_asked_for_one_by_one(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    with VllmSchedulers(sys.executable, {"rows": 8, "warm-up": 3}, 5, script) as peer:
        peer.run_turn()
        peer.run_turn()
        assert peer.report() == {"conditions": {"--rows": "8", "--warm-up": "3"}, "results": [5, 5]}


def test_a_peer_that_ends_says_why(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text("raise ImportError('no such thing here')")
    with pytest.raises(RuntimeError, match=r"ended with 1: [\s\S]*no such thing here"):
        VllmSchedulers(sys.executable, {}, 5, script)


def test_a_python_without_it_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nothing" in missing(str(tmp_path / "nothing"))
    monkeypatch.setattr(scheduler, "missing", lambda python: f"{python} has no vllm: None")
    with pytest.raises(SystemExit):
        scheduler.main(["--rows", "4", "--vllm", "some/python"])
    assert "some/python has no vllm" in capsys.readouterr().err


def test_without_it_the_recorded_numbers_are_shown_and_said_to_be_so() -> None:
    assert "another run" in recorded_table(32) and recorded_table(33) == ""
    assert json.loads(json.dumps(scheduler_peer.recorded()))["vllm 0.32 Scheduler"]["32"] == {
        "schedule_us": 279,
        "update_us": 122,
    }
