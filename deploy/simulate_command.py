"""`stepwire simulate`: the real scheduler core against modelled executors; what would this configuration do?"""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.config import load_config
from common.errors import ConfigError
from deploy.progress import ProgressLine
from scheduler_svc.app import core_config
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.simulate.capacity import Capacity, Probe, find_capacity, parse_objective
from scheduler_svc.simulate.fit import fit_steps, read_steps
from scheduler_svc.simulate.lengths import parse_lengths
from scheduler_svc.simulate.plots import capacity_plot, check_available, plots_of
from scheduler_svc.simulate.report import meaning, shown, write_report
from scheduler_svc.simulate.results import Results, check_steps_path, conditions_of, results_of, write_steps
from scheduler_svc.simulate.simulation import Setup, Simulation
from scheduler_svc.simulate.step_model import StepModel, built_in, load_model, save_model
from scheduler_svc.simulate.trace_file import FileWorkload
from scheduler_svc.simulate.workload import DrawnWorkload, Workload

_OF_TENANTS: Final = ("requests", "finished", "output_tokens", "p50_ttft_ms", "p99_ttft_ms", "contended_share")
_DRAWN: Final = (
    "requests", "burst", "concurrency", "prompt_tokens", "output_tokens", "prefixes", "prefix_tokens", "tenants",
    "priorities", "deadline_s",
)  # fmt: skip
_SHAPE: Final = ("block_size", "num_blocks", "max_tokens_per_step", "max_context")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stepwire simulate",
        allow_abbrev=False,
        description="Runs the real scheduler core against modelled executors in virtual time.",
        epilog="All settings of the scheduler (stepwire scheduler --help) are taken too, from flags, environment and"
        " --config: what is simulated is the configuration that would run. docs/simulation/README.md tells more.",
    )
    add = parser.add_argument
    add("--step-model", default="smollm2-135m-cpu", help=f"{', '.join(built_in())} or a JSON file (%(default)s)")
    add("--num-executors", type=int, default=1, help="1 to 64 (%(default)s)")
    for name in _SHAPE:
        add("--" + name.replace("_", "-"), type=int, help="of an executor; else the step model's")
    add("--executor-max-num-seqs", type=int, help="of an executor; else the step model's")
    add("--network-us", type=float, default=100.0, help="one way, scheduler to executor (%(default)s)")
    add("--loop-us", type=float, default=50.0, help="the scheduler's time for a plan, and for a result (%(default)s)")
    add("--requests", type=int, default=1000, help="how many arrive (%(default)s)")
    add("--rate", type=float, help="requests per second, on average (1, or what the file of arrivals has)")
    add("--burst", metavar="ON,OFF", help="seconds of arrivals, seconds of silence, in turn")
    add("--concurrency", type=int, default=0, help="instead of a rate: so many callers, one request after the other")
    add("--arrivals", type=Path, metavar="FILE", help="instead of drawn ones: JSON lines, see the docs")
    add("--prompt-tokens", default="256", help="512, uniform:LOW,HIGH or lognormal:MEAN,SIGMA[,MAX] (%(default)s)")
    add("--output-tokens", default="128", help="the same (%(default)s)")
    add("--prefixes", type=int, default=0, help="shared prefixes that prompts begin with (%(default)s)")
    add("--prefix-tokens", type=int, default=0, help="tokens of each of them (%(default)s)")
    add("--tenants", default="", metavar="A=3,B=1", help="tenants and their shares of the requests")
    add("--priorities", default="", metavar="0=9,5=1", help="priorities and their shares of the requests")
    add("--deadline-s", type=float, default=0.0, help="callers leave after so long; 0: never")
    add("--seed", type=int, default=1)
    add("--find-capacity", metavar="OBJECTIVE", help="the highest rate that keeps it, like p99_ttft_ms<=500")
    add("--fit", type=Path, metavar="FILE", help="only fit a step model to steps measured by bench.step_times")
    add("--save-model", type=Path, metavar="FILE", help="where --fit writes the model")
    add("--steps", type=Path, metavar="FILE", help="write every step, as .jsonl or .csv")
    add("--out", type=Path, metavar="FOLDER", help="write report.md, report.json and plots")
    add("--json", action="store_true", help="print one JSON object: conditions, results")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Returns the exit status. Raises ConfigError, OSError."""
    args, rest = _parser().parse_known_args(list(arguments))
    if args.fit is not None:
        return _fit(args.fit, args.save_model, args.json)
    config = core_config(load_config(SchedulerConfig, rest).config)
    if args.steps is not None:
        check_steps_path(args.steps)
    if args.out is not None:
        check_available()
    model = _model(args)
    setup = Setup(args.num_executors, args.network_us, args.loop_us, args.seed)
    workload = _workload(args)
    console = Console(stderr=args.json, highlight=False)
    command = "stepwire simulate " + shlex.join(arguments)

    def simulate(rate: float | None) -> tuple[Simulation, Results]:
        trace = workload.trace(rate)
        progress = ProgressLine(unit="requests") if sys.stderr.isatty() else None
        simulation = Simulation(config, trace, model, setup, _requests(progress) if progress else None)
        simulation.run()
        if progress is not None:
            progress.done()
        return simulation, results_of(simulation, conditions_of(config, model, setup, trace.description))

    capacity = None
    if args.find_capacity:
        capacity = _capacity(args.find_capacity, args.rate or 1.0, lambda rate: simulate(rate)[1], console)
    simulation, results = simulate(capacity.rate if capacity is not None and capacity.rate else args.rate)
    _show(console, results)
    if args.steps is not None:
        write_steps(simulation.measures.steps.rows(), args.steps)
    if args.out is not None:
        plots = {"capacity.svg": capacity_plot(capacity)} if capacity is not None else {}
        plots |= plots_of(simulation.measures, model.executor.num_blocks)
        write_report(args.out, command, results, plots, capacity)
    if args.json:
        print(json.dumps(_with_capacity(results, capacity)))
    return 0


def _with_capacity(results: Results, capacity: Capacity | None) -> dict[str, object]:
    found = results.as_json()
    if capacity is not None:
        found["capacity"] = {
            "objective": str(capacity.objective),
            "requests_per_s": capacity.rate,
            "probes": [{"requests_per_s": p.rate, "value": p.value, "holds": p.holds} for p in capacity.probes],
        }
    return found


# ------------------------------------------------------------------------------------------------------------ parts


def _model(args: argparse.Namespace) -> StepModel:
    model = load_model(args.step_model)
    given = {name: value for name in _SHAPE if (value := getattr(args, name)) is not None}
    if args.executor_max_num_seqs is not None:
        given["max_num_seqs"] = args.executor_max_num_seqs
    for name, value in given.items():
        if value < 1:
            raise ConfigError(f"{name}: {value} is below 1", field=name)
    return model.model_copy(update={"executor": model.executor.model_copy(update=given)})


def _workload(args: argparse.Namespace) -> Workload:
    if args.arrivals is not None:
        _check_nothing_is_drawn(args)
        return FileWorkload(args.arrivals)
    burst = None
    if args.burst:
        burst = _numbers(args.burst, "burst", 2)
    return DrawnWorkload(
        requests=args.requests,
        rate=1.0 if args.rate is None else args.rate,
        prompt=parse_lengths(args.prompt_tokens, "prompt_tokens"),
        output=parse_lengths(args.output_tokens, "output_tokens"),
        burst=(burst[0], burst[1]) if burst else None,
        concurrency=args.concurrency,
        prefixes=args.prefixes,
        prefix_tokens=args.prefix_tokens,
        tenants=_shares(args.tenants, "tenants") or (("", 1.0),),
        priorities=tuple((_priority(name), share) for name, share in _shares(args.priorities, "priorities"))
        or ((0, 1.0),),
        deadline_s=args.deadline_s,
        seed=args.seed,
    )


def _check_nothing_is_drawn(args: argparse.Namespace) -> None:
    """Raises ConfigError for a flag that would shape drawn requests: those of a file have a shape."""
    parser = _parser()
    for name in _DRAWN:
        if getattr(args, name) != parser.get_default(name):
            raise ConfigError(f"{name}: goes with drawn requests; arrivals has them from a file", field=name)


def _numbers(text: str, field: str, count: int) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise ConfigError(f"{field} {text!r}: write {count} numbers with commas", field=field)
    return numbers


def _shares(text: str, field: str) -> tuple[tuple[str, float], ...]:
    """`a=3,b=1`; `a,b` means equal shares."""
    found = []
    for part in filter(None, text.split(",")):
        name, equals, share = part.partition("=")
        value = _numbers(share, field, 1)[0] if equals else 1.0
        if value <= 0:
            raise ConfigError(f"{field} {text!r}: a share must be above 0", field=field)
        found.append((name.strip(), value))
    return tuple(found)


def _priority(name: str) -> int:
    try:
        return int(name)
    except ValueError:
        raise ConfigError(f"priorities {name!r}: not a whole number", field="priorities") from None


def _capacity(text: str, start: float, simulate: Callable[[float], Results], console: Console) -> Capacity:
    objective = parse_objective(text)

    def watch(probe: Probe) -> None:
        told = "kept" if probe.holds else "missed"
        console.print(f"  {probe.rate:10.4g} requests/s   {objective.number} {shown(probe.value):>10}   {told}")

    console.print(f"looking for the highest rate that keeps {objective}")
    capacity = find_capacity(simulate, objective, start, watch=watch)
    console.print(f"{capacity.rate:.4g} requests per second keep {objective}" if capacity.rate else "no rate keeps it")
    return capacity


def _requests(progress: ProgressLine) -> Callable[[int, int], None]:
    return lambda done, total: progress("simulating", done, total)


def _show(console: Console, results: Results) -> None:
    table = Table(show_header=False, box=None)
    for name, value in results.numbers.items():
        table.add_row(name, shown(value), meaning(name), style="bold" if name.startswith("p99") else "")
    table.columns[1].justify = "right"
    console.print(table)
    if results.tenants:
        by_tenant = Table("tenant", *_OF_TENANTS, box=None)
        for tenant, row in results.tenants.items():
            by_tenant.add_row(Text(tenant), *(shown(row[name]) for name in _OF_TENANTS))
        console.print(by_tenant)


def _fit(path: Path, save: Path | None, as_json: bool) -> int:
    header, steps = read_steps(path)
    fit = fit_steps(header, steps, (save or path).stem)
    if save is not None:
        save_model(fit.model, save)
    cost = fit.model.costs[0].model_dump()
    if as_json:
        print(json.dumps({"conditions": dict(header.conditions), "results": {**cost, "residual": fit.model.residual}}))
        return 0
    console = Console(highlight=False)
    for name, value in (cost | fit.model.residual).items():
        console.print(f"  {name:<18} {value:g}")
    console.print("errors are relative, of the steps kept; disturbed steps were left out")
    return 0
