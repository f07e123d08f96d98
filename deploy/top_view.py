"""The picture `stepwire top` shows: a Summary as lines that fit a terminal, whatever its size and abilities."""

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from deploy.terminal import printable
from deploy.top_steps import ExecutorSummary, Spread, Summary

LABEL: Final = 9
# What stands right of a line's graph.
NOTE: Final = 24
MIN_WIDTH: Final = 40
BLOCKS: Final = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS: Final = "_.:-=+*#"
# Lines of one executor in full, its empty line included.
FULL: Final = 9


def graph_columns(width: int) -> int:
    """Slices that a line of this width shows."""
    return max(10, width - LABEL - NOTE - 2)


def render(summary: Summary, address: str, width: int, height: int, ascii_only: bool = False) -> Text:
    """At most `height` lines of at most `width` columns. Executors in full as long as all fit, else one line each."""
    width = max(width, MIN_WIDTH)
    lines = _header(summary, address)
    room = (height - len(lines)) // max(1, len(summary.executors))
    if room >= FULL:
        for executor in summary.executors:
            lines += [Text(), *_full(executor, width, room - FULL + 1, ascii_only)]
    else:
        lines += [Text(), *_table(summary.executors, width, height - len(lines) - 1)]
    for line in lines:
        line.truncate(width, overflow="ellipsis" if not ascii_only else "crop")
    return Text("\n").join(lines[:height])


def plain_lines(summary: Summary) -> list[str]:
    """For a pipe or a log: one line for each executor."""
    if summary.problem:
        return [f"no steps: {printable(summary.problem)}"]
    return [
        f"{printable(e.executor)} {e.steps_per_s:.1f} steps/s {e.generated_tokens_per_s:.1f} tokens/s"
        f" decode {_of(e.decode_tokens)} prefill {_of(e.prefill_tokens)} running {e.running}"
        f" waiting {summary.waiting} preempted {e.preempted} kv {e.kv_used:.0%} hit {_share(e.hit_rate)}"
        f" device_ms p50 {_ms(e.device_ms, 'p50')} p95 {_ms(e.device_ms, 'p95')} p99 {_ms(e.device_ms, 'p99')}"
        f" idle {e.device_idle:.0%}"
        for e in summary.executors
    ] or ["no executor is known"]


# ------------------------------------------------------------------------------------------------------------ parts


def _header(summary: Summary, address: str) -> list[Text]:
    first = Text.assemble(("stepwire top ", "bold"), printable(address), f"  last {summary.seconds:.0f} s")
    if summary.problem:
        first.append(f"  {printable(summary.problem)}", "bold red")
    stats = summary.stats
    requests = [
        ("running", summary.running), ("waiting", summary.waiting), ("preempted", summary.preempted),
        *([("finished", stats.requests_finished), ("failed", stats.requests_failed),
           ("refused", stats.requests_refused)] if stats is not None else []),
    ]  # fmt: skip
    rates = [
        ("out/s", number(summary.generated_tokens_per_s)), ("in/s", number(summary.prefill_tokens_per_s)),
        ("hit rate", _share(summary.hit_rate)), ("preemptions", stats.preemptions if stats is not None else 0),
    ]  # fmt: skip
    if summary.lost_steps:
        rates.append(("steps not seen", summary.lost_steps))
    return [first, _pairs("requests", requests), _pairs("tokens", rates)]


