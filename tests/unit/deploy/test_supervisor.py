"""The supervisor with fake services: order, restarts, exit statuses, deadlines, its own death."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from common.config import EXIT_CONFIG
from deploy.supervisor import RestartPolicy, Service, Stopped, Supervisor, SupervisorError, describe_status

FAKE = Path(__file__).with_name("fake_child.py")
QUICK = RestartPolicy(first_s=0.01, max_s=0.05, attempts=3)
DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def hangups() -> Iterator[None]:
    """SIGHUP does what it does by default, also where the tests were started under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


class Scene:
    """Two fake services in one directory, and what the supervisor said."""

    def __init__(self, directory: Path, executor: str = "serve", scheduler: str = "serve") -> None:
        self.directory = directory
        self.lines: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.supervisor = Supervisor(
            self._service("executor", executor),
            self._service("scheduler", scheduler),
            bound=self._probe("executor", "start"),
            lines=lambda name, line: self.lines.append((name, line)),
            note=self.notes.append,
            ready_s=20,
            policy=QUICK,
        )

    def _service(self, name: str, behaviour: str) -> Service:
        command = [sys.executable, "-I", "-S", str(FAKE), name, str(self.directory), behaviour]
        return Service(name, lambda: command, self._probe(name, "ready"), stop_s=1.0 if "ignore" in behaviour else 10.0)

    def _probe(self, name: str, event: str) -> Callable[[], Awaitable[bool]]:
        async def probe() -> bool:
            return self.count(name, event) > 0

        return probe

    def count(self, name: str, event: str) -> int:
        return len(list(self.directory.glob(f"{name}.{event}.*")))

    async def wait_for(self, name: str, event: str, count: int) -> None:
        await until(lambda: self.count(name, event) == count)

    def pid(self, name: str) -> int:
        return int((self.directory / f"{name}.start.{self.count(name, 'start') - 1}").read_text())

    def stops(self) -> list[str]:
        return (self.directory / "stops").read_text().split()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.02)


def run(work: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(2 * DEADLINE_S):
            await work

    asyncio.run(limited())


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_starts_both_hands_lines_on_and_stops_scheduler_first(tmp_path: Path) -> None:
    async def work() -> None:
        scene = Scene(tmp_path)
        async with scene.supervisor.running():
            assert scene.count("executor", "ready") and scene.count("scheduler", "ready")
            sessions = {os.getsid(scene.pid(name)) for name in ("executor", "scheduler")}
            assert len(sessions) == 2 and os.getsid(0) not in sessions
        assert scene.stops() == ["scheduler", "executor"]
        assert ("executor", "executor starting") in scene.lines and ("scheduler", "scheduler starting") in scene.lines
        assert gone(scene.pid("executor")) and gone(scene.pid("scheduler"))

    run(work())


def test_a_dead_executor_is_restarted_and_the_scheduler_left_alone(tmp_path: Path) -> None:
    async def work() -> None:
        scene = Scene(tmp_path)
        async with scene.supervisor.running() as supervisor:
            for restart in (1, 2, 3, 4):  # more often than `attempts`: it was ready once
                os.kill(scene.pid("executor"), signal.SIGKILL)
                await supervisor.until(scene.wait_for("executor", "ready", restart + 1))
            assert supervisor.restarts == 4
            assert scene.count("scheduler", "start") == 1
            assert any("SIGKILL" in note for note in scene.notes)

    run(work())


def test_pauses_between_restarts_grow_to_a_bound() -> None:
    policy = RestartPolicy(first_s=0.5, max_s=30)
    assert [policy.pause(n) for n in (1, 2, 3, 6, 7, 1000)] == [0.5, 1, 2, 16, 30, 30]


def test_an_executor_told_something_wrong_is_not_restarted(tmp_path: Path) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, executor=f"exit:{EXIT_CONFIG}", scheduler="unready")
        with pytest.raises(SupervisorError, match="executor can not start") as caught:
            async with scene.supervisor.running():
                pytest.fail("it never serves")
        assert caught.value.exit_status == EXIT_CONFIG
        assert scene.count("executor", "start") == 1

    run(work())


def test_an_executor_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, executor="exit:1", scheduler="unready")
        with pytest.raises(SupervisorError, match="died 3 times") as caught:
            async with scene.supervisor.running():
                pytest.fail("it never serves")
        assert caught.value.exit_status == 1
        assert scene.count("executor", "start") == 3
        assert scene.count("scheduler", "start") <= 1

    run(work())


