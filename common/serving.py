"""How a service process begins, and how it says where it listens: the same in both."""

import contextlib
import errno
import logging
import resource
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

from common.config import EXIT_CONFIG, Loaded, ServiceConfig, load_config
from common.errors import ConfigError
from common.standard_streams import leave_standard_stream

C = TypeVar("C", bound=ServiceConfig)

# More connections than one process can serve.
MAX_FILES: Final = 65536


def begin(kind: type[C], argv: Sequence[str]) -> Loaded[C]:
    """Reads the configuration, starts the log and lists in it what the service runs with; allows many open files.

    Leaves with SystemExit: EXIT_CONFIG after a line on standard error when something is wrong, 0 after --help.
    """
    try:
        loaded = load_config(kind, argv)
    except BrokenPipeError:  # the reader of --help left
        leave_standard_stream(sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        sys.stderr.write(f"stepwire {kind.service}: {error}\n")
        raise SystemExit(1) from None
    except ConfigError as error:
        sys.stderr.write(f"stepwire {kind.service}: {error.message}\n")
        raise SystemExit(EXIT_CONFIG) from None
    logging.basicConfig(
        level=loaded.config.log_level.upper(),
        format=f"%(asctime)s {kind.service} %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger(__name__).info("%s", loaded.listing())
    allow_many_files()
    return loaded


def allow_many_files() -> None:
    """As many as the hard limit lets: each connection is one. The usual soft limit of 1024 is select's, which nothing
    here uses; clients that fill it keep a scheduler from its executors too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a system with a limit of its own below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bound_address(listen: str, port: int) -> str:
    """What was really bound, for `listen` with port 0."""
    return listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"


def refuse_served_path(listen: str) -> None:
    """gRPC takes the place of any socket that lies at a unix: path, also of one that is served: whoever served there
    would go on unseen. A socket that a dead process left is in nobody's way.

    Raises ConfigError: somebody serves there.
    """
    if not listen.startswith("unix:"):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            served = probe.connect_ex(listen.removeprefix("unix:")) in (0, errno.EAGAIN, errno.EINPROGRESS)
        except (OSError, ValueError):  # no path of a socket; binding says so
            return
    if served:
        raise ConfigError(f"can not listen on {listen}: another process serves there", field="listen")


def write_address(path: Path, address: str) -> None:
    """All at once, so that a reader never sees a part of it. Several addresses: one a line, the one to call first.

    Raises ConfigError: it can not be written.
    """
    draft = path.with_name(path.name + ".new")
    try:
        draft.write_text(address + "\n")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"address_file: {path} can not be written: {error.strerror}", field="address_file") from error