def _full(e: ExecutorSummary, width: int, num_slowest: int, ascii_only: bool) -> list[Text]:
    state = "" if e.connected else "  not connected"
    head = Text.assemble(
        (shortened(printable(e.executor), width // 2), "bold"),
        f"  epoch {e.epoch}  step {e.last_step}  {e.steps_per_s:.1f} steps/s",
        (state, "bold red"),
    )
    columns = graph_columns(width)
    full = round(e.kv_used * columns)
    colour = "green" if e.kv_used < 0.8 else "yellow" if e.kv_used < 0.95 else "red"
    mark, empty = ("#", ".") if ascii_only else ("█", "░")
    kv = Text.assemble(
        "KV".ljust(LABEL), (mark * full, colour), empty * (columns - full),
        f"  {e.kv_used:4.0%} of {e.num_blocks} blocks",
    )  # fmt: skip
    sequences = [
        ("running", e.running), ("preempted", e.preempted), ("hit rate", _share(e.hit_rate)),
        ("out/s", number(e.generated_tokens_per_s)), ("in/s", number(e.prefill_tokens_per_s)),
    ]  # fmt: skip
    times = [(name, _ms(e.device_ms, name)) for name in ("p50", "p95", "p99", "max")]
    return [
        head,
        _graph("decode", e.decode_line, e.decode_tokens, "cyan", ascii_only),
        _graph("prefill", e.prefill_line, e.prefill_tokens, "magenta", ascii_only),
        kv,
        _pairs("", sequences),
        _pairs("step ms", [*times, ("device idle", f"{e.device_idle:.0%}")]),
        _pairs("turn ms", [(name, _ms(e.turn_ms, name)) for name in ("p50", "p95", "p99", "max")]),
        *_slowest(e, num_slowest),
    ]


def _slowest(e: ExecutorSummary, num_lines: int) -> list[Text]:
    texts = [
        f"step {s.step_id}  {s.device_ms:.1f} ms  decode {s.decode_tokens}  prefill {s.prefill_tokens}"
        f"  {s.age_s:.0f} s ago"
        for s in e.slowest[:num_lines]
    ]
    names = ["slowest", *[""] * num_lines]
    return [Text(name.ljust(LABEL) + text) for name, text in zip(names, texts or ["-"], strict=False)]


def _table(executors: Sequence[ExecutorSummary], width: int, room: int) -> list[Text]:
    """One line for each executor, the last for those there is no room for."""
    name_width = max(12, width - 62)
    titles = ("steps/s", "out/s", "dec", "pre", "run", "KV", "hit", "p50 ms", "p99 ms", "idle")
    widths = (8, 7, 5, 6, 5, 5, 5, 8, 8, 5)
    heading = "".join(title.rjust(wide) for title, wide in zip(titles, widths, strict=True))
    lines = [Text("executor".ljust(name_width) + heading, "bold")]
    for e in executors:
        values = (
            f"{e.steps_per_s:.1f}", number(e.generated_tokens_per_s), _of(e.decode_tokens), _of(e.prefill_tokens),
            str(e.running), f"{e.kv_used:.0%}", _share(e.hit_rate), _ms(e.device_ms, "p50"), _ms(e.device_ms, "p99"),
            f"{e.device_idle:.0%}" if e.connected else "gone",
        )  # fmt: skip
        name = shortened(printable(e.executor), name_width - 1).ljust(name_width)
        row = name + "".join(value.rjust(wide) for value, wide in zip(values, widths, strict=True))
        lines.append(Text(row, "" if e.connected else "red"))
    if len(lines) > room >= 2:
        hidden = len(lines) - room + 1
        lines = [*lines[: room - 1], Text(f"and {hidden} more: make the terminal higher", "dim")]
    return lines


def _graph(name: str, line: Sequence[float | None], spread: Spread | None, colour: str, ascii_only: bool) -> Text:
    note = f"  p50 {_of(spread)}, max {number(spread.max)}" if spread is not None else "  no steps"
    return Text.assemble(name.ljust(LABEL), (spark(line, ascii_only), colour), note)


def spark(values: Sequence[float | None], ascii_only: bool = False) -> str:
    """One character for each value, scaled to the largest; blank where there is none."""
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    top = max((value for value in values if value is not None), default=0.0) or 1.0
    return "".join(" " if v is None else blocks[min(len(blocks) - 1, int(v / top * len(blocks)))] for v in values)


def _pairs(name: str, pairs: Sequence[tuple[str, object]]) -> Text:
    text = Text(name.ljust(LABEL))
    for at, (key, value) in enumerate(pairs):
        text.append("  " if at else "").append(f"{key} ", "dim").append(str(value), "bold")
    return text


def number(value: float) -> str:
    """At most five characters for what is below a billion."""
    for limit, scale, unit in ((1e4, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if value < limit:
            scaled = value / scale
            return f"{scaled:.0f}{unit}" if scaled >= 10 or scaled.is_integer() else f"{scaled:.1f}{unit}"
    return f"{value / 1e9:.0f}G"


def shortened(text: str, width: int) -> str:
    """The end of a long address says more than its middle."""
    return text if len(text) <= width else text[: width // 3] + "~" + text[-(width - width // 3 - 1) :]


def _of(spread: Spread | None) -> str:
    return "-" if spread is None else number(spread.p50)


def _ms(spread: Spread | None, name: str) -> str:
    return "-" if spread is None else f"{getattr(spread, name):.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