@pytest.mark.parametrize(("status", "left_with"), [(0, 1), (1, 1), (EXIT_CONFIG, EXIT_CONFIG)])
def test_a_scheduler_that_ends_ends_everything(tmp_path: Path, status: int, left_with: int) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, scheduler=f"exit:{status}")
        with pytest.raises(SupervisorError, match="scheduler") as caught:
            async with scene.supervisor.running():
                pytest.fail("it never serves")
        assert caught.value.exit_status == left_with
        assert scene.stops() == ["executor"]

    run(work())


def test_a_scheduler_killed_later_ends_everything(tmp_path: Path) -> None:
    async def work() -> None:
        scene = Scene(tmp_path)
        with pytest.raises(SupervisorError, match="SIGKILL") as caught:
            async with scene.supervisor.running() as supervisor:
                os.kill(scene.pid("scheduler"), signal.SIGKILL)
                await supervisor.watch()
        assert caught.value.exit_status == 1
        assert gone(scene.pid("executor"))

    run(work())


def test_a_child_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    async def work() -> None:
        scene = Scene(tmp_path, scheduler="ignore-term")
        async with scene.supervisor.running():
            pass
        assert gone(scene.pid("scheduler")) and scene.stops() == ["executor"]

    run(work())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_stop_in_order(tmp_path: Path, number: signal.Signals) -> None:
    async def work() -> None:
        scene = Scene(tmp_path)
        with pytest.raises(Stopped):
            async with scene.supervisor.running() as supervisor:
                os.kill(os.getpid(), number)
                await supervisor.watch()
        assert scene.stops() == ["scheduler", "executor"]

    run(work())


def test_a_hangup_that_was_to_be_ignored_is(tmp_path: Path) -> None:
    async def work() -> None:
        scene = Scene(tmp_path)
        async with scene.supervisor.running() as supervisor:
            os.kill(os.getpid(), signal.SIGHUP)
            await supervisor.until(asyncio.sleep(0.1))
        assert scene.stops() == ["scheduler", "executor"]

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run(work())


async def signalled_twice(scene: Scene, first: signal.Signals, second: signal.Signals, pause_s: float) -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(Stopped):
        async with scene.supervisor.running() as supervisor:
            os.kill(os.getpid(), first)
            loop.call_later(pause_s, os.kill, os.getpid(), second)
            await supervisor.watch()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP])
def test_the_echo_of_a_signal_cuts_nothing_short(tmp_path: Path, second: signal.Signals) -> None:
    """`timeout` signals its command, then the command's group; a shell that hangs up is followed by the system."""

    async def work() -> None:
        scene = Scene(tmp_path, scheduler="slow-term")
        await signalled_twice(scene, signal.SIGTERM, second, 0.1)
        assert scene.stops() == ["scheduler", "executor"] and "stopping at once" not in scene.notes

    run(work())


def test_a_later_signal_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.supervisor.REPEAT_S", 0.05)

    async def work() -> None:
        scene = Scene(tmp_path, scheduler="slow-term")
        await signalled_twice(scene, signal.SIGTERM, signal.SIGINT, 0.2)
        assert "stopping at once" in scene.notes
        assert not (tmp_path / "stops").exists()

    run(work())


def test_work_that_fails_stops_everything(tmp_path: Path) -> None:
    async def fail() -> None:
        raise LookupError("no answer")

    async def work() -> None:
        scene = Scene(tmp_path)
        with pytest.raises(LookupError):
            async with scene.supervisor.running() as supervisor:
                await supervisor.until(fail())
        assert scene.stops() == ["scheduler", "executor"]

    run(work())


def test_not_ready_in_time(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    async def work() -> None:
        scene = Scene(tmp_path)
        command = [sys.executable, "-I", "-S", str(FAKE), "executor", str(tmp_path), "serve"]
        service = Service("executor", lambda: command, never, 10.0)
        supervisor = Supervisor(
            service, service, bound=never, lines=lambda *_: None, note=scene.notes.append, ready_s=0.5
        )
        with pytest.raises(SupervisorError, match="not ready within"):
            async with supervisor.running():
                pytest.fail("it never serves")

    run(work())


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_children_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import asyncio, sys
        from pathlib import Path
        from tests.unit.deploy.test_supervisor import Scene

        async def work():
            scene = Scene(Path(sys.argv[1]))
            async with scene.supervisor.running() as supervisor:
                print("up", flush=True)
                await supervisor.watch()

        asyncio.run(work())
        """
    )
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        pids = [int(next(tmp_path.glob(f"{name}.start.0")).read_text()) for name in ("executor", "scheduler")]
        process.kill()
    run(until(lambda: all(gone(pid) for pid in pids)))


def test_status_in_words() -> None:
    assert describe_status(3) == "exit 3"
    assert describe_status(-9) == "SIGKILL"
    assert describe_status(-99) == "signal 99"
