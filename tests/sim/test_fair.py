"""The policy `fair`: what tenants are served differs by no more than its bound, and being idle earns nothing."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.tenants import MAX_IDLE, Tenants
from tests.fakes.toy_executor import toy_info
from tests.sim.harness import Sim


class Ledger:
    """What each tenant was served, seen from outside: prompts at their first admission, tokens as they are delivered.
    `most`: the most sequences of one tenant that were admitted and unfinished at once."""

    def __init__(self, sim: Sim) -> None:
        self._sim = sim
        self._admitted: set[int] = set()
        self._served: dict[str, float] = {}
        self.most = 0

    def step(self) -> None:
        """One plan, if there is one, else one result."""
        sim, config = self._sim, self._sim.scheduler.config
        before = {key: len(client.tokens) for key, client in sim.clients.items()}
        if (record := sim.plan()) is not None:
            rows = sim.scheduler.executors[0].rows
            for key in {int(rows.keys[admit.row]) for admit in record.plan.admit} - self._admitted:
                self._admitted.add(key)
                self._add(key, config.input_token_weight * len(sim.clients[key].submit.prompt))
        else:
            sim.deliver()
        for key, known in before.items():
            self._add(key, config.output_token_weight * (len(sim.clients[key].tokens) - known))
        live = [s for s in sim.scheduler.live_sequences() if s.was_admitted]
        for tenant in {s.request.tenant for s in live}:
            self.most = max(self.most, sum(s.request.tenant == tenant for s in live))

    def _add(self, key: int, tokens: float) -> None:
        tenant = self._sim.clients[key].submit.tenant
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens

    def served(self, tenant: str) -> float:
        return self._served.get(tenant, 0.0)


def _waits(sim: Sim, tenant: str) -> bool:
    return any(not s.was_admitted and s.request.tenant == tenant for s in sim.scheduler.live_sequences())


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    weight=st.sampled_from([1.0, 2.0, 5.0]),
    prompts=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    outputs=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    seqs=st.sampled_from([1, 3, 8]),
    blocks=st.sampled_from([30, 60, 400]),
    budget=st.sampled_from([9, 64]),
    input_weight=st.sampled_from([1.0, 0.5, 4.0]),
)
def test_two_that_wait_without_a_break_are_served_alike(
    seed: int,
    weight: float,
    prompts: tuple[int, int],
    outputs: tuple[int, int],
    seqs: int,
    blocks: int,
    budget: int,
    input_weight: float,
) -> None:
    """The bound of `policies.fair`, over every span: from any moment to any later one."""
    config = CoreConfig(
        policy="fair",
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        enable_prefix_cache=False,
        tenant_weights={"a": weight},
        input_token_weight=input_weight,
    )
    sim, draw = Sim(config, toy_info(num_blocks=blocks)), random.Random(seed)
    for _ in range(25):
        for tenant, prompt, output in zip("ab", prompts, outputs, strict=True):
            length = draw.randint(1, prompt)
            sim.submit(range(5, 5 + length), draw.randint(1, output), tenant=tenant, ignore_eos=True)
    ledger = Ledger(sim)
    leads = [0.0]
    while True:
        ledger.step()
        if not (_waits(sim, "a") and _waits(sim, "b")):
            break  # in this very step the other may have been served alone
        leads.append(ledger.served("a") / weight - ledger.served("b"))
    longest = max(len(c.submit.prompt) for c in sim.clients.values())
    bound = config.input_token_weight * longest + config.output_token_weight * ledger.most * max(outputs)
    assert max(leads) - min(leads) <= bound / weight + bound
    for tenant, phi in (
        ("a", weight),
        ("b", 1.0),
    ):  # and the tighter half of it: at any moment one leads by U/φ at most
        lead = max(leads) if tenant == "a" else -min(leads)
        assert lead <= bound / phi
    sim.run()
    sim.assert_tokens()
    sim.assert_all_free()


def test_a_tenant_that_floods_costs_the_other_next_to_nothing() -> None:
    def steps_until_done(policy: str) -> int:
        sim = Sim(CoreConfig(policy=policy, max_num_seqs=4, enable_prefix_cache=False))
        for i in range(60):
            sim.submit(range(5 + i, 15 + i), 10, tenant="flood", ignore_eos=True)
        small = [sim.submit([7 + i, 8, 9], 10, tenant="small", ignore_eos=True) for i in range(3)]
        steps = 0
        while any(sim.clients[key].reason is None for key in small):
            sim.fill()
            sim.deliver()
            steps += 1
        sim.run()
        sim.assert_tokens()
        return steps

    assert steps_until_done("fair") * 3 < steps_until_done("fcfs")


def _early_while_late_catches_up() -> float:
    """What the early tenant, far ahead, is served while one that comes late is served 300."""
    sim = Sim(CoreConfig(policy="fair", max_num_seqs=2, enable_prefix_cache=False))
    for i in range(60):
        sim.submit(range(5 + i, 15 + i), 10, tenant="early", ignore_eos=True)
    ledger = Ledger(sim)
    while ledger.served("early") < 400:
        ledger.step()
    for i in range(60):
        sim.submit(range(5 + i, 15 + i), 10, tenant="late", ignore_eos=True)
    before = ledger.served("early")
    while ledger.served("late") < 300:
        ledger.step()
    return ledger.served("early") - before


def test_idleness_earns_no_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes late starts level with those that wait: it is not served alone until it has caught up."""
    bound = 2 * (10 + 2 * 2 * 10)
    assert _early_while_late_catches_up() >= 300 - bound
    monkeypatch.setattr(Tenants, "lift", lambda self, slot, least: None)
    assert _early_while_late_catches_up() < 300 - bound, "without the lift it would be"


