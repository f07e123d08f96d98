"""What the start took is told part by part: in the log, on a terminal, to a parent, and as a metric."""

import io
import logging
import sys
from collections.abc import Callable

import pytest
from rich.console import Console

from common.clock import ManualClock
from executor_svc.load_progress import (
    OTHER,
    JsonTeller,
    LogTeller,
    Progress,
    StartProgress,
    Teller,
    make_teller,
    told_by,
)
from executor_svc.metrics import CountingSink
from executor_svc.progress_bar import BarTeller


def started(clock: ManualClock, teller: Teller | None = None) -> StartProgress:
    progress = StartProgress(teller, clock=clock)

    def at(seconds: float, activity: str, done: int, total: int, detail: str = "") -> None:
        clock.advance_ns(int(seconds * 1e9))
        progress(activity, done, total, detail)

    at(1.0, "loading some/model", 0, 100)
    at(2.0, "loading some/model", 50, 100)
    at(2.0, "loading some/model", 100, 100)
    at(0.5, "warming up", 0, 1)
    at(0.25, "capturing graphs", 1, 2, "8 rows, greedy, 12 MiB")
    at(3.0, "capturing graphs", 2, 2, "4 rows, greedy, 14 MiB")
    at(0.0, "warming up", 1, 1)
    clock.advance_ns(250_000_000)
    progress.finish()
    return progress


def test_time_counts_for_what_was_named_last(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    seconds = started(ManualClock()).seconds
    assert seconds == {OTHER: 1.75, "loading": 4.0, "warming up": 0.25, "capturing graphs": 3.0}
    last = caplog.records[-1].getMessage()
    assert last.startswith("started in 9.00 s: ") and "capturing graphs 3.00 s" in last


def test_the_log_has_beginnings_ends_and_little_between(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    progress = StartProgress(LogTeller(2.0, clock), clock)
    for done in range(11):
        progress("capturing graphs", done, 10, f"{done} rows")
        clock.advance_ns(500_000_000)
    assert [record.getMessage() for record in caplog.records] == [
        f"capturing graphs: {percent} %" for percent in (0, 40, 80, 100)
    ]


def test_the_start_is_a_metric_of_its_own() -> None:
    counts = CountingSink(None, started(ManualClock()).seconds)
    start = next(family for family in counts.families() if family.name == "stepwire_start_seconds")
    assert {sample.labels["part"]: sample.value for sample in start.samples}["loading"] == 4.0
    assert not counts.steps


def test_a_parent_is_told_lines_it_can_read() -> None:
    stream, clock = io.StringIO(), ManualClock()
    started(clock, JsonTeller(stream, clock=clock))
    told = [told_by(line) for line in stream.getvalue().splitlines()]
    assert told[0] == ("loading some/model", 0, 100, "")
    assert ("capturing graphs", 2, 2, "4 rows, greedy, 14 MiB") in told
    assert told.count(("", 0, 0, "")) == 1 and told[-1] == ("", 0, 0, "")


@pytest.mark.parametrize(
    "line", ["", "executor INFO ready", '{"activity": ', '{"activity": "x"}', '{"activity": 1, "d']
)
def test_other_lines_are_no_progress(line: str) -> None:
    assert told_by(line) is None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("how", "stream", "term", "kind"),
    [
        ("auto", Terminal, "xterm", BarTeller),
        ("auto", Terminal, "dumb", LogTeller),
        ("auto", io.StringIO, "xterm", LogTeller),
        ("log", Terminal, "xterm", LogTeller),
        ("json", Terminal, "xterm", JsonTeller),
    ],
)
def test_a_terminal_gets_a_bar(
    how: str, stream: Callable[[], io.StringIO], term: str, kind: type[Teller], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setenv("TERM", term)
    assert type(make_teller(how)) is kind  # type: ignore[arg-type]


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error from now on: not a fixture, because pytest's own replacement comes after those."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    return stream


def test_the_bar_shows_bucket_count_and_memory_and_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    bar = BarTeller(Console(stderr=True, width=100, color_system=None))
    progress: Progress = StartProgress(bar)
    progress("loading a[b]/c", 3_000_000, 12_000_000)
    bar.refresh()
    assert "loading a[b]/c" in terminal.getvalue() and "3/12 MB" in terminal.getvalue()
    progress("capturing graphs", 3, 105, "248 rows, full, 120 MiB")
    bar.refresh()
    drawn = terminal.getvalue().splitlines()[-1]
    assert "capturing graphs" in drawn and "3/105" in drawn and "248 rows, full, 120 MiB" in drawn and ":" in drawn
    assert "loading" not in drawn.rpartition("\r")[2], "one bar"
    bar.close()
    bar.close()
    assert sys.stderr is terminal
    assert terminal.getvalue().endswith("\x1b[2K"), "the bar's line is wiped"


def test_what_has_no_measure_moves_after_what_had_one(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    bar = BarTeller(Console(stderr=True, width=100, color_system=None))

    def drawn_after(activity: str, done: int, total: int) -> str:
        bar.tell(activity, done, total, "")
        bar.refresh()
        return terminal.getvalue().rpartition("\r")[2]

    assert "10/10 MB" in drawn_after("loading", 10_000_000, 10_000_000)
    for _ in range(2):  # a trial, then the real one
        before = drawn_after("warming up", 0, 1)
        assert "warming up" in before and "MB" not in before and "/" not in before
        assert "0:00:00" in drawn_after("warming up", 1, 1)
    assert "5/10" in drawn_after("capturing graphs", 5, 10)
    assert "/" not in drawn_after("reading", 7, 0), "of nobody knows how many"
    bar.close()


def test_a_thread_that_still_loads_draws_no_bar_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    progress = StartProgress(BarTeller(Console(stderr=True, width=100, color_system=None)))
    progress("loading a", 1, 10)
    progress.close()
    drawn = terminal.getvalue()
    progress("loading a", 2, 10)
    progress("warming up", 0, 1)
    progress.close()
    assert terminal.getvalue() == drawn and sys.stderr is terminal


def test_log_lines_go_above_the_bar_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    long = "[bold]words " * 20 + "w" * 200  # of several of the terminal's lines
    handler = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger()
    logger.addHandler(handler)
    try:
        bar = BarTeller(Console(stderr=True, width=60, color_system=None))
        bar.tell("capturing graphs", 1, 4, "8 rows")
        logging.getLogger("some.module").warning("a line of the log")
        logging.getLogger("some.module").warning(long)
        sys.stderr.write("in two ")
        sys.stderr.write("parts\nand no")
        bar.tell("capturing graphs", 2, 4, "8 rows")
        bar.close()
        assert handler.stream is terminal
        logging.getLogger("some.module").warning("after it")
    finally:
        logger.removeHandler(handler)
    lines = [line.rpartition("\x1b[2K")[2] for line in terminal.getvalue().split("\n")]
    assert "a line of the log" in lines and long in lines and "in two parts" in lines
    assert lines[-2] == "and noafter it", "what was no whole line stands behind the bar"
