"""What bench.gpu found, as Markdown for bench/results/."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from bench.gpu_shapes import IDLE_GOAL_US, PEER, SPLIT_GOAL_PERCENT, VECTOR_GOAL_TB_PER_S

Row = dict[str, Any]
Rows = Sequence[Row]

# Rows by their `what`: title, columns, what is said below.
SECTIONS: Final = {
    "table": (
        "Through the public API",
        ("model", "workload", "unit", "value", "vllm", "of_vllm", "floor", "of_floor", "goal", "reached",
         "output_tokens_per_s", "ms_per_token", "alone_tokens_per_s", "split_cost_percent", "split_reached",
         "ttft_ms", "gap_ms", "cpu_us_per_token", "client_cpu_share", "runs"),
        f"vllm, floor: {PEER} Ratios above 1 are ahead of it. `runs`: wall seconds, of which the one in the middle "
        "counts, from the first request sent to the last token received; `ms_per_token` and `split_cost_percent` hold "
        f"for that whole wall, too; `split_reached`: at most {SPLIT_GOAL_PERCENT:.0f} %. `cpu_us_per_token`: what each "
        "process spent, prompts included.",
    ),
    "depth": (
        "Other pipeline depths",
        ("model", "workload", "pipeline_depth", "output_tokens_per_s", "ms_per_token", "ttft_ms", "gap_ms", "runs"),
        "",
    ),
    "alone": (
        "The executor alone: plans of the same workload replayed, no scheduler, no wire",
        ("model", "workload", "pipeline_depth", "steps", "output_tokens_per_s", "ms_per_token", "device_us",
         "prepare_us", "idle_us", "modes"),
        "`prepare_us`: from a plan's taking to its launch. Every step counts, those with prompts too.",
    ),
    "steps": (
        "Device idle before steps that only decode, after one that did too",
        ("model", "workload", "pipeline_depth", "steps", "steady_steps", "graph_steps", "lost", "idle_us", "reached",
         "device_us", "idle_share", "histogram_us", "round_trip_us", "cached_tokens"),
        f"`reached`: p50 at most {IDLE_GOAL_US['p50']:.0f} µs, p99 at most {IDLE_GOAL_US['p99']:.0f} µs. Events on the "
        "device, not host clocks; a run of its own, watched through Admin.WatchSteps.",
    ),
    "check": (
        "Checks",
        ("name", "right", "error_rms", "library_error_rms", "different", "different_without_graphs",
         "different_unpadded", "different_launched_early", "products"),
        "`error_rms`: of logprobs, against transformers in float32; `library_error_rms`: that of transformers in "
        "bfloat16. `different_without_graphs`: tokens of graphs against those of the same steps launched one by one, "
        "all of the same shapes: none may differ; `different_unpadded`: padded steps may, where two tokens are all but "
        "equal.",
    ),
    "start-up": ("Start-up, seconds from the first to the last line in the log", ("model", "seconds", "log"), ""),
    "memory": ("The device once the service stands", ("model", "device"), ""),
}  # fmt: skip
KERNELS: Final = (
    "kernel", "model", "what", "us", "torch_us", "ratio", "of_bound", "error", "right", "tb_per_s", "reached",
    "torch_tb_per_s", "tflop_per_s", "bytes_per_s", "flops_per_s", "best", "by_rule_us",
)  # fmt: skip
KERNELS_NOTE: Final = f"`reached`: products of one row, at least {VECTOR_GOAL_TB_PER_S} TB/s."


def record(conditions: Row, results: dict[str, list[Row]]) -> str:
    """`results`: rows by part, and "endings"."""
    rows = [row for part, own in results.items() if part != "endings" for row in own]
    lines = ["# bench.gpu", "", *(f"- {name}: {shown(value)}" for name, value in conditions.items() if value != ""), ""]
    lines += table("How the parts ended", results["endings"], ("part", "ended", "wall_s"))
    wrong = [row for row in rows if row.get("right") is False]
    lines += ["## Wrong", "", *(f"- {shown(row)}" for row in wrong), ""] if wrong else []
    for what, (title, columns, note) in SECTIONS.items():
        lines += table(title, [row for row in rows if row.get("what") == what], columns, note)
    lines += table("Kernels", [row for row in rows if "kernel" in row], KERNELS, KERNELS_NOTE)
    setups = [row for row in rows if row.get("what") == "setup"]
    lines += table("Set-up", setups, [name for name in setups[0] if name != "what"] if setups else [])
    return "\n".join(lines).rstrip()


def table(title: str, rows: Rows, columns: Iterable[str], note: str = "") -> list[str]:
    """Columns that no row has are left out. Nothing of no rows."""
    if not rows:
        return []
    kept = [name for name in columns if any(row.get(name) is not None for row in rows)]
    lines = [f"## {title}", "", f"| {' | '.join(kept)} |", f"|{'---|' * len(kept)}"]
    lines += [f"| {' | '.join(shown(row.get(name)) for name in kept)} |" for row in rows]
    return [*lines, "", *([note, ""] if note else [])]


def shown(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "**no**"
        case float():
            return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
        case dict():
            return ", ".join(f"{name} {shown(own)}" for name, own in value.items())
        case list() | tuple():
            return "; ".join(map(shown, value))
    return str(value).replace("|", "\\|")
