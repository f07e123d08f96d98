"""How a service begins: addresses that somebody else serves, its limit of open files."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc.aio
import pytest

from common.errors import ConfigError
from common.serving import refuse_served_path
from executor_svc.app import bind
from scheduler_svc.api.listen import open_port


def test_a_path_where_somebody_serves_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    refuse_served_path(f"unix:{path}")  # nothing there
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        refuse_served_path(f"unix:{path}")  # nobody listens
        server.listen(0)
        with pytest.raises(ConfigError, match="another process serves there"):
            refuse_served_path(f"unix:{path}")
        with pytest.raises(ConfigError, match="another process serves there"):
            refuse_served_path(f"unix:{path}")  # too busy to take one more: the first still waits
    assert path.exists()
    refuse_served_path(f"unix:{path}")  # a dead process's


def test_only_paths_are_looked_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        refuse_served_path(f"127.0.0.1:{server.getsockname()[1]}")
    for listen in ("unix:", f"unix:/{'x' * 200}", "unix:/a\0b"):
        refuse_served_path(listen)


@pytest.mark.parametrize("bind_to", [bind, lambda server, listen: open_port(server, listen, None)])
def test_no_server_takes_anothers_path(bind_to: Callable[[grpc.aio.Server, str], object], tmp_path: Path) -> None:
    listen = f"unix:{tmp_path / 'sock'}"

    async def work() -> None:
        first, second, third = grpc.aio.server(), grpc.aio.server(), grpc.aio.server()
        bind_to(first, listen)
        await first.start()
        with pytest.raises(ConfigError, match="another process serves there"):
            bind_to(second, listen)
        await first.stop(None)
        bind_to(third, listen)
        await third.start()
        await third.stop(None)

    asyncio.run(work())


@pytest.mark.parametrize(("hard", "least"), [(4000, 4000), (100, 100)])
def test_a_service_may_open_as_many_files_as_the_system_lets_it(hard: int, least: int) -> None:
    program = (
        "import resource\n"
        "from common.serving import begin\n"
        "from scheduler_svc.config import SchedulerConfig\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard}))\n"
        "begin(SchedulerConfig, [])\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(least), str(hard)], done.stderr