def test_who_comes_when_nobody_waits_starts_level_with_the_last_who_did() -> None:
    sim = Sim(CoreConfig(policy="fair", max_num_seqs=1, enable_prefix_cache=False))
    for i in range(20):
        sim.submit(range(5 + i, 15 + i), 10, tenant="early", ignore_eos=True)
    sim.run()
    for i in range(20):
        for tenant in ("late", "early"):
            sim.submit(range(5 + i, 15 + i), 10, tenant=tenant, ignore_eos=True)
    ledger, most = Ledger(sim), 0.0
    while _waits(sim, "late") and _waits(sim, "early"):
        ledger.step()
        most = max(most, ledger.served("late") - ledger.served("early"))
    assert most <= 2 * (10 + 2 * 10), "2·U; else it would have been served alone until level, at 600"
    sim.run()
    sim.assert_tokens()


def test_a_preempted_request_comes_back_before_any_that_never_ran_whoever_owes_what() -> None:
    config = CoreConfig(policy="fair", max_num_seqs=3, enable_prefix_cache=False)
    sim = Sim(config, toy_info(num_blocks=20, num_rows=67))
    for i in range(6):
        for tenant in "ab":
            sim.submit(range(3 + i, 23 + i), 30, tenant=tenant, ignore_eos=True)
    seen: set[int] = set()
    while sim.scheduler.num_live:
        back = {s.key for s in sim.scheduler.live_sequences() if s.preemptions and s.row < 0}
        record = sim.plan()
        if record is None:
            sim.deliver()
            continue
        rows = sim.scheduler.executors[0].rows
        taken = [int(rows.keys[admit.row]) for admit in record.plan.admit]
        assert set(taken) <= seen or back <= set(taken), "a newcomer passed a preempted one"
        seen.update(taken)
    assert sim.scheduler.stats().preemptions > 0
    sim.run()
    sim.assert_tokens()
    sim.assert_all_free()


def test_tenants_are_told_in_the_statistics_and_forgotten_in_the_end() -> None:
    sim = Sim(CoreConfig(policy="fair", tenant_weights={"t1": 2.5}))
    for i in range(3 * MAX_IDLE):
        sim.scheduler.submit(sim.request([5, 6, 7], 4, tenant=f"t{i}"), 0)
        sim.scheduler.cancel(i + 1, 0)
    assert len(sim.scheduler._tenants) <= MAX_IDLE + 1
    key = sim.submit([5, 6, 7], 4, tenant="t1", ignore_eos=True)
    sim.run()
    told = {tenant.tenant: tenant for tenant in sim.scheduler.stats().tenants}["t1"]
    assert (told.requests, told.waiting, told.running) == (1, 0, 0)
    assert (told.prompt_tokens, told.generated_tokens) == (3, len(sim.clients[key].tokens))
    assert told.weight == 2.5 and round(told.served, 6) >= (3 + 2 * 4) / 2.5


def test_prompt_tokens_found_in_the_cache_cost_a_tenant_nothing() -> None:
    sim = Sim(CoreConfig(policy="fair"))
    sim.submit(range(10, 40), 1, tenant="a")
    sim.run()
    before = sim.scheduler.stats().tenants[0]
    sim.submit([*range(10, 40), 50, 51], 1, tenant="a")
    sim.run()
    after = sim.scheduler.stats().tenants[0]
    assert after.prompt_tokens - before.prompt_tokens == 32 - 28
    assert after.served - before.served == 32 - 28 + 2


def test_isolated_tenants_share_no_prefix() -> None:
    for isolate, hit in ((False, True), (True, False)):
        sim = Sim(CoreConfig(isolate_tenants=isolate))
        prompt = range(10, 40)
        sim.submit(prompt, 2, tenant="a")
        sim.run()
        other, same = sim.submit(prompt, 2, tenant="b"), sim.submit(prompt, 2, tenant="a")
        sim.run()
        assert bool(sim.clients[other].cached) == hit and sim.clients[same].cached
        sim.assert_tokens()
