"""Whether a request can be served: ever, and now. What is refused is so at once, naming the limit."""

from collections.abc import Sequence

from common.errors import InvalidInput, NotSupported, Overloaded, ProtocolError, TooLarge
from common.messages import ExecutorInfo
from common.prompt_positions import prompt_position_bytes
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.draft import admit_bytes
from scheduler_svc.core.drain_rate import DrainRate
from scheduler_svc.core.executor_state import context_limit, output_limit, wire_limit
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.messages import Submit


def check_welcome(info: ExecutorInfo, known: Sequence[ExecutorInfo], config: CoreConfig) -> None:
    """Raises ProtocolError when `info` holds less than the least of `known`, or lacks what all of them can."""
    for name, own, theirs in (
        ("a context of {} tokens", context_limit(info), [context_limit(other) for other in known]),
        ("{} bytes of output in a step", output_limit(info, config), [output_limit(other, config) for other in known]),
        ("{} bytes in a plan", wire_limit(info, config), [wire_limit(other, config) for other in known]),
    ):
        if own < (least := min(theirs, default=0)):
            raise ProtocolError(f"welcome: {name.format(own)}, where the other executors hold {least}", field="info")
    if known and (lacking := set.intersection(*(set(other.features) for other in known)) - set(info.features)):
        raise ProtocolError(f"welcome: no {sorted(lacking)}, which the other executors have", field="info")


def check_length(length: int, max_context: int) -> None:
    """Raises TooLarge when a sequence that had room before has none any more."""
    if length + 1 > max_context:
        raise TooLarge(
            f"{length} tokens and one more no longer fit: the executor that came back holds {max_context}",
            limit=str(max_context),
        )


def check_request(request: Submit, info: ExecutorInfo, config: CoreConfig) -> None:
    """Raises InvalidInput, TooLarge or NotSupported when an executor like `info` could never run it."""
    _check_tokens(request, info)
    _check_outputs(request, info, config)
    wire = wire_limit(info, config)
    if admit_bytes(context_limit(info), info.max_blocks_per_row, request.sampling) > wire:
        raise TooLarge("the sampling parameters are too large to send", field="sampling", limit=str(wire))


def check_room(request: Submit, config: CoreConfig, queue: WaitingQueue, drain_rate: DrainRate, now_ns: int) -> None:
    """Raises Overloaded while those who wait leave no room for this one, TooLarge when it could never have any."""
    count, most = len(request.keys), config.max_queued_requests
    if count > most:
        raise TooLarge(f"n is {count}, more than may wait at all", field="n", limit=str(most))
    waiting, tokens, most_tokens = len(queue) + queue.num_held, queue.num_tokens, config.max_queued_tokens
    if waiting + count > most:
        full, limit = f"{waiting} requests wait already", most
    elif most_tokens and len(queue) and tokens + len(request.prompt) > most_tokens:
        full, limit = f"requests with {tokens} prompt tokens wait already", most_tokens
    else:
        return
    raise Overloaded(full, limit=str(limit), retry_after_ms=drain_rate.retry_after_ms(len(queue), now_ns))


def _check_tokens(request: Submit, info: ExecutorInfo) -> None:
    if not len(request.prompt):
        raise InvalidInput("the prompt is empty", field="prompt")
    s = request.sampling
    for field, ids in (
        ("prompt", (int(request.prompt.max()),)),
        ("sampling.stop_ids", s.stop_ids),
        ("sampling.allowed_ids", s.allowed_ids),
        ("sampling.bias", tuple(token for token, _ in s.bias)),
    ):
        if ids and max(ids) >= info.vocab_size:
            limit = str(info.vocab_size)
            raise InvalidInput(f"token id {max(ids)} is outside the vocabulary of {limit}", field=field, limit=limit)
    masked = {*s.stop_ids, *(() if s.ignore_eos else info.eos_ids)} if s.min_tokens else set()
    if masked and masked.issuperset(s.allowed_ids or range(info.vocab_size)):
        raise InvalidInput("min_tokens leaves no token to choose", field="sampling.allowed_ids", limit="1")
    most = context_limit(info) - 1
    if len(request.prompt) > most:
        raise TooLarge(
            f"the prompt has {len(request.prompt)} tokens; at most {most} fit into the context and the KV cache",
            field="prompt",
            limit=str(most),
        )


def _check_outputs(request: Submit, info: ExecutorInfo, config: CoreConfig) -> None:
    s = request.sampling
    for wanted, feature in ((request.raw_logits, "raw_logits"), (s.num_prompt_logprobs, "prompt_logprobs")):
        if wanted and feature not in info.features:
            raise NotSupported(f"the executor gives no {feature}", field=feature)
    limit = output_limit(info, config)
    if request.raw_logits and 4 * info.vocab_size > limit:
        raise TooLarge("the raw logits of one token pass the limit of a step", field="raw_logits", limit=str(limit))
    if s.num_prompt_logprobs and prompt_position_bytes(s.num_prompt_logprobs) > limit:
        raise TooLarge("the logprobs of one token pass the limit of a step", field="prompt_logprobs", limit=str(limit))
