"""What a watcher is told of a finished step. Made only while somebody watches."""

from common.messages import StepResult
from scheduler_svc.core.executor_state import ExecutorState
from scheduler_svc.core.outcome import StepOutcome
from scheduler_svc.messages import StepSeen


def step_seen(executor: ExecutorState, outcome: StepOutcome, result: StepResult, received_ns: int) -> StepSeen:
    record, timings = outcome.record, result.timings
    admits = record.plan.admit
    return StepSeen(
        executor=executor.address,
        epoch=result.epoch,
        step_id=result.step_id,
        decode_tokens=record.decode_tokens,
        prefill_tokens=record.prefill_tokens,
        num_sequences=record.decode_tokens + len(record.prefill_keys),
        waiting=record.waiting,
        free_blocks=record.free_blocks,
        bucket=result.bucket,
        planned_ns=record.planned_ns,
        result_ns=received_ns,
        device_ns=timings.device_end_ns - timings.device_start_ns,
        device_idle_ns=timings.device_idle_ns,
        running=record.running,
        num_blocks=executor.pool.num_blocks,
        preemptions=executor.preemptions,
        admitted_tokens=sum(admit.length for admit in admits),
        cached_tokens=sum(admit.computed_len for admit in admits),
        generated_tokens=sum(len(batch.tokens) for batch in outcome.batches.values()),
    )
