"""Addresses of API processes are what was asked for, or refused; never others."""

from collections.abc import Iterator

import pytest

from common.errors import ConfigError
from scheduler_svc.workers.addresses import PortHolder


@pytest.fixture
def holder() -> Iterator[PortHolder]:
    made = PortHolder()
    yield made
    made.close()


def test_free_ports_are_all_different(holder: PortHolder) -> None:
    listing = holder.addresses("127.0.0.1:0", "", 4).listing()
    assert len(set(listing)) == 5


def test_there_is_no_port_above_the_last(holder: PortHolder) -> None:
    with pytest.raises(ConfigError, match="65536") as refused:
        holder.addresses("127.0.0.1:0", "127.0.0.1:65535", 2)
    assert refused.value.field == "worker_listen"


def test_a_process_does_not_share_its_own_address(holder: PortHolder) -> None:
    shared = holder.addresses("127.0.0.1:0", "", 1).shared
    with pytest.raises(ConfigError) as refused:
        holder.addresses("unix:/nowhere", shared, 1)
    assert refused.value.field == "worker_listen"
