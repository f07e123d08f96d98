"""`stepwire top` against a real scheduler with toy executors, all as processes."""

import asyncio
import contextlib
import json
import os
import pty
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stepwire_client import AsyncClient
from tests.integration.protocol_harness import run
from tests.integration.test_protocol_process import ROOT, Process, child_env, process, written

STEPWIRE = [sys.executable, "-P", "-m", "deploy.cli"]
PROMPT = list(range(10, 50))


async def address_of(stack: contextlib.ExitStack, module: str, directory: Path, name: str, *flags: str) -> Any:
    """Starts a service; its address and its process."""
    file = directory / f"{name}.address"
    file.unlink(missing_ok=True)
    child = stack.enter_context(process(module, [*flags, "--address-file", str(file)], directory / f"{name}.log"))
    return (await written(file, child)).splitlines()[0], child


@contextlib.asynccontextmanager
async def service(directory: Path, num_executors: int, *flags: str) -> AsyncIterator[tuple[str, list[str], Process]]:
    """(address of the API, addresses of the executors, the scheduler), ready."""
    with contextlib.ExitStack() as stack:
        executors = [
            (
                await address_of(
                    stack, "tests.fakes.toy_executor_main", directory, f"toy{n}",
                    "--listen", "127.0.0.1:0", "--delay-ms", "2", "--num-blocks", "64",
                )
            )[0]
            for n in range(num_executors)
        ]  # fmt: skip
        address, scheduler = await address_of(
            stack, "tests.fakes.toy_scheduler_main", directory, "scheduler",
            "--listen", "127.0.0.1:0", "--executors", ",".join(executors), *flags,
        )  # fmt: skip
        await ready(address, num_executors)
        yield address, executors, scheduler


async def ready(address: str, num_executors: int) -> None:
    async with AsyncClient(address) as client:
        while sum(executor.connected for executor in (await client.stats()).executors) < num_executors:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def load(address: str, streams: int = 4) -> AsyncIterator[None]:
    """Requests with one prompt, one after the other in each of `streams`."""

    async def one(client: AsyncClient) -> None:
        while True:
            await client.complete(token_ids=PROMPT, max_tokens=30, temperature=0.0, ignore_eos=True)

    async with AsyncClient(address) as client:
        tasks = [asyncio.create_task(one(client)) for _ in range(streams)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            failures = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(failure, asyncio.CancelledError) for failure in failures), failures


async def once(*flags: str) -> dict[str, Any]:
    child = await asyncio.create_subprocess_exec(
        *STEPWIRE, "top", "--once", "--json", *flags, env=child_env(), cwd=ROOT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, problem = await child.communicate()
    assert child.returncode == 0 and problem == b"", problem
    (line,) = out.decode().splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_one_object_for_scripts(tmp_path: Path) -> None:
    async def main() -> None:
        async with service(tmp_path, 2) as (address, executors, _):
            idle = await once("--address", address, "--seconds", "0.2")
            assert (idle["steps_per_s"], idle["hit_rate"], idle["problem"]) == (0, None, "")
            assert [e["executor"] for e in idle["executors"]] == executors
            assert all(e["connected"] and e["steps"] == 0 and e["device_ms"] is None for e in idle["executors"])
            assert all((e["num_blocks"], e["free_blocks"], e["device_idle"]) == (64, 64, 1) for e in idle["executors"])
            async with load(address):
                busy = await once("--address", address, "--seconds", "25", "--steps", "60")
            assert busy["address"] == address and busy["seconds"] < 25
            assert sum(e["steps"] for e in busy["executors"]) >= 60 and busy["lost_steps"] == 0
            assert busy["generated_tokens_per_s"] > 0 and busy["prefill_tokens_per_s"] > 0
            assert 0 < busy["hit_rate"] < 1, "one prompt over and over: all but its last block is found"
            assert busy["running"] <= 4 and busy["stats"]["requests_failed"] == 0
            for executor in busy["executors"]:
                assert executor["decode_tokens"]["max"] <= 4 and executor["prefill_tokens"]["max"] > 0
                assert executor["turn_ms"]["p50"] <= executor["turn_ms"]["p95"] <= executor["turn_ms"]["p99"]
                assert executor["slowest"] and 0 <= executor["device_idle"] <= 1

    run(main(), 60.0)


def test_with_workers_of_its_own_the_api_tells_the_same(tmp_path: Path) -> None:
    async def main() -> None:
        async with service(tmp_path, 1, "--api-workers", "2") as (address, _, _), load(address):
            seen = await once("--address", address, "--seconds", "25", "--steps", "40")
            (executor,) = seen["executors"]
            assert executor["steps"] >= 40 and executor["lost_steps"] == 0 and executor["num_blocks"] == 64

    run(main(), 60.0)


def test_a_line_a_second_also_over_a_restart(tmp_path: Path) -> None:
    """A pipe gets lines; while the scheduler is away it says so, and goes on by itself when it is back."""

    async def main() -> None:
        async with service(tmp_path, 1) as (address, executors, scheduler):
            child = await asyncio.create_subprocess_exec(
                *STEPWIRE, "top", "--address", address, env=child_env(), cwd=ROOT,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert child.stdout is not None

            async def line_with(part: str) -> None:
                assert child.stdout is not None
                while part not in (line := (await child.stdout.readline()).decode()):
                    assert line, "top ended"

            async with load(address, 2):
                await line_with(f"{executors[0]} ")
            scheduler.signal(signal.SIGKILL)
            await asyncio.to_thread(scheduler.wait)
            await line_with("trying again")
            with contextlib.ExitStack() as stack:
                again, _ = await address_of(
                    stack, "tests.fakes.toy_scheduler_main", tmp_path, "scheduler",
                    "--listen", address, "--executors", executors[0],
                )  # fmt: skip
                await ready(again, 1)
                async with load(again, 2):
                    await line_with(f"{executors[0]} ")
                    await line_with("running 2 ")
                child.send_signal(signal.SIGTERM)
                await child.communicate()
                assert child.returncode == 0

    run(main(), 90.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_terminal_gets_a_picture_and_is_left_as_it_was(number: int, tmp_path: Path) -> None:
    async def main() -> None:
        async with service(tmp_path, 1) as (address, executors, _), load(address):
            master, slave = pty.openpty()
            environment = child_env() | {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "80", "LINES": "24"}
            child = await asyncio.create_subprocess_exec(
                *STEPWIRE, "top", "--address", address, "--refresh", "0.1",
                stdin=slave, stdout=slave, stderr=asyncio.subprocess.PIPE, env=environment, cwd=ROOT,
            )  # fmt: skip
            os.close(slave)
            shown = bytearray()
            drawn = threading.Event()

            def read() -> None:
                with contextlib.suppress(OSError):  # the child's end of the terminal is closed
                    while data := os.read(master, 65536):
                        shown.extend(data)
                        if executors[0].encode() in shown and b"device idle" in shown:
                            drawn.set()

            reader = threading.Thread(target=read)
            reader.start()
            try:
                assert await asyncio.to_thread(drawn.wait, 30), bytes(shown)
                child.send_signal(number)
                _, problem = await child.communicate()
                assert (child.returncode, problem) == (0, b"")
            finally:
                if child.returncode is None:
                    child.kill()
                    await child.wait()
                await asyncio.to_thread(reader.join, 30)
                os.close(master)
            assert b"\x1b[?1049h" in shown and b"\x1b[?1049l" in shown and b"\x1b[?25h" in shown
            assert b"\x1b[3" not in shown, "no colours were asked for"

    run(main(), 60.0)
