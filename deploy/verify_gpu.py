"""What can be shown of deploy/compose.gpu.yml on a machine without a GPU: what it adds, and its image on the CPU.

    sh deploy/verify-compose --cuda-image [--record FILE]

The image is built with a CUDA build of torch from a folder of wheels, deploy/wheels/cuda. When that is empty pip
fetches torch and all it needs into it for the time: about 3 GB, and the build takes 15 GB more.
"""

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from deploy.compose_inputs import Report, versions
from deploy.compose_stack import ROOT, CommandFailed, Stack, docker
from deploy.ports import free_port
from stepwire_client import Client, StepwireError

FILES: Final = ("docker-compose.yml", "deploy/compose.gpu.yml")
WHEELS: Final = ROOT / "deploy" / "wheels" / "cuda"
# The same image without the device it is made for.
ON_THE_CPU: Final = (
    'services: {executor: {deploy: !reset null, environment: {STEPWIRE_DEVICE: cpu, STEPWIRE_THREADS: "1"}}}\n'
)


def _services(*files: str) -> dict[str, Any]:
    named = [part for file in files for part in ("-f", file)]
    found: dict[str, Any] = json.loads(docker("compose", *named, "config", "--format", "json"))["services"]
    return found


def check_gpu_file(report: Report) -> None:
    """The merged configuration, as compose itself sees it."""
    without, merged = _services(FILES[0]), _services(*FILES)
    plain, executor = without.pop("executor"), merged.pop("executor")
    devices = executor["deploy"]["resources"]["reservations"]["devices"]
    wanted = [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]
    report.check(devices == wanted, "deploy/compose.gpu.yml is valid and reserves one GPU", devices)
    told = {name: executor["environment"].get(name) for name in ("STEPWIRE_DEVICE", "NVIDIA_DRIVER_CAPABILITIES")}
    report.check(list(told.values()) == ["cuda", "compute,utility"], "the executor is told to use it", told)
    image, built = executor["image"], executor["build"]["args"]
    own = image != plain["image"] and built["TORCH_WHEELS"] == "deploy/wheels/cuda" and built["TORCH_INDEX"] == ""
    report.check(own, "it has an image of its own, with torch for CUDA", f"{image} {built}")
    unbounded = int(executor.get("mem_limit", 0)) == 0
    report.check(unbounded, "its memory is bounded only where EXECUTOR_MEMORY says so")
    kept = ["user", "read_only", "cap_drop", "security_opt", "tmpfs", "volumes", "networks", "restart", "depends_on"]
    kept += ["stop_grace_period", "logging", "cpus"]
    same = all(executor.get(key) == plain.get(key) for key in kept) and "ports" not in executor
    report.check(same, "all else of it is as on the CPU", ", ".join(kept))
    report.check(merged == without, "no other service differs")


@contextlib.contextmanager
def cuda_wheels(report: Report) -> Iterator[None]:
    """Fills deploy/wheels/cuda for the time, unless a wheel of torch lies there."""
    given = any(WHEELS.glob("torch-*.whl"))
    try:
        if not given:
            _download()
        sizes = [wheel.stat().st_size for wheel in WHEELS.glob("*.whl")]
        (torch,) = WHEELS.glob("torch-*.whl")
        report.say(f"torch from a folder of {len(sizes)} wheels, {sum(sizes) / 1e9:.1f} GB: {torch.name}")
        yield
    finally:
        for wheel in () if given else WHEELS.glob("*.whl"):
            wheel.unlink()


def _download() -> None:
    """Raises CommandFailed."""
    if sys.version_info[:2] != (3, 11):
        raise CommandFailed("the image's Python is 3.11: run this with PYTHON=python3.11, or fill deploy/wheels/cuda")
    dockerfile = (ROOT / "deploy" / "executor.Dockerfile").read_text()
    (release,) = re.findall(r"^ARG TORCH_VERSION=(\S+)$", dockerfile, re.MULTILINE)
    command = [sys.executable, "-P", "-m", "pip", "download", "-q", "--disable-pip-version-check", "-d", str(WHEELS)]
    command += ["-c", "constraints.txt", "--only-binary", ":all:", f"torch=={release},!={release}+cpu"]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=3000)
    if done.returncode != 0:
        raise CommandFailed(f"torch for CUDA could not be fetched:\n{done.stderr[-1000:]}")


def check_cuda_image(report: Report, stack: Stack, port: str) -> None:
    """The image with a CUDA build of torch, its device taken away."""
    ask = "import torch, triton; print(torch.__version__, torch.version.cuda, triton.__version__)"
    built = stack.run_inside("executor", "python", "-c", ask).split()
    has = len(built) == 3 and built[1] != "None"
    report.check(has, "the image has a CUDA build of torch, and triton", " ".join(built))
    size = docker("images", "--format", "{{.Size}}", "stepwire-executor-cuda").split()
    report.say(f"     stepwire-executor-cuda {size[0]}")
    with Client(f"127.0.0.1:{port}") as client:
        answer = client.chat([{"role": "user", "content": "Say hello."}], max_tokens=24, temperature=0.0, deadline=600)
    report.check(bool(answer.text.strip()), "told to use the CPU it answers a chat", repr(answer.text))
    try:
        said = stack.compose("run", "--rm", "--no-deps", "-e", "STEPWIRE_DEVICE=cuda", "executor")
        report.check(False, "told to use a GPU that is not there it says so and ends", said[-200:])
    except CommandFailed as failed:
        lines = [line for line in str(failed).splitlines() if "ERROR" in line]
        ended = bool(lines) and "there is no cuda device" in lines[-1]
        report.check(ended, "told to use a GPU that is not there it says so and ends", lines[-1:] or str(failed)[-200:])


def verify_cuda_image(report: Report) -> None:
    versions(report)
    check_gpu_file(report)
    port = str(free_port())
    try:
        with tempfile.TemporaryDirectory() as folder, cuda_wheels(report):
            override = Path(folder) / "cpu.yml"
            override.write_text(ON_THE_CPU)
            stack = Stack([*(ROOT / file for file in FILES), override], {"API_PORT": port})
            try:
                began = time.monotonic()
                stack.compose("up", "--build", "-d", "--wait", "scheduler", timeout_s=3000)
                files = " ".join(f"-f {file}" for file in FILES)
                took = f"{time.monotonic() - began:.0f} s, less what the engine had cached"
                report.say(f"docker compose {files} up --build scheduler: {took}")
                check_cuda_image(report, stack, port)
            finally:
                stack.compose("down", "-v", "--remove-orphans")
    except (CommandFailed, StepwireError) as error:
        report.check(False, "the image can be built and asked", error)
