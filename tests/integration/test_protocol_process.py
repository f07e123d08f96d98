"""The toy executor and the services as real processes: killed, drained, started in the wrong order, on a taken port."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from stepwire.executor.v1 import executor_pb2 as pb
from stepwire.executor.v1 import executor_pb2_grpc as pb_grpc
from stepwire.v1 import inference_pb2, inference_pb2_grpc
from tests.integration.engine_harness import CollectingWorker, engine, oracle, prompts, seeded
from tests.integration.protocol_harness import run

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0


class Process:
    """A child that is killed at the end of the test, with its output in a file."""

    def __init__(self, module: str, args: Sequence[str], log: Path, env: dict[str, str] | None = None) -> None:
        self._log = log
        with log.open("ab") as out:
            self.child = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *args], cwd=ROOT, stdout=out, stderr=out, env=env or child_env()
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait(self) -> int:
        return self.child.wait(DEADLINE_S)

    def signal(self, number: int) -> None:
        self.child.send_signal(number)


def child_env() -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("STEPWIRE_", "OTEL_"))}
    return clean | {"PYTHONPATH": os.pathsep.join(str(ROOT / p) for p in (".", "protos", "client"))}


@contextmanager
def process(module: str, args: Sequence[str], log: Path) -> Iterator[Process]:
    started = Process(module, args, log)
    try:
        yield started
    finally:
        started.child.kill()
        started.child.wait()


@contextmanager
def toy(directory: Path, *args: str, listen: str = "127.0.0.1:0") -> Iterator[Process]:
    flags = ["--listen", listen, "--address-file", str(directory / "address"), *args]
    with process("tests.fakes.toy_executor_main", flags, directory / "toy.log") as started:
        yield started


async def written(file: Path, child: Process) -> str:
    """The address a child wrote once it listened."""
    while not file.exists():  # noqa: ASYNC240 - another process tells, through the file
        assert child.child.poll() is None, child.log
        await asyncio.sleep(0.01)
    return file.read_text().strip()  # noqa: ASYNC240


async def bound(directory: Path, child: Process) -> str:
    return await written(directory / "address", child)


def submit_all(worker: CollectingWorker, count: int, max_tokens: int) -> list[int]:
    for key, prompt in enumerate(prompts(count), 1):
        worker.submit(key, prompt, seeded(key, max_tokens))
    return list(range(1, count + 1))


def assert_oracle(worker: CollectingWorker, count: int, max_tokens: int) -> None:
    for key, prompt in enumerate(prompts(count), 1):
        assert worker.errors.get(key) is None
        assert worker.tokens[key] == oracle(prompt, seeded(key, max_tokens)), key


def test_executor_process_gone_in_the_middle_and_started_again(tmp_path: Path) -> None:
    """Killed first, then told to stop: no request is lost and no delivered token changes."""

    async def main() -> None:
        with contextlib.ExitStack() as children:
            child = children.enter_context(toy(tmp_path, "--delay-ms", "2"))
            address = await bound(tmp_path, child)
            async with engine(address) as (loop, worker):
                await worker.ready()
                keys = submit_all(worker, 12, 60)
                for at, number, status in ((10, signal.SIGKILL, -signal.SIGKILL), (30, signal.SIGTERM, 0)):
                    await worker.until(worker.any_has_tokens(at))
                    before = {key: list(tokens) for key, tokens in worker.tokens.items()}
                    child.signal(number)
                    assert await asyncio.to_thread(child.wait) == status, child.log
                    child = children.enter_context(toy(tmp_path, "--delay-ms", "2", listen=address))
                    for key, tokens in before.items():
                        assert worker.tokens[key][: len(tokens)] == tokens
                await worker.done(keys)
                assert_oracle(worker, 12, 60)
                assert loop.stats().executors[0].epoch >= 3

    run(main(), 60.0)


def test_executor_started_after_the_scheduler(tmp_path: Path) -> None:
    async def main() -> None:
        listen = f"unix:{tmp_path}/executor.sock"
        async with engine(listen) as (_, worker):
            with toy(tmp_path, "--load-ms", "300", listen=listen) as child:
                await worker.ready()
                await worker.done(submit_all(worker, 4, 8))
                assert_oracle(worker, 4, 8)
                assert child.child.poll() is None

    run(main())


def test_health_follows_loading_serving_and_draining(tmp_path: Path) -> None:
    async def main() -> None:
        with toy(tmp_path, "--load-ms", "1000") as child:
            address = await bound(tmp_path, child)
            async with grpc.aio.insecure_channel(address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                names = ("", "stepwire.executor.v1.Executor")
                executor: pb_grpc.ExecutorAsyncStub = pb_grpc.ExecutorStub(channel)
                with pytest.raises(grpc.aio.AioRpcError, match="not loaded yet"):
                    await executor.GetInfo(pb.GetInfoRequest())
                for name in names:
                    seen = []
                    async for answer in stub.Watch(health_pb2.HealthCheckRequest(service=name)):
                        seen.append(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
                        if seen[-1] == "SERVING":
                            break
                    assert seen[-1] == "SERVING"
                reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
                await reflected.write(reflection_pb2.ServerReflectionRequest(list_services=""))
                listed = {s.name for s in (await reflected.read()).list_services_response.service}
                assert {"stepwire.executor.v1.Executor", "grpc.health.v1.Health"} <= listed
                reflected.cancel()
                async with engine(address) as (_, worker):
                    await worker.ready()
                    watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
                    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
                    child.signal(signal.SIGTERM)
                    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
                    watch.cancel()
            assert await asyncio.to_thread(child.wait) == 0, child.log

    run(main())


def test_sigterm_while_loading_leaves_at_once_with_0(tmp_path: Path) -> None:
    async def main() -> None:
        with toy(tmp_path, "--load-ms", "60000") as child:
            await bound(tmp_path, child)
            child.signal(signal.SIGTERM)
            assert await asyncio.to_thread(child.wait) == 0, child.log

    run(main())


def test_device_failure_ends_the_process_with_a_status_that_is_not_0(tmp_path: Path) -> None:
    async def main() -> None:
        with toy(tmp_path, "--fail-step", "3") as child:
            async with engine(await bound(tmp_path, child)) as (_, worker):
                await worker.ready()
                submit_all(worker, 2, 8)
                assert await asyncio.to_thread(child.wait) == 1
                assert "the executor is dead: the toy device was told to fail" in child.log

    run(main())


@pytest.mark.parametrize("module", ["tests.fakes.toy_executor_main", "executor_svc"])
def test_taken_port_is_a_clear_error(tmp_path: Path, module: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with process(module, ["--listen", address], tmp_path / "log") as child:
            assert child.wait() == 2
            assert f"can not listen on {address}" in child.log
            assert "Traceback" not in child.log


@pytest.mark.parametrize("module", ["tests.fakes.toy_executor_main", "tests.fakes.toy_scheduler_main"])
def test_an_address_file_that_can_not_be_written_is_a_clear_error(tmp_path: Path, module: str) -> None:
    nowhere = str(tmp_path / "missing" / "address")
    with process(module, ["--listen", "127.0.0.1:0", "--address-file", nowhere], tmp_path / "log") as child:
        assert child.wait() == 2
        assert f"address_file: {nowhere} can not be written" in child.log and "Traceback" not in child.log


@pytest.mark.parametrize("module", ["executor_svc", "scheduler_svc"])
def test_wrong_configuration_is_a_clear_error(tmp_path: Path, module: str) -> None:
    with process(module, ["--no-such-flag", "1"], tmp_path / "log") as child:
        assert child.wait() == 2
        assert "--no-such-flag" in child.log and "Traceback" not in child.log


@pytest.mark.parametrize("module", ["executor_svc", "scheduler_svc"])
def test_empty_model_directory_is_a_clear_error(tmp_path: Path, module: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with process(module, ["--listen", "127.0.0.1:0", "--model", str(empty)], tmp_path / "log") as child:
        assert child.wait() == 2, child.log
        assert str(empty) in child.log and "Traceback" not in child.log


@pytest.mark.parametrize("module", ["executor_svc", "scheduler_svc"])
def test_a_foreign_common_package_is_refused(tmp_path: Path, module: str) -> None:
    (tmp_path / "common").mkdir()
    # An editable installation would lend it the modules it lacks.
    (tmp_path / "common" / "__init__.py").write_text(
        "import sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if '__editable__' not in getattr(f, '__module__', '')]\n"
    )
    env = child_env()
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    child = Process(module, ["--help"], tmp_path / "log", env)
    assert child.wait() == 2
    assert "not from this checkout" in child.log and "Traceback" not in child.log


# ------------------------------------------------------------------------------------------------ the scheduler process


@contextmanager
def scheduler(directory: Path, executor: str, *args: str) -> Iterator[Process]:
    own = ["--listen", "127.0.0.1:0", "--executors", executor, "--address-file", str(directory / "api")]
    with process("tests.fakes.toy_scheduler_main", [*args, *own], directory / "scheduler.log") as started:
        yield started


def generate_request(max_tokens: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompts(1)[0]),
        sampling=inference_pb2.SamplingParams(temperature=1.0, seed=1),
        stop=inference_pb2.StopConditions(max_tokens=max_tokens),
        output=inference_pb2.OutputOptions(detokenize=False),
    )


async def ready(channel: grpc.aio.Channel) -> None:
    async for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="")):
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return


def test_scheduler_drains_on_sigterm_and_leaves_with_0(tmp_path: Path) -> None:
    async def main() -> None:
        with toy(tmp_path, "--delay-ms", "10") as executor:
            with scheduler(tmp_path, await bound(tmp_path, executor)) as child:
                address = await written(tmp_path / "api", child)
                async with grpc.aio.insecure_channel(address) as channel:
                    await ready(channel)
                    stub = inference_pb2_grpc.InferenceStub(channel)
                    call = stub.Generate(generate_request(40))
                    tokens: list[int] = []
                    async for message in call:
                        if not tokens and message.delta.token_ids:
                            child.signal(signal.SIGTERM)
                        tokens += message.delta.token_ids
                    assert tokens == oracle(prompts(1)[0], seeded(1, 40))
                assert await asyncio.to_thread(child.wait) == 0, child.log
            # It gave the executor back: nobody waits for its lease.
            async with engine(await bound(tmp_path, executor), scheduler_id=b"n" * 16) as (_, worker):
                await worker.ready()

    run(main())


def test_dead_core_ends_the_scheduler_with_a_status_that_is_not_0(tmp_path: Path) -> None:
    async def main() -> None:
        with contextlib.ExitStack() as children:
            executor = await bound(tmp_path, children.enter_context(toy(tmp_path)))
            child = children.enter_context(scheduler(tmp_path, executor, "--break-at-step", "3"))
            async with grpc.aio.insecure_channel(await written(tmp_path / "api", child)) as channel:
                await ready(channel)
                with pytest.raises(grpc.aio.AioRpcError):
                    async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(generate_request(40)):
                        pass
            assert await asyncio.to_thread(child.wait) == 1
            assert "a bug in the core" in child.log

    run(main())


def test_taken_port_of_the_scheduler(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with process("tests.fakes.toy_scheduler_main", ["--listen", address], tmp_path / "log") as child:
            assert child.wait() == 2
            assert f"can not listen on {address}" in child.log and "Traceback" not in child.log
