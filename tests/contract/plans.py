"""Plans by hand."""

import itertools
from dataclasses import dataclass, field, replace

from common.messages import U32, Admit, Hello, Sampling, StepPlan, StepResult, u32
from executor_svc.step_executor import PendingStep, StepExecutor

SCHEDULER = b"c" * 16
_admission_ids = itertools.count(1_000_000)
GREEDY = Sampling(seed=1, max_tokens=30, temperature=0.0, ignore_eos=True)


def admit(
    row: int,
    tokens: list[int],
    blocks: list[int],
    *,
    admission_id: int = 0,
    computed_len: int = 0,
    prompt_len: int = 0,
    length: int = 0,
    sampling: Sampling = GREEDY,
) -> Admit:
    """Zeros: an admission id never used before, the whole prompt, all tokens."""
    return Admit(
        row,
        admission_id or next(_admission_ids),
        u32(tokens),
        length or len(tokens),
        prompt_len or length or len(tokens),
        computed_len,
        u32(blocks),
        sampling,
    )


def prefill(*chunks: tuple[int, int, int]) -> dict[str, U32]:
    """chunks: (row, start, count)."""
    return {
        "prefill_rows": u32(r for r, _, _ in chunks),
        "prefill_starts": u32(s for _, s, _ in chunks),
        "prefill_counts": u32(c for _, _, c in chunks),
    }


@dataclass
class Steps:
    """Numbers plans for one epoch; `num_tokens` is summed up unless given."""

    executor: StepExecutor
    epoch: int = 1
    next_id: int = 1
    results: list[StepResult] = field(default_factory=list)

    def begin(
        self, *, keep_kv: bool = False, known_incarnation: int = 0, depth: int = 4, scheduler_id: bytes = SCHEDULER
    ) -> bool:
        hello = Hello(scheduler_id, self.epoch, depth, 0, 0, keep_kv=keep_kv, known_incarnation=known_incarnation)
        return self.executor.begin_epoch(hello)

    def plan(self, **fields: object) -> StepPlan:
        plan = StepPlan(self.epoch, self.next_id, 0, num_tokens=0)
        plan = replace(plan, **fields)  # type: ignore[arg-type]
        if "num_tokens" not in fields:
            plan = replace(plan, num_tokens=int(plan.prefill_counts.sum()) + len(plan.decode_rows))
        return plan

    def launch(self, **fields: object) -> PendingStep:
        pending = self.executor.execute(self.plan(**fields), received_ns=5)
        self.next_id += 1
        return pending

    def run(self, **fields: object) -> dict[int, int]:
        """One step, waited for: row → token."""
        result = self.launch(**fields).wait()
        self.results.append(result)
        return tokens_of(result)

    def decode(self, *rows: int) -> dict[int, int]:
        return self.run(decode_rows=u32(rows))


def started(executor: StepExecutor, **options: object) -> Steps:
    steps = Steps(executor)
    steps.begin(**options)  # type: ignore[arg-type]
    return steps


def tokens_of(result: StepResult) -> dict[int, int]:
    return dict(zip(result.emitted_rows.tolist(), result.tokens.tolist(), strict=True))
