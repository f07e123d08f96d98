"""The picture: fits the terminal, whatever its size; says what the summary says."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from deploy.top_steps import Board, Summary
from deploy.top_view import graph_columns, number, plain_lines, render, shortened, spark
from tests.unit.deploy.top_scene import EXECUTOR, stats, step


def board(num_executors: int = 1, name: str = "10.0.0.{}:50052") -> Board:
    made = Board(10, 100.0)
    names = [name.format(n) for n in range(num_executors)]
    for address in names:
        for n in range(1, 101):
            prefill = 512 * (n % 10 == 0)
            device_ns = (8 + n % 3 + prefill // 16) * 1_000_000
            changes = step(n, prefill_tokens=prefill, device_ns=device_ns, preemptions=n // 50, running=4, waiting=3)
            made.add(
                replace(changes, executor=address, admitted_tokens=prefill, cached_tokens=prefill // 4), 100 + n / 10
            )
    executors = [replace(EXECUTOR, address=address) for address in names]
    made.take_stats(stats(*executors, requests_finished=7, requests_refused=2, preemptions=2), 109.9)
    return made


def shown(summary: Summary, width: int = 80, height: int = 24, **console: object) -> list[str]:
    """What a terminal of that size gets, by rich itself."""
    out = Console(width=width, height=height, file=io.StringIO(), record=True, **console)  # type: ignore[arg-type]
    out.print(render(summary, "127.0.0.1:50051", width, height, out.options.ascii_only), soft_wrap=True)
    return out.export_text(styles=False).rstrip("\n").split("\n")


def test_everything_stands_in_80_by_24() -> None:
    lines = shown(board().summary(110.0, graph_columns(80)))
    text = "\n".join(lines)
    assert len(lines) <= 24 and max(map(len, lines)) <= 80 and "…" not in text
    for part in (
        "stepwire top 127.0.0.1:50051", "running 4", "waiting 3", "preempted 2", "finished 7", "refused 2",
        "10.0.0.0:50052", "step 100", "10.0 steps/s", "hit rate 25%", "25% of 100 blocks", "device idle",
        "p50 9.0", "p95 41.0", "p99 42.0", "max 42.0", "out/s 40", "in/s 512", "decode", "prefill", "slowest  step",
    ):  # fmt: skip
        assert part in text, part


@pytest.mark.parametrize("num_executors", [0, 1, 2, 3, 12, 64])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (40, 10), (80, 5), (61, 24)])
def test_it_fits_whatever_there_is(num_executors: int, width: int, height: int) -> None:
    made = board(num_executors, "unix:/a/very/long/path/that/nobody/wants/to/read/executor-{}.sock")
    lines = shown(made.summary(110.0, graph_columns(width)), width, height)
    assert len(lines) <= height and max(map(len, lines)) <= width
    if num_executors == 2 and (width, height) == (80, 24):
        assert sum(line.startswith("KV") for line in lines) == 2, "two executors in full"
    if num_executors == 64 and height == 24:
        assert "more" in lines[-1]


def test_it_gets_along_without_colours_and_without_unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = board().summary(110.0, graph_columns(80))
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    plain = Console(width=80, height=24, file=file, force_terminal=True)
    assert plain.options.ascii_only
    plain.print(render(summary, "a:1", 80, 24, True), soft_wrap=True)
    file.flush()
    monkeypatch.setenv("NO_COLOR", "1")
    coloured = Console(width=80, height=24, file=io.StringIO(), force_terminal=True, color_system="256")
    coloured.print(render(summary, "a:1", 80, 24), soft_wrap=True)
    assert "38;" not in coloured.file.getvalue()  # type: ignore[attr-defined]


def test_a_problem_and_lost_steps_are_told() -> None:
    made = board()
    made.add(step(200, skipped=12, executor="10.0.0.0:50052"), 110.0)
    made.problem = "the server\x1b[2J is away"
    text = "\n".join(shown(made.summary(110.0)))
    assert "the server[2J is away" in text and "steps not seen 12" in text
    assert plain_lines(made.summary(110.0)) == ["no steps: the server[2J is away"]


def test_an_executor_that_is_gone_is_told() -> None:
    made = board(3)
    made.take_stats(stats(*(replace(EXECUTOR, address=f"10.0.0.{n}:50052", connected=n > 0) for n in range(3))), 110.0)
    assert any("gone" in line for line in shown(made.summary(110.0)))
    assert any("not connected" in line for line in shown(made.summary(110.0), 80, 60))


def test_a_line_for_each_executor_where_there_is_no_terminal() -> None:
    first, second = plain_lines(board(2).summary(110.0))
    assert first.startswith("10.0.0.0:50052 10.0 steps/s 40.0 tokens/s decode 4 prefill 0 running 4 waiting 3")
    assert second.startswith("10.0.0.1:50052") and "device_ms p50 9.0 p95 41.0 p99 42.0 idle" in second
    assert plain_lines(Board(10, 0.0).summary(1.0)) == ["no executor is known"]


def test_sparks_are_scaled_to_the_largest() -> None:
    assert spark([None, 0, 4, 8]) == " ▁▅█"
    assert spark([None, 0, 4, 8], ascii_only=True) == " _=#"
    assert spark([0, 0]) == "▁▁" and spark([]) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.2"),
        (9.96, "10.0"),
        (12.4, "12"),
        (9999, "9999"),
        (16384, "16k"),
        (2.5e6, "2.5M"),
        (3e10, "30G"),
    ],
)
def test_numbers_stay_short(value: float, text: str) -> None:
    assert number(value) == text


def test_long_names_lose_their_middle() -> None:
    assert shortened("10.0.0.1:50052", 20) == "10.0.0.1:50052"
    assert shortened("abcdefghijklmnopqrstuvwxyz", 10) == "abc~uvwxyz"
