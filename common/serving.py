"""How a service process begins, and how it says where it listens: the same in both."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from common.config import EXIT_CONFIG, Loaded, ServiceConfig, load_config
from common.errors import ConfigError

C = TypeVar("C", bound=ServiceConfig)


def begin(kind: type[C], argv: Sequence[str]) -> Loaded[C]:
    """Reads the configuration, starts the log and lists in it what the service runs with.

    Leaves with SystemExit: EXIT_CONFIG after a line on standard error when something is wrong, 0 after --help.
    """
    try:
        loaded = load_config(kind, argv)
    except ConfigError as error:
        sys.stderr.write(f"stepwire {kind.service}: {error.message}\n")
        raise SystemExit(EXIT_CONFIG) from None
    logging.basicConfig(
        level=loaded.config.log_level.upper(),
        format=f"%(asctime)s {kind.service} %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger(__name__).info("%s", loaded.listing())
    return loaded


def bound_address(listen: str, port: int) -> str:
    """What was really bound, for `listen` with port 0."""
    return listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"


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
