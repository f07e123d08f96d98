"""One api worker's process as the core holds it: never waited for, killed when it does not keep up."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import numpy as np
import psutil
import pytest

from common.messages import Output, OutputKind, u32
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.engine_loop import EngineLoop
from scheduler_svc.messages import Extras, TokenBatch
from scheduler_svc.workers import remote
from scheduler_svc.workers.control import Setup
from scheduler_svc.workers.frames import signatures
from scheduler_svc.workers.remote import RemoteWorker
from tests.fakes.toy_executor import ToyExecutor
from tests.integration.engine_harness import engine
from tests.integration.protocol_harness import run, serving
from tests.integration.test_protocol_process import child_env

COMMAND = [sys.executable, "-P", "-m", "tests.fakes.toy_scheduler_main", "--worker"]


@pytest.fixture(autouse=True)
def children_find_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", child_env()["PYTHONPATH"])


def setup(signature: str = "") -> Setup:
    config = SchedulerConfig(api_workers=1).model_dump_json()
    return Setup(signature or signatures(), 7, 1, ("127.0.0.1:0",), config)


@contextlib.asynccontextmanager
async def started(loop: EngineLoop) -> AsyncIterator[tuple[RemoteWorker, psutil.Process]]:
    """A worker that serves, and its process."""
    before = set(psutil.Process().children())
    worker = RemoteWorker(setup(), loop)
    await worker.start(COMMAND)
    (process,) = set(psutil.Process().children()) - before
    try:
        assert await worker.listening
        yield worker, process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        await worker.wait()


def test_a_worker_that_leaves_too_much_unread_is_killed() -> None:
    async def main() -> None:
        async with serving(ToyExecutor()) as served, engine(served.address) as (loop, _), started(loop) as started_:
            worker, process = started_
            process.suspend()
            size = 100_000
            column = u32(np.ones(size, np.uint32))
            batch = TokenBatch(np.zeros(size, np.uint64), column, column, np.zeros(size, np.uint8), column, {})
            frames, ended = 0, asyncio.ensure_future(worker.wait())
            while not ended.done():
                worker.deliver(batch)
                frames += 1
                await asyncio.sleep(0)
            assert ended.result() == -9
            worker.deliver(batch)
            assert frames > 10, "some backlog is no reason"

    run(main())


def test_steps_full_of_bulk_output_are_no_reason_to_kill_a_worker() -> None:
    async def main() -> None:
        async with serving(ToyExecutor()) as served, engine(served.address) as (loop, first), started(loop) as started_:
            worker, process = started_
            await first.ready()
            process.suspend()
            size = loop.max_output_bytes
            logits = Output(1, OutputKind.RAW_LOGITS, 0, 1, 0, 1, bytes(size))
            one = u32([1])
            batch = TokenBatch(one.astype(np.uint64), one, one, np.zeros(1, np.uint8), one, {0: Extras((), (logits,))})
            ended = asyncio.ensure_future(worker.wait())
            for _ in range(remote.MAX_BACKLOG_BYTES // size + remote.MAX_BACKLOG_STEPS):
                worker.deliver(batch)
            assert size and not ended.done() and process.status() != psutil.STATUS_ZOMBIE
            worker.deliver(batch)
            worker.deliver(batch)
            assert await ended == -9

    run(main())


def test_a_worker_that_answers_no_beats_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_UNANSWERED_BEATS", 5)

    async def main() -> None:
        async with serving(ToyExecutor()) as served, engine(served.address) as (loop, _), started(loop) as started_:
            worker, process = started_
            process.suspend()
            for _ in range(5):
                worker.beat(True)
                assert process.status() != psutil.STATUS_ZOMBIE
            worker.beat(True)
            assert await worker.wait() == -9

    run(main())


def test_a_worker_that_answers_beats_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_UNANSWERED_BEATS", 5)
    monkeypatch.setattr(remote, "ASKING_BEAT", 2)

    async def main() -> None:
        async with serving(ToyExecutor()) as served, engine(served.address) as (loop, _), started(loop) as started_:
            worker, process = started_
            for _ in range(4):
                worker.beat(True)
                worker.beat(True)
                while worker._unanswered:  # noqa: ASYNC110 - an answer tells nobody
                    await asyncio.sleep(0.005)
            assert process.status() != psutil.STATUS_ZOMBIE and worker.serves

    run(main())


CANCELS_FOR_ANOTHER = """
import socket, sys, time
from scheduler_svc.messages import WORKER_SHIFT, Cancel
from scheduler_svc.workers.frames import FrameWriter
link = socket.socket(fileno=int(sys.argv[1]))
link.sendall(FrameWriter().encode(Cancel((8 << WORKER_SHIFT) + 1)))
time.sleep(60)
"""


def test_a_worker_that_uses_the_key_of_another_is_killed() -> None:
    async def main() -> None:
        async with serving(ToyExecutor()) as served, engine(served.address) as (loop, _):
            worker = RemoteWorker(setup(), loop)
            await worker.start([sys.executable, "-P", "-c", CANCELS_FOR_ANOTHER])
            assert await worker.wait() == -9

    run(main())


def test_a_worker_that_still_loads_is_asked_no_beats() -> None:
    """A large tokenizer on a busy machine takes its time, for which there is another limit."""

    async def main() -> None:
        async with serving(ToyExecutor()) as served, engine(served.address) as (loop, _):
            worker = RemoteWorker(setup(), loop)
            await worker.start(COMMAND)
            for _ in range(remote.MAX_UNANSWERED_BEATS + 1):
                worker.beat(True)
            assert await worker.listening
            worker.stop(0.0)
            assert await worker.wait() == 0

    run(main())


def test_code_that_changed_on_disk_is_no_worker_of_a_running_core() -> None:
    async def main() -> None:
        async with serving(ToyExecutor()) as served, engine(served.address) as (loop, _):
            worker = RemoteWorker(setup("other"), loop)
            await worker.start(COMMAND)
            assert await worker.wait() == 2
            assert not await worker.listening

    run(main())
