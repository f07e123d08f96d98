"""How both services begin."""

import logging
from pathlib import Path

import pytest

from common.config import EXIT_CONFIG
from common.serving import begin, bound_address, write_address
from executor_svc.config import ExecutorConfig
from scheduler_svc.config import SchedulerConfig


def test_what_is_wrong_is_one_line_and_its_own_status(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in (SchedulerConfig, ExecutorConfig):
        with pytest.raises(SystemExit) as left:
            begin(kind, ["--qqqqq"])
        assert left.value.code == EXIT_CONFIG
        assert capsys.readouterr().err == f"stepwire {kind.service}: unknown flag --qqqqq\n"


def test_the_log_begins_with_the_configuration(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert begin(SchedulerConfig, ["--policy", "priority"]).config.policy == "priority"
    assert "scheduler configuration" in caplog.text and "flag --policy" in caplog.text


def test_addresses(tmp_path: Path) -> None:
    assert bound_address("127.0.0.1:0", 5) == "127.0.0.1:5"
    assert bound_address("[::1]:0", 5) == "[::1]:5"
    assert bound_address("unix:/x", 1) == "unix:/x"
    write_address(tmp_path / "a", "127.0.0.1:5")
    assert (tmp_path / "a").read_text() == "127.0.0.1:5\n" and list(tmp_path.iterdir()) == [tmp_path / "a"]
