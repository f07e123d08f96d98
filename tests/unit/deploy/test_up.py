"""Flags of `up`, addresses, and what it prints."""

from pathlib import Path

import pytest

from common.errors import ConfigError
from deploy.log_lines import LogLines
from deploy.up import _Up, call_address, route_flags


def test_flags_go_to_whoever_knows_them() -> None:
    scheduler, executor = route_flags(
        ["--model", "m", "--block-size=8", "--policy", "fcfs", "--no-enable-prefix-cache", "--max-num-seqs", "4",
         "--listen", "127.0.0.1:1", "--executor-listen=127.0.0.1:2", "--scheduler-drain-s", "3", "--config", "c"]
    )  # fmt: skip
    assert scheduler == [
        "--model", "m", "--policy", "fcfs", "--no-enable-prefix-cache", "--max-num-seqs", "4",
        "--listen", "127.0.0.1:1", "--drain-s", "3", "--config", "c",
    ]  # fmt: skip
    assert executor == [
        "--model", "m", "--block-size=8", "--max-num-seqs", "4", "--listen=127.0.0.1:2", "--config", "c",
    ]  # fmt: skip


def test_one_metrics_address_is_not_both_services() -> None:
    flags = ["--metrics-listen", "127.0.0.1:9464", "--executor-metrics-listen", "127.0.0.1:9465"]
    assert route_flags(flags) == (["--metrics-listen", "127.0.0.1:9464"], ["--metrics-listen", "127.0.0.1:9465"])


@pytest.mark.parametrize(
    ("flag", "close"),
    [("--blok-size", "--block-size"), ("--executor-polcy", ""), ("--scheduler-block-size", ""), ("stray", "")],
)
def test_what_nobody_knows_is_refused(flag: str, close: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown flag {flag}") as caught:
        route_flags([flag, "1"])
    assert close in caught.value.message


def test_the_executor_listens_on_a_private_socket_unless_told(tmp_path: Path) -> None:
    up = _Up([], {}, tmp_path)
    assert up.executor_command()[4:6] == ["--listen", f"unix:{tmp_path}/executor.sock"]
    # A listen meant for the public API does not move the executor.
    assert "unix:" in _Up([], {"STEPWIRE_LISTEN": "127.0.0.1:5"}, tmp_path).executor_command()[5]
    for flags, environ in (
        (["--executor-listen", "127.0.0.1:5"], {}),
        ([], {"STEPWIRE_EXECUTOR_LISTEN": "127.0.0.1:5"}),
    ):
        command = _Up(flags, environ, tmp_path).executor_command()
        assert "127.0.0.1:5" in command and not any("unix:" in part for part in command)


def test_a_port_once_drawn_stays(tmp_path: Path) -> None:
    up = _Up(["--executor-listen", "127.0.0.1:0"], {}, tmp_path)
    (tmp_path / "executor.address").write_text("127.0.0.1:4321\n")
    assert up.executor_command()[-4:-2] == ["--listen", "127.0.0.1:4321"]
    assert up.scheduler_command()[-4:-2] == ["--executors", "127.0.0.1:4321"]


def test_an_address_left_by_an_earlier_run_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("127.0.0.1:1\n")
    _Up(["--address-file", str(tmp_path / "a")], {}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_foreign_executors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its own executor"):
        _Up(["--executors", "a:1"], {}, tmp_path)


def test_addresses_to_dial() -> None:
    assert call_address("0.0.0.0:5") == "127.0.0.1:5"
    assert call_address("[::]:5") == "127.0.0.1:5"
    assert call_address("10.0.0.1:5") == "10.0.0.1:5"
    assert call_address("unix:/x") == "unix:/x"


def test_lines_wait_while_an_answer_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    log = LogLines()
    log.write("executor", "one")
    with log.held():
        log.write("scheduler", "two")
        assert capsys.readouterr().err == "executor  | one\n"
    assert capsys.readouterr().err == "scheduler | two\n"


class Shown:
    """A Teller that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, int, str]] = []
        self.num_closed = 0

    def tell(self, activity: str, done: int, total: int, detail: str) -> None:
        self.told.append((activity, done, total, detail))

    def close(self) -> None:
        self.num_closed += 1


PROGRESS = '{"activity": "capturing graphs", "done": 1, "total": 4, "detail": "8 rows\\u001b[2J"}'


def test_progress_of_the_executor_becomes_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Shown()
    log = LogLines(bar)
    log.write("executor", PROGRESS)
    assert bar.told == [("capturing graphs", 1, 4, "8 rows[2J")]
    with log.held():
        assert bar.num_closed == 1
        log.write("executor", PROGRESS)
        assert len(bar.told) == 1, "an answer is being written"
    log.write("executor", '{"activity": "", "done": 0, "total": 0, "detail": ""}')
    assert bar.num_closed == 2
    assert capsys.readouterr().err == ""


def test_the_executor_is_asked_for_progress_where_there_is_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--progress" not in _Up([], {}, tmp_path).executor_command()
    monkeypatch.setattr("deploy.up.has_terminal", lambda: True)
    assert _Up([], {}, tmp_path).executor_command()[-2:] == ["--progress", "json"]
    assert _Up(["--progress", "log"], {}, tmp_path).executor_command().count("--progress") == 1
