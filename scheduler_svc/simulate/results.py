"""What a simulation came to: conditions, numbers by name, the list of steps."""

import csv
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.simulate.measures import STEP_COLUMNS, Measures
from scheduler_svc.simulate.simulation import Setup, Simulation
from scheduler_svc.simulate.step_model import StepModel

PERCENTILES: Final = (50, 95, 99)
_MS: Final = 1e6
_S: Final = 1e9


@dataclass(frozen=True)
class Results:
    """numbers: by name, see docs/simulation/README.md; nan where nothing was measured. tenants: the same by tenant,
    empty with one tenant."""

    conditions: Mapping[str, object]
    numbers: Mapping[str, float]
    tenants: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def all_served(self) -> bool:
        return self.numbers["finished"] == self.numbers["requests"]

    def as_json(self) -> dict[str, object]:
        """JSON has no nan: such numbers are null."""
        return {
            "conditions": dict(self.conditions),
            "results": {
                **_plain(self.numbers),
                **({"tenants": {name: _plain(row) for name, row in self.tenants.items()}} if self.tenants else {}),
            },
        }


def _plain(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else round(value, 4) for name, value in numbers.items()}


def conditions_of(
    config: CoreConfig, model: StepModel, setup: Setup, workload: Mapping[str, object]
) -> dict[str, object]:
    return {
        "workload": dict(workload),
        "core": asdict(config),
        "setup": asdict(setup),
        "step_model": {
            "name": model.name,
            "origin": model.origin,
            "costs": [cost.model_dump() for cost in model.costs],
            "executor": model.executor.model_dump(),
            "buckets": list(model.buckets),
        },
    }


def results_of(simulation: Simulation, conditions: Mapping[str, object]) -> Results:
    m, stats = simulation.measures, simulation.stats
    steps = m.steps.rows()
    duration = (int(m.last.max()) - int(m.arrival[m.arrival >= 0].min())) / _S if (m.last >= 0).any() else math.nan
    output = int(m.tokens.sum())
    lengths = (steps["end_ns"] - steps["start_ns"]) / _MS
    numbers: dict[str, float] = {
        "requests": len(m.trace),
        "finished": stats.requests_finished,
        **{_key(why): count for why, count in sorted(m.ended_by.items())},
        "duration_s": duration,
        "requests_per_s": stats.requests_finished / duration if duration else math.nan,
        "output_tokens": output,
        "output_tokens_per_s": output / duration if duration else math.nan,
        "prefill_tokens": int(steps["prefill_tokens"].sum()),
        **_request_times(m, slice(None)),
        **{f"p{p}_itl_ms": m.gaps.percentile_ns(p) / _MS for p in PERCENTILES},
        "mean_itl_ms": m.gaps.mean_ns() / _MS,
        "preemptions": stats.preemptions,
        "hit_rate": stats.cache_hit_tokens / stats.cache_queried_tokens if stats.cache_queried_tokens else 0.0,
        "steps": len(steps),
        **_percentiles("step_ms", lengths),
        "mean_sequences": float(steps["num_sequences"].mean()) if len(steps) else math.nan,
        "most_waiting": int(steps["waiting"].max(initial=0)),
        "least_free_blocks": int(steps["free_blocks"].min()) if len(steps) else math.nan,
        "device_busy_share": float(lengths.sum()) / 1000 / simulation.num_executors / duration
        if duration
        else math.nan,
    }
    tenants = _tenants(m)
    if m.tenants is not None:
        seconds, served = m.tenants.contended()
        numbers["contended_s"] = seconds
        numbers["fairness"] = jain(served / m.tenants.weights) if seconds else math.nan
    return Results(conditions, numbers, tenants)


def _key(why: str) -> str:
    """`refused: TooLarge` is the number `refused_too_large`, `DeadlinePassed` is `ended_deadline_passed`."""
    kind, _, error = why.rpartition(": ")
    return (kind or "ended") + re.sub(r"([A-Z])", r"_\1", error).lower()


def _percentiles(name: str, values: NDArray[np.float64]) -> dict[str, float]:
    if not len(values):
        return {f"p{p}_{name}": math.nan for p in PERCENTILES}
    return dict(zip((f"p{p}_{name}" for p in PERCENTILES), map(float, np.percentile(values, PERCENTILES)), strict=True))


def _request_times(m: Measures, chosen: slice | NDArray[np.bool_]) -> dict[str, float]:
    arrival, first, end = m.arrival[chosen], m.first[chosen], m.end[chosen]
    started, done = first >= 0, end >= 0
    return {
        **_percentiles("ttft_ms", (first[started] - arrival[started]) / _MS),
        **_percentiles("latency_ms", (end[done] - arrival[done]) / _MS),
    }


def _tenants(m: Measures) -> dict[str, dict[str, float]]:
    if m.tenants is None:
        return {}
    _, served = m.tenants.contended()
    found = {}
    for index, name in enumerate(m.trace.tenants):
        own = m.trace.tenant == index
        found[name or "(none)"] = {
            "requests": int(own.sum()),
            "finished": int((m.end[own] >= 0).sum()),
            "output_tokens": int(m.tokens[own].sum()),
            **_request_times(m, own),
            "contended_share": float(served[index] / served.sum()) if served.sum() else math.nan,
        }
    return found


def jain(values: NDArray[np.float64]) -> float:
    """Jain's index of fairness: 1 when all are equal, 1/n when one has it all."""
    squares = float((values**2).sum())
    return float(values.sum()) ** 2 / (len(values) * squares) if squares else math.nan


# ---------------------------------------------------------------------------------------------------------- steps


def check_steps_path(path: Path) -> None:
    """Raises ConfigError when `write_steps` could not tell the format."""
    if path.suffix not in (".jsonl", ".csv"):
        raise ConfigError(f"{path}: write steps to a .jsonl or a .csv file", field="steps")


def write_steps(steps: NDArray[np.void], path: Path) -> None:
    """One line per step, in the order of planning: JSON objects for `.jsonl`, CSV for `.csv`. Raises ConfigError for
    any other ending."""
    check_steps_path(path)
    names = list(STEP_COLUMNS.names or ())
    with path.open("w", encoding="utf-8", newline="") as out:
        if path.suffix == ".csv":
            writer = csv.writer(out)
            writer.writerow(names)
            writer.writerows(row.tolist() for row in steps)
        else:
            for row in steps:
                out.write(json.dumps(dict(zip(names, row.tolist(), strict=True))) + "\n")
