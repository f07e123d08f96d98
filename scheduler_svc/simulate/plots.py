"""SVG plots of a simulation, by file name. Needs the extra `simulate` (leather)."""

from collections.abc import Mapping
from itertools import cycle
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from scheduler_svc.simulate.capacity import Capacity
from scheduler_svc.simulate.measures import Measures

_POINTS: Final = 120
_WIDTH, _HEIGHT = 760, 360
_COLOURS: Final = ("#1f6feb", "#d1242f", "#1a7f37", "#bf8700", "#8250df", "#57606a")
_QUANTILES: Final = (*range(0, 99, 2), 99, 99.5, 99.9)
Series = Mapping[str, list[tuple[float, float]]]


def check_available() -> None:
    """Raises ConfigError when there can be no plots."""
    _leather()


def _leather() -> Any:
    try:
        import leather
    except ImportError:
        raise ConfigError("plots need the extra `simulate`: pip install leather", field="out") from None
    return leather


def plots_of(m: Measures, num_blocks: int) -> dict[str, str]:
    """File name to SVG."""
    steps = m.steps.rows()
    started = m.first >= 0
    ttft = (m.first[started] - m.arrival[started]) / 1e6
    found = {}
    if len(ttft):
        found["ttft.svg"] = line_chart(
            "Time to first token",
            ("% of requests", "ms"),
            {"TTFT": [(q, float(v)) for q, v in zip(_QUANTILES, np.percentile(ttft, _QUANTILES), strict=True)]},
        )
    if len(m.gaps):
        found["itl.svg"] = line_chart(
            "Time between tokens",
            ("% of tokens", "ms"),
            {"ITL": [(q, m.gaps.percentile_ns(q) / 1e6) for q in _QUANTILES]},
        )
    if len(steps):
        found |= _over_time(steps, num_blocks, len({int(e) for e in np.unique(steps["executor"])}))
    if m.tenants is not None:
        times, served, _ = m.tenants.samples()
        thin = slice(None, None, max(1, len(times) // _POINTS))
        names = [name or "(none)" for name in m.trace.tenants]
        found["tenants.svg"] = line_chart(
            "Served to each tenant",
            ("s", "weighted tokens"),
            {
                name: list(zip((times[thin] / 1e9).tolist(), served[thin, index].tolist(), strict=True))
                for index, name in enumerate(names)
            },
        )
    return found


def _over_time(steps: NDArray[np.void], num_blocks: int, num_executors: int) -> dict[str, str]:
    """Sums and means per window of virtual time."""
    end = steps["end_ns"] / 1e9
    edges = np.linspace(0, float(end.max()) + 1e-9, _POINTS + 1)
    window = np.minimum(np.searchsorted(edges, end, side="right") - 1, _POINTS - 1)
    count = np.bincount(window, minlength=_POINTS)
    middle = ((edges[:-1] + edges[1:]) / 2).tolist()
    length = float(edges[1] - edges[0])

    def rate(column: str) -> list[tuple[float, float]]:
        total = np.bincount(window, weights=steps[column], minlength=_POINTS)
        return list(zip(middle, (total / length).tolist(), strict=True))

    def mean(values: NDArray[Any], scale: float = 1.0) -> list[tuple[float, float]]:
        total = np.bincount(window, weights=values, minlength=_POINTS)
        return [(x, float(t / c * scale)) for x, t, c in zip(middle, total, count, strict=True) if c]

    used = 1 - steps["free_blocks"] / num_blocks
    admitted, cached = (
        np.bincount(window, weights=steps[c], minlength=_POINTS) for c in ("admitted_tokens", "cached_tokens")
    )
    hits = [(x, float(100 * c / a)) for x, a, c in zip(middle, admitted, cached, strict=True) if a]
    preempted = np.zeros(_POINTS)
    for executor in range(num_executors):
        own = steps["executor"] == executor
        np.add.at(preempted, window[own], np.diff(steps["preemptions"][own], prepend=0))
    return {
        "throughput.svg": line_chart(
            "Tokens computed", ("s", "tokens/s"), {"decode": rate("decode_tokens"), "prefill": rate("prefill_tokens")}
        ),
        "queue.svg": line_chart(
            "Sequences",
            ("s", ""),
            {"running": mean(steps["running"], num_executors), "waiting": mean(steps["waiting"])},
        ),
        "kv.svg": line_chart("KV blocks in use", ("s", "%"), {"in use": mean(used, 100.0)}),
        "cache.svg": line_chart("Tokens found in the prefix cache, of those admitted", ("s", "%"), {"found": hits}),
        "preemptions.svg": line_chart(
            "Preemptions so far",
            ("s", ""),
            {"preemptions": list(zip(middle, np.cumsum(preempted).tolist(), strict=True))},
        ),
    }


def capacity_plot(capacity: Capacity) -> str:
    probes = sorted(capacity.probes, key=lambda probe: probe.rate)
    limit = [(probes[0].rate, capacity.objective.limit), (probes[-1].rate, capacity.objective.limit)]
    return line_chart(
        f"Capacity: {capacity.rate:.3g} requests/s keep {capacity.objective}",
        ("requests/s", capacity.objective.number),
        {
            capacity.objective.number: [(p.rate, p.value) for p in probes if np.isfinite(p.value)],
            "objective": limit,
        },
        dots=True,
    )


def line_chart(title: str, axes: tuple[str, str], series: Series, dots: bool = False) -> str:
    """An SVG document: the same series give the same bytes. Raises ConfigError without leather."""
    chart: Any = _leather().Chart(title)
    chart.add_x_axis(name=axes[0])
    chart.add_y_axis(name=axes[1])
    for (name, points), colour in zip(series.items(), cycle(_COLOURS)):
        chart.add_line(points, name=name, stroke_color=colour, width=2)
    if dots:
        chart.add_dots(next(iter(series.values())), name="tried", fill_color=_COLOURS[0])
    text: str = chart.to_svg(width=_WIDTH, height=_HEIGHT)
    # The library's font is one that only some machines have.
    return text.replace('"Monaco"', '"sans-serif"') + "\n"
