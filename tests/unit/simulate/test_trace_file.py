"""Arrivals from a file: strict, and every complaint names line and field."""

from pathlib import Path

import pytest

from common.errors import ConfigError
from scheduler_svc.simulate.trace_file import FileWorkload

GOOD = """\
{"arrival_s": 0.5, "prompt_tokens": 100, "output_tokens": 10}
{"arrival_s": 1, "prompt_tokens": 120, "output_tokens": 20, "prefix_id": "system", "prefix_tokens": 64, "tenant": "a"}

{"arrival_s": 2.5, "prompt_tokens": 90, "output_tokens": 5, "prefix_id": 7, "prefix_tokens": 8, "priority": -2}
{"arrival_s": 2.5, "prompt_tokens": 80, "output_tokens": 1, "prefix_id": "system", "prefix_tokens": 32, "deadline_s": 4}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "arrivals.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_field_is_read(tmp_path: Path) -> None:
    trace = FileWorkload(written(tmp_path, GOOD)).trace()
    assert trace.arrival_ns.tolist() == [500_000_000, 1_000_000_000, 2_500_000_000, 2_500_000_000]
    assert trace.prompt_tokens.tolist() == [100, 120, 90, 80]
    assert trace.output_tokens.tolist() == [10, 20, 5, 1]
    assert trace.prefix.tolist() == [-1, 0, 1, 0]
    assert trace.prefix_tokens.tolist() == [0, 64, 8, 32]
    assert trace.tenants == ("", "a") and trace.tenant.tolist() == [0, 1, 0, 0]
    assert trace.priority.tolist() == [0, 0, -2, 0]
    assert trace.deadline_ns.tolist() == [0, 0, 0, 4_000_000_000]


def test_another_rate_squeezes_the_times(tmp_path: Path) -> None:
    trace = FileWorkload(written(tmp_path, GOOD)).trace(3.0)
    assert trace.arrival_ns.tolist() == [0, 250_000_000, 1_000_000_000, 1_000_000_000]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('{"arrival_s": 3, "prompt_tokens": 5}', "output_tokens"),
        ('{"arrival_s": 3, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens"),
        ('{"arrival_s": 3, "prompt_tokens": 5.5, "output_tokens": 1}', "prompt_tokens"),
        ('{"arrival_s": 3, "prompt_tokens": "5", "output_tokens": 1}', "prompt_tokens"),
        ('{"arrival_s": 3, "prompt_tokens": true, "output_tokens": 1}', "prompt_tokens"),
        ('{"arrival_s": 2, "prompt_tokens": 5, "output_tokens": 1}', "arrival_s"),
        ('{"arrival_s": -1, "prompt_tokens": 5, "output_tokens": 1}', "arrival_s"),
        ('{"arrival_s": 1e400, "prompt_tokens": 5, "output_tokens": 1}', "arrival_s"),
        ('{"arrival_s": 3, "prompt_tokens": 5, "output_tokens": 1, "prefix_tokens": 2}', "prefix_id"),
        ('{"arrival_s": 3, "prompt_tokens": 5, "output_tokens": 1, "prefix_id": "x"}', "prefix_tokens"),
        ('{"arrival_s": 3, "prompt_tokens": 5, "output_tokens": 1, "prefix_id":1, "prefix_tokens":6}', "prefix_tokens"),
        ('{"arrival_s": 3, "prompt_tokens": 5, "output_tokens": 1, "tennant": "x"}', "tennant"),
        ('{"arrival_s": 3, "prompt_tokens": 5, "output_tokens": 1, "deadline_s": -1}', "deadline_s"),
        ('{"arrival_s": 3, "prompt_tokens"', "the line"),
        ("[1, 2]", "the line"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, line: str, field: str) -> None:
    path = written(tmp_path, GOOD + line + "\n")
    with pytest.raises(ConfigError) as caught:
        FileWorkload(path).trace()
    assert caught.value.message.startswith(f"{path}:6: {field}: ")


def test_an_empty_file_and_a_rate_for_one_moment(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no arrivals"):
        FileWorkload(written(tmp_path, "\n")).trace()
    with pytest.raises(ConfigError, match="all arrive at once"):
        FileWorkload(written(tmp_path, GOOD.splitlines()[0])).trace(2.0)
