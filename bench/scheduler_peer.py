"""vLLM's schedulers beside ours in one run: their process, the turns it takes, ratios.

They run under a Python of their own (bench/peers/vllm_scheduler.py). While one side measures, the other waits.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from threading import Timer
from typing import Any, Final, Self

from bench.peers.base import output_of

SCRIPT: Final = Path(__file__).parent / "peers" / "vllm_scheduler.py"
CASES: Final = ("steady", "churn", "queued")
ROW_STEPS: Final = 204_800  # rows times steps of a case at most: a step of theirs with 1024 rows takes 15 ms
MAX_QUEUED: Final = 10_000  # 100,000 take each of theirs about 13 s to fill
IN_TURNS: Final = "in turns with ours in this run; schedule + update alone, no wire: ours has it in both directions"
_START_S, _TURN_S, _END_S, _TAIL = 300.0, 120.0, 5.0, 2000

# vLLM 0.32.0, its Scheduler class alone on this kind of machine (2 virtual cores, Python 3.11): p50 in µs of schedule()
# and update_from_output(), decoding rows in steady state, no serialisation. `async`: its AsyncScheduler.
RECORDED: Final = {
    "vllm 0.32 Scheduler": {32: (279, 122), 256: (1990, 900), 1024: (8700, 4340)},
    "vllm 0.32 AsyncScheduler": {32: (264, 170), 256: (2000, 1360), 1024: (9200, 6400)},
}
FROM_ANOTHER_RUN: Final = "p50 of schedule + update alone, no wire; from another run on this kind of machine"


def recorded() -> dict[str, dict[str, object]]:
    """By scheduler and size."""
    return {
        name: {str(rows): {"schedule_us": a, "update_us": b} for rows, (a, b) in of.items()}
        for name, of in RECORDED.items()
    }


def recorded_table(num_rows: int) -> str:
    known = [(name, of[num_rows]) for name, of in RECORDED.items() if num_rows in of]
    return "\n".join(f"{name}: {a} + {b} ({FROM_ANOTHER_RUN})" for name, (a, b) in known)


def missing(python: str) -> str:
    """Why it can not be measured with that interpreter; empty: it can."""
    try:
        said = output_of([python, "-I", "-c", "from importlib.util import find_spec; print(find_spec('vllm') and 1)"])
    except OSError as error:
        return str(error)
    return "" if said == "1" else f"{python} has no vllm: {said[-300:]}"


def steps_in_turns(num_rows: int, steps: int, turns: int) -> int:
    """How many of their steps each of `turns` has beside `steps` of ours."""
    return max(1, min(steps, ROW_STEPS // num_rows) // turns)


class VllmSchedulers:
    """Their process, ready to be measured once constructed; ended with the context. `options`: of the script, by name.

    Raises RuntimeError, with the end of what it said, when it ends or does not answer in time.
    """

    def __init__(self, python: str, options: Mapping[str, int], turn: int, script: Path = SCRIPT) -> None:
        self._turn = turn
        self._log = tempfile.NamedTemporaryFile(prefix="stepwire-peer-")  # noqa: SIM115
        flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        # Started as its users start it: neither our packages nor our choice of allocator.
        environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONMALLOC", "GLIBC_TUNABLES")}
        environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        self._process = subprocess.Popen(
            [python, "-I", str(script), *flags, "--in-turns"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environ,
        )  # fmt: skip
        try:
            self._await_ready(_START_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def run_turn(self) -> None:
        self._tell(self._turn)
        self._await_ready(_TURN_S)

    def report(self) -> dict[str, Any]:
        """The script's object: conditions, results. Afterwards there are no more turns."""
        self._tell(0)
        found: dict[str, Any] = json.loads(self._line(_TURN_S))
        return found

    def _tell(self, steps: int) -> None:
        assert self._process.stdin is not None
        try:
            print(steps, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failure() from None

    def _await_ready(self, limit_s: float) -> None:
        while self._line(limit_s).strip() != "ready":
            pass  # what a package says while it is imported

    def _line(self, limit_s: float) -> str:
        assert self._process.stdout is not None
        limit = Timer(limit_s, self._process.kill)
        limit.start()
        try:
            line = self._process.stdout.readline()
        finally:
            limit.cancel()
        if not line:
            raise self._failure()
        return line

    def _failure(self) -> RuntimeError:
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        said = Path(self._log.name).read_text(errors="replace")[-_TAIL:]
        return RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}: {said}")


def beside(ours: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Their results by scheduler, in the shape of ours of one size: `steady` flat, the other cases inside. `ours`: by
    case. `ours_to_theirs`: ratios of the sums, so under 1 where ours is cheaper."""
    release = report["conditions"]["vllm"]
    found: dict[str, dict[str, Any]] = {}
    for scheduler, by_case in report["results"].items():
        cases = {case: _with_ratio(ours[case], by_case[case]) for case in CASES if case in by_case}
        found[f"vllm {release} {scheduler}"] = {**cases.pop("steady"), **cases}
    return found


def _with_ratio(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    parts = theirs["parts"]
    return {
        **theirs,
        "schedule_us": parts["schedule"]["p50_us"],
        "update_us": parts["update"]["p50_us"],
        "ours_to_theirs": {p: round(ours[f"{p}_us"] / theirs[f"{p}_us"], 4) for p in ("p50", "p99")},
    }


def table(peers: Mapping[str, Mapping[str, Any]]) -> str:
    """What `beside` found, for a person to read."""
    head = "".join(f"{title:>20}" for title in ("sum", "schedule", "update", "ours / theirs"))
    lines = [f"theirs, µs as p50 / p99, {IN_TURNS}", f"{'':29}{'':8}{head}{'steps':>8}{'ended':>8}{'waiting':>8}"]
    for name, found in peers.items():
        for case in CASES:
            if of := found if case == "steady" else found.get(case):
                cells = [f"{r['p50_us']} / {r['p99_us']}" for r in (of, of["parts"]["schedule"], of["parts"]["update"])]
                cells.append("{p50:.2g} / {p99:.2g}".format(**of["ours_to_theirs"]))
                counts = "".join(f"{of[count]:>8}" for count in ("steps", "ended", "waiting"))
                lines.append(f"{name:29}{case:8}" + "".join(f"{cell:>20}" for cell in cells) + counts)
    return "\n".join(lines)
