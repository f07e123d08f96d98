"""SVG plots of a simulation, by file name. Needs the extra `simulate` (pygal)."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from scheduler_svc.simulate.capacity import Capacity
from scheduler_svc.simulate.measures import Measures

_POINTS: Final = 200
_QUANTILES: Final = (*range(0, 99, 2), 99, 99.5, 99.9)
Series = Mapping[str, list[tuple[float, float]]]


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
        times, computed, _ = m.tenants.samples()
        thin = slice(None, None, max(1, len(times) // _POINTS))
        names = [name or "(none)" for name in m.trace.tenants]
        found["tenants.svg"] = line_chart(
            "Tokens computed for each tenant",
            ("s", "tokens"),
            {
                name: list(zip((times[thin] / 1e9).tolist(), computed[thin, index].tolist(), strict=True))
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
    """An SVG document without scripts; the same series give the same bytes. Raises ConfigError without pygal."""
    try:
        import pygal
        from pygal.style import Style
    except ImportError:
        raise ConfigError("plots need the extra `simulate`: pip install pygal", field="out") from None
    chart: Any = pygal.XY(
        js=[],
        title=title,
        x_title=axes[0],
        y_title=axes[1] or None,
        show_dots=dots,
        width=760,
        height=340,
        explicit_size=True,
        legend_at_bottom=True,
        include_x_axis=True,
        show_x_guides=False,
        style=Style(
            background="white", plot_background="white", opacity="1", font_family="sans-serif", title_font_size=15,
            legend_font_size=12, colors=("#1f6feb", "#d1242f", "#1a7f37", "#bf8700", "#8250df", "#57606a"),
        ),
    )  # fmt: skip
    chart.uuid = title.partition(":")[0].lower().replace(" ", "-")
    for name, points in series.items():
        chart.add(name, points)
    chart.add_xml_filter(_without_scripts)
    text: str = chart.render(is_unicode=True, disable_xml_declaration=True)
    return text + "\n"


def _without_scripts(root: Any) -> Any:
    """Scripts make nothing but tooltips, and comments carry today's date."""
    for parent in list(root.iter()):
        for child in list(parent):
            if not isinstance(child.tag, str) or child.tag.rpartition("}")[2] == "script":
                parent.remove(child)
    return root
