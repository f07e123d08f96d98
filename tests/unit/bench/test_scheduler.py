"""The benchmark of the core runs, and says what it promises."""

import gc
import json

import pytest

from bench import scheduler


def test_all_cases_are_measured_part_by_part(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert scheduler.main(["--rows", "8", "--steps", "50", "--queued", "20"]) == 0
    finally:
        gc.unfreeze()
    *lines, last = capsys.readouterr().out.splitlines()
    said = json.loads(last)
    assert said["conditions"]["queued"] == 20 and said["conditions"]["steps"] == 50
    found = said["results"]["8"]
    for case in (found, found["spread"], found["churn"], found["eos"], found["queued"]):
        assert 0 < case["p50_us"] <= case["p99_us"] and case["steps"] == 50
        assert case["parts"].keys() == {"decode", "update", "schedule", "encode"}
        assert 0 < case["plan_bytes"]["p50"] <= case["plan_bytes"]["max"]
    assert any("8 decoding rows" in line for line in lines)


def test_the_json_object_stands_alone_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert scheduler.main(["--rows", "4", "--steps", "50", "--queued", "0", "--json"]) == 0
    finally:
        gc.unfreeze()
    assert json.loads(capsys.readouterr().out).keys() == {"conditions", "results", "peers"}
