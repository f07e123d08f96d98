"""Metrics of real processes, read by Prometheus' own parser."""

import asyncio
import contextlib
import re
import socket
import urllib.request
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from stepwire_client import AsyncClient
from tests.integration.protocol_harness import run
from tests.integration.test_protocol_process import Process, process
from tests.integration.test_top import PROMPT, address_of, load, ready, service


async def scraped(url: str) -> dict[str, Metric]:
    def read() -> str:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())

    return {family.name: family for family in text_string_to_metric_families(await asyncio.to_thread(read))}


def value(families: dict[str, Metric], name: str, sample: str = "", **labels: str) -> float:
    wanted = sample or name
    (found,) = [s.value for s in families[name].samples if s.name in (wanted, wanted + "_total") and s.labels == labels]
    return float(found)


def url_of(child: Process) -> str:
    found = re.search(r"metrics on (http://\S+)", child.log)
    assert found is not None, child.log
    return found[1]


def test_the_schedulers_numbers(tmp_path: Path) -> None:
    async def main() -> None:
        async with service(tmp_path, 2, "--metrics-listen", "127.0.0.1:0") as (address, executors, scheduler):
            url = url_of(scheduler)
            async with AsyncClient(address) as client:
                for _ in range(2):
                    done = await client.complete(token_ids=PROMPT, max_tokens=10, temperature=0.0, ignore_eos=True)
                    assert done.usage.completion_tokens == 10
                families = await scraped(url)
                assert value(families, "stepwire_requests_accepted") == 2
                assert value(families, "stepwire_requests_finished", reason="max_tokens") == 2
                assert value(families, "stepwire_generated_tokens") == 20
                for name, count in (
                    ("stepwire_time_to_first_token_seconds", 2), ("stepwire_inter_token_seconds", 18),
                    ("stepwire_request_seconds", 2),
                ):  # fmt: skip
                    assert value(families, name, name + "_count") == count, name
                    assert value(families, name, name + "_sum") > 0
                prefilled = sum(value(families, "stepwire_step_tokens", executor=e, kind="prefill") for e in executors)
                cached = value(families, "stepwire_cached_tokens")
                assert prefilled + cached == value(families, "stepwire_prompt_tokens") == 2 * len(PROMPT)
                for executor in executors:
                    assert value(families, "stepwire_executor_connected", executor=executor) == 1
                    assert value(families, "stepwire_kv_blocks", executor=executor, state="free") == 64
                assert "process_cpu_seconds" in families
            async with load(address, 3):
                for _ in range(5):
                    busy = await scraped(url)
            assert value(busy, "stepwire_requests_running") <= 3
            names = {name for name in busy if name.startswith("stepwire_")}
            labels = {label for name in names for sample in busy[name].samples for label in sample.labels}
            assert labels <= {"executor", "kind", "state", "reason", "error", "le"}

    run(main(), 60.0)


def test_the_executors_numbers(tmp_path: Path) -> None:
    async def main() -> None:
        with contextlib.ExitStack() as stack:
            executor, toy = await address_of(
                stack, "tests.fakes.toy_executor_main", tmp_path, "toy", "--metrics-listen", "127.0.0.1:0"
            )
            api, _ = await address_of(
                stack, "tests.fakes.toy_scheduler_main", tmp_path, "scheduler",
                "--listen", "127.0.0.1:0", "--executors", executor,
            )  # fmt: skip
            await ready(api, 1)
            assert "stepwire_device_steps" in await scraped(url_of(toy))
            async with AsyncClient(api) as client:
                await client.complete(token_ids=PROMPT, max_tokens=10, temperature=0.0, ignore_eos=True)
            families = await scraped(url_of(toy))
            count = value(families, "stepwire_device_seconds", "stepwire_device_seconds_count")
            assert count == sum(sample.value for sample in families["stepwire_device_steps"].samples) >= 10
            assert value(families, "stepwire_device_tokens") >= len(PROMPT) + 9
            assert value(families, "stepwire_row_errors") == 0

    run(main(), 60.0)


def test_nothing_is_served_unasked_and_a_taken_port_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with service(tmp_path, 1) as (_, _, scheduler):
            assert "metrics on" not in scheduler.log
        with contextlib.ExitStack() as stack:
            taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            flags = ["--listen", "127.0.0.1:0", "--metrics-listen", f"127.0.0.1:{taken.getsockname()[1]}"]
            child = stack.enter_context(process("tests.fakes.toy_scheduler_main", flags, tmp_path / "log"))
            assert await asyncio.to_thread(child.wait) == 2
            assert "can not serve metrics on" in child.log

    run(main(), 60.0)
