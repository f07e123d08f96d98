"""Who may drive this executor. Pure: time comes in as a value. Owned by the I/O thread."""

from dataclasses import dataclass

from common.errors import ExecutorHeld, ProtocolError

LEASE_NS = 5_000_000_000


@dataclass(frozen=True, slots=True)
class Holder:
    """A scheduler's claim. `peer` is its address as gRPC names it, for people."""

    scheduler_id: bytes
    epoch: int
    peer: str


class Lease:
    """At most one scheduler at a time. It lives `duration_ns` after the holder's last message and outlives its stream,
    so that a scheduler whose connection broke finds its executor still its own."""

    def __init__(self, duration_ns: int = LEASE_NS) -> None:
        self._duration_ns = duration_ns
        self._holder: Holder | None = None
        self._expires_ns = 0

    def holder(self, now_ns: int) -> Holder | None:
        """Who holds it now; None when nobody does, or the last holder let it run out."""
        return self._holder if self._holder is not None and now_ns < self._expires_ns else None

    def take(self, claim: Holder, now_ns: int) -> None:
        """Makes `claim` the holder. The same scheduler needs a higher epoch, another one an ended lease.

        Raises ExecutorHeld naming the holder, or ProtocolError for an epoch that does not rise; nothing changes then.
        """
        last = self._holder
        if last is not None and last.scheduler_id == claim.scheduler_id:
            if claim.epoch <= last.epoch:
                raise ProtocolError(
                    f"epoch {claim.epoch} does not rise: this scheduler had epoch {last.epoch} already",
                    field="hello.epoch",
                    limit=str(last.epoch),
                )
        elif (other := self.holder(now_ns)) is not None:
            left_ms = (self._expires_ns - now_ns) // 1_000_000
            raise ExecutorHeld(
                f"held by scheduler {other.scheduler_id.hex()} at {other.peer} (epoch {other.epoch}); "
                f"its lease lives {left_ms} ms more unless renewed",
                field="hello.scheduler_id",
                retry_after_ms=left_ms,
            )
        self._holder = claim
        self._expires_ns = now_ns + self._duration_ns

    def renew(self, claim: Holder, now_ns: int) -> None:
        """A message of `claim` came in. No effect when somebody else took over meanwhile."""
        if self._holder is claim:
            self._expires_ns = now_ns + self._duration_ns

    def release(self, claim: Holder) -> None:
        """`claim` gave it back. Its epoch stays known. No effect when somebody else took over meanwhile."""
        if self._holder is claim:
            self._expires_ns = 0
