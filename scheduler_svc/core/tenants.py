"""Who asks, and what each was served. Owner: the scheduler."""

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.rows import I64
from scheduler_svc.messages import TenantStats

MAX_IDLE = 1000
MAX_TOLD = 256


class Tenants:
    """A tenant is a small number, its slot, for as long as it is remembered, so that rows hold it in a column.

    Bounded: those with live requests, and MAX_IDLE others; beyond that who was idle longest is forgotten. For the fair
    policy that is sound: a tenant that comes back is lifted to those that wait, forgotten or not, so all it can win is
    the lead its counter still had over them, at most the U/φ of `policies.fair`.

    Columns [slots]. live: accepted requests that have not ended. served: weighted tokens by weight (see policies.fair).
    """

    def __init__(self, config: CoreConfig) -> None:
        self._weight_of = dict(config.tenant_weights)
        self._input_weight, self._output_weight = config.input_token_weight, config.output_token_weight
        self._slots: dict[str, int] = {}
        self._names: list[str] = []
        self._free: list[int] = []
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.served: NDArray[np.float64] = np.zeros(16)
        self.weight: NDArray[np.float64] = np.ones(16)
        self.live = [0] * 16
        self.accepted = [0] * 16
        self.prompt_tokens = [0] * 16
        self.generated_tokens: I64 = np.zeros(16, dtype=np.int64)

    def __len__(self) -> int:
        """Tenants remembered."""
        return len(self._slots)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def join(self, name: str) -> int:
        """A request of the tenant was accepted. Returns the tenant's slot."""
        slot = self._slots.get(name)
        if slot is None:
            slot = self._new_slot(name)
        self._idle.pop(slot, None)
        self.live[slot] += 1
        self.accepted[slot] += 1
        return slot

    def leave(self, slot: int) -> None:
        """One of its requests ended."""
        self.live[slot] -= 1
        if not self.live[slot]:
            self._idle[slot] = None
            if len(self._idle) > MAX_IDLE:
                self._forget(self._idle.popitem(last=False)[0])

    def admitted(self, slot: int, num_tokens: int) -> None:
        """A request was admitted for the first time; `num_tokens` of its prompt have to be computed."""
        self.prompt_tokens[slot] += num_tokens
        self.served[slot] += self._input_weight * num_tokens / self.weight.item(slot)

    def generated(self, slot_of_row: I64, rows: I64) -> None:
        """One token for each of `rows`."""
        if len(self._slots) == 1:
            slot = next(iter(self._slots.values()))
            self.generated_tokens[slot] += len(rows)
            self.served[slot] += self._output_weight * len(rows) / self.weight[slot]
            return
        counts = np.bincount(slot_of_row[rows], minlength=len(self.live))
        self.generated_tokens += counts
        self.served += self._output_weight * counts / self.weight

    def lift(self, slot: int, least: float) -> None:
        self.served[slot] = max(self.served[slot], least)

    def stats(self, running: I64) -> tuple[TenantStats, ...]:
        """`running`: slots of all running sequences. Those that generated most, at most MAX_TOLD."""
        run = np.bincount(running, minlength=len(self.live))
        names = sorted(self._slots, key=lambda name: (-int(self.generated_tokens[self._slots[name]]), name))
        found = []
        for name in names[:MAX_TOLD]:
            slot = self._slots[name]
            found.append(
                TenantStats(
                    tenant=name,
                    requests=self.accepted[slot],
                    waiting=self.live[slot] - int(run[slot]),
                    running=int(run[slot]),
                    prompt_tokens=self.prompt_tokens[slot],
                    generated_tokens=int(self.generated_tokens[slot]),
                    served=float(self.served[slot]),
                    weight=float(self.weight[slot]),
                )
            )
        return tuple(found)

    def _new_slot(self, name: str) -> int:
        if self._free:
            slot = self._free.pop()
            self._names[slot] = name
        else:
            slot = len(self._names)
            self._names.append(name)
            if slot == len(self.live):
                self._grow()
        self._slots[name] = slot
        self.weight[slot] = self._weight_of.get(name, 1.0)
        return slot

    def _grow(self) -> None:
        for told in (self.live, self.accepted, self.prompt_tokens):
            told += [0] * len(told)
        self.weight = np.concatenate([self.weight, np.ones_like(self.weight)])
        self.served = np.concatenate([self.served, np.zeros_like(self.served)])
        self.generated_tokens = np.concatenate([self.generated_tokens, np.zeros_like(self.generated_tokens)])

    def _forget(self, slot: int) -> None:
        del self._slots[self._names[slot]]
        self.served[slot] = self.generated_tokens[slot] = self.accepted[slot] = self.prompt_tokens[slot] = 0
        self._free.append(slot)
