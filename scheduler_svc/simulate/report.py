"""A simulation as a folder: report.md with its plots, and report.json."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from scheduler_svc.simulate.capacity import Capacity
from scheduler_svc.simulate.results import Results

# Names of numbers and what they are, in the order of tables.
MEANINGS: Final[dict[str, str]] = {
    "requests": "requests offered",
    "finished": "requests that got their whole output",
    "duration_s": "first arrival to last token, s",
    "requests_per_s": "finished requests per second",
    "output_tokens": "generated tokens",
    "output_tokens_per_s": "generated tokens per second",
    "prefill_tokens": "prompt tokens computed, those recomputed after a preemption included",
    "p50_ttft_ms": "time to first token, median, ms",
    "p95_ttft_ms": "time to first token, 95th percentile, ms",
    "p99_ttft_ms": "time to first token, 99th percentile, ms",
    "p50_latency_ms": "arrival to last token, median, ms",
    "p95_latency_ms": "arrival to last token, 95th percentile, ms",
    "p99_latency_ms": "arrival to last token, 99th percentile, ms",
    "p50_itl_ms": "time between tokens, median, ms",
    "p95_itl_ms": "time between tokens, 95th percentile, ms",
    "p99_itl_ms": "time between tokens, 99th percentile, ms",
    "mean_itl_ms": "time between tokens, mean, ms",
    "preemptions": "preemptions",
    "hit_rate": "share of the prompt tokens looked for in the prefix cache that were there",
    "steps": "steps",
    "p50_step_ms": "step on the device, median, ms",
    "p95_step_ms": "step on the device, 95th percentile, ms",
    "p99_step_ms": "step on the device, 99th percentile, ms",
    "mean_sequences": "sequences in a step, mean",
    "most_waiting": "waiting requests, most",
    "least_free_blocks": "free KV blocks of an executor, fewest",
    "device_busy_share": "share of the time an executor computes, mean",
    "contended_s": "time in which requests of every tenant waited for admission, s",
    "fairness": "Jain's index of what tenants were served in that time, by their weights (1: equal)",
    "contended_share": "share of what was served in that time",
}


def shown(value: float) -> str:
    """For people: four digits that count, or a dash for nothing measured."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def meaning(name: str) -> str:
    return MEANINGS.get(name, f"requests {name.replace('_', ' ', 1).replace('_', ': ')}")


def write_report(
    out: Path, command: str, results: Results, plots: Mapping[str, str], capacity: Capacity | None = None
) -> None:
    """Creates the folder `out`; files of the same names are replaced."""
    out.mkdir(parents=True, exist_ok=True)
    for name, svg in plots.items():
        (out / name).write_text(svg, encoding="utf-8")
    (out / "report.json").write_text(json.dumps(results.as_json(), indent=2) + "\n", encoding="utf-8")
    (out / "report.md").write_text(_markdown(command, results, plots, capacity), encoding="utf-8")


def _markdown(command: str, results: Results, plots: Mapping[str, str], capacity: Capacity | None) -> str:
    lines = ["# Simulation", "", "Made by", "", "```sh", command, "```", ""]
    if capacity is not None:
        above = "none tried was too high" if math.isinf(capacity.above) else f"{capacity.above:.4g}/s was too high"
        lines += [
            f"**{capacity.rate:.4g} requests per second keep {capacity.objective}** ({above}). All else below is at"
            " that rate.",
            "",
            f"| requests/s | {capacity.objective.number} | objective |",
            "|---|---|---|",
            *(f"| {p.rate:.4g} | {shown(p.value)} | {'kept' if p.holds else 'missed'} |" for p in capacity.probes),
            "",
        ]
    lines += ["| | |", "|---|---|", *(f"| {meaning(k)} | {shown(v)} |" for k, v in results.numbers.items()), ""]
    if results.tenants:
        names = next(iter(results.tenants.values())).keys()
        lines += [f"| tenant | {' | '.join(meaning(name) for name in names)} |", "|---" * (len(names) + 1) + "|"]
        for tenant, row in results.tenants.items():
            lines.append(f"| {tenant} | {' | '.join(shown(value) for value in row.values())} |")
        lines.append("")
    lines += [f"![{name.removesuffix('.svg')}]({name})\n" for name in plots]
    lines += ["## Conditions", "", "```json", json.dumps(results.conditions, indent=2), "```", ""]
    return "\n".join(lines)
