import pytest

from common.errors import ExecutorHeld, ProtocolError
from executor_svc.lease import Holder, Lease

SECOND_NS = 1_000_000_000


def claim(name: bytes, epoch: int) -> Holder:
    return Holder(name * 16, epoch, "peer")


def test_nobody_holds_it_at_first() -> None:
    lease = Lease(5 * SECOND_NS)
    assert lease.holder(0) is None
    lease.take(claim(b"a", 7), 0)
    assert lease.holder(5 * SECOND_NS - 1) == claim(b"a", 7)
    assert lease.holder(5 * SECOND_NS) is None


def test_messages_renew_it() -> None:
    lease, holder = Lease(5 * SECOND_NS), claim(b"a", 1)
    lease.take(holder, 0)
    lease.renew(holder, 4 * SECOND_NS)
    assert lease.holder(8 * SECOND_NS) is holder


def test_a_stranger_waits_for_its_end_and_is_told_who_holds_it() -> None:
    lease = Lease(5 * SECOND_NS)
    lease.take(claim(b"a", 1), 0)
    with pytest.raises(ExecutorHeld, match=b"a".hex() * 16) as caught:
        lease.take(claim(b"b", 9), 2 * SECOND_NS)
    assert caught.value.retry_after_ms == 3000
    assert lease.holder(2 * SECOND_NS) == claim(b"a", 1)
    lease.take(claim(b"b", 1), 5 * SECOND_NS)
    assert lease.holder(5 * SECOND_NS) == claim(b"b", 1)


@pytest.mark.parametrize("now_ns", [SECOND_NS, 60 * SECOND_NS])
@pytest.mark.parametrize("epoch", [3, 4])
def test_its_own_scheduler_needs_a_higher_epoch_even_later(epoch: int, now_ns: int) -> None:
    lease = Lease(5 * SECOND_NS)
    lease.take(claim(b"a", 4), 0)
    with pytest.raises(ProtocolError, match="does not rise"):
        lease.take(claim(b"a", epoch), now_ns)
    lease.take(claim(b"a", 5), now_ns)


def test_given_back_it_is_free_at_once_and_the_epoch_stays_known() -> None:
    lease, holder = Lease(5 * SECOND_NS), claim(b"a", 4)
    lease.take(holder, 0)
    lease.release(holder)
    assert lease.holder(0) is None
    with pytest.raises(ProtocolError):
        lease.take(claim(b"a", 4), 0)
    lease.take(claim(b"b", 1), 0)


def test_who_was_taken_over_can_neither_renew_nor_release() -> None:
    lease, old, new = Lease(5 * SECOND_NS), claim(b"a", 1), claim(b"a", 2)
    lease.take(old, 0)
    lease.take(new, 0)
    lease.release(old)
    assert lease.holder(0) is new
    lease.renew(old, 4 * SECOND_NS)
    assert lease.holder(5 * SECOND_NS) is None
