"""What an admission finds already computed: cached blocks or, for a further choice of n > 1, the leader's prompt.

A fork needs nothing of the executor but a plain Admit. The child's block table begins with the leader's full prompt
blocks, shared by reference count whether or not there is a prefix cache. The block that the child's first own position
falls into is copied (`copies` of the plan), because child and leader write on in it. Of the prompt only the last token
is computed again, for the logits the child chooses its first token from.

Lifetimes. Plans run in order on the device and copies come before a plan's forward pass, so a copy planned in step N
sees what steps before N wrote and nothing later: a leader can be forked from the step after the one that computes the
end of its prompt. The copied block is named by step N through the leader's row (`last_step`), so should the leader
leave, it rests in limbo until the result of N. Shared blocks belong to both tables. The target is fresh, so no step
in flight knows it.

A leader may turn out to have failed in its prompt when forks of it are planned already: their blocks hold nothing then,
and they fail as the leader did, before any token of theirs is known. See `forks_of`.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from common.frozen import step_message
from common.messages import RowError
from scheduler_svc.core.executor_state import ExecutorState
from scheduler_svc.core.sequence import Sequence, SequenceState
from scheduler_svc.messages import Submit


def choices(request: Submit) -> Iterator[Submit]:
    """The request as one for each choice, choice 0 first. Only that one's prompt logprobs are wanted."""
    yield request
    for child in request.children:
        sampling = replace(request.sampling, seed=child.seed, num_prompt_logprobs=0, prompt_logprobs_from=0)
        yield replace(request, key=child.key, sampling=sampling, trace_context=b"", children=())


@step_message
class Head:
    """blocks: the table begins with these, which get one more user. computed: positions that need no computation; those
    past `blocks` come with a copy. leader: row of the sequence forked from, -1: none. copied: its block to copy into
    the first fresh one, -1: none."""

    blocks: list[int]
    computed: int
    leader: int = -1
    copied: int = -1


_NOTHING_FOUND = Head([], 0)


def find_head(executor: ExecutorState, sequence: Sequence) -> Head:
    """At least one token is left to compute, and none whose logits are still wanted is skipped."""
    if sequence.leader is not None and can_fork(executor, sequence):
        row, computed = sequence.leader.row, sequence.prompt_len - 1
        num_shared = computed // executor.block_size
        table = executor.rows.blocks(row)
        copied = int(table[num_shared]) if computed % executor.block_size else -1
        return Head(table[:num_shared].tolist(), computed, row, copied)
    if executor.pool.cache is None:
        return _NOTHING_FOUND
    usable = sequence.length - 1
    if sequence.next_prompt_logprob < sequence.prompt_len:
        usable = min(usable, sequence.next_prompt_logprob - 1)
    count = usable // executor.block_size
    # Of all full blocks, for the last one will be registered too.
    hashes = executor.hashes(sequence, sequence.length // executor.block_size)
    blocks = executor.pool.match(hashes, count)
    if not blocks:
        return _NOTHING_FOUND
    return Head(blocks, len(blocks) * executor.block_size)


def can_fork(executor: ExecutorState, sequence: Sequence) -> bool:
    """The leader runs on this executor and steps planned before the next one compute its prompt.

    Only a first admission forks: whoever comes back has tokens of its own and is admitted like any other.
    """
    leader = sequence.leader
    return (
        leader is not None
        and leader.state == SequenceState.RUNNING
        and leader.executor_id == executor.id
        and 0 < leader.prefilled_step < executor.next_step
    )


def forks_of(executor: ExecutorState, error: RowError, step_id: int) -> list[int]:
    """Rows that began with a prompt whose computation failed in step `step_id`. `error.row` is not freed yet."""
    rows = executor.rows
    leader = rows.seqs[error.row]
    if leader is None or step_id > leader.prefilled_step:
        return []  # it failed behind its prompt, or nobody forked from it yet
    return np.flatnonzero(rows.forked_from == error.admission_id).tolist()
