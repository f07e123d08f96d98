"""From keyword arguments to request messages, and from stream messages to events. No I/O."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from google.protobuf.message import Message as Proto

from stepwire_client._gen.stepwire.v1 import inference_pb2 as pb
from stepwire_client.errors import BrokenStream
from stepwire_client.options import NO_TEXT
from stepwire_client.types import (
    Completion,
    Delta,
    Event,
    Finished,
    GenerateOptions,
    Health,
    Message,
    Started,
    decode_delta,
    decode_finished,
    decode_started,
)

M = TypeVar("M", bound=Proto)

ChatMessages = Sequence[Message | Mapping[str, str]]

_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "allowed_token_ids",
)  # fmt: skip
_STOP = ("max_tokens", "min_tokens", "stop_token_ids", "stop_strings", "ignore_eos")
_OUTPUT = ("logprobs", "raw_logits", "prompt_logprobs", "detokenize")
_REQUEST = ("model", "request_id", "priority", "cache_salt", "tenant", "n")
_CHAT = ("template", "add_generation_prompt")


def chat_input(messages: ChatMessages, template: str = "", add_generation_prompt: bool | None = None) -> pb.ChatInput:
    """Raises ValueError for a message that lacks its role or content; ValueError or TypeError for one that is no text,
    naming the field."""
    turns = []
    for number, message in enumerate(messages):
        if isinstance(message, Message):
            turn = {"role": message.role, "content": message.content}
        elif set(message) == {"role", "content"}:
            turn = dict(message)
        else:
            raise ValueError(f"a chat message has role and content, not {sorted(message)}")
        turns.append(_filled(pb.ChatMessage, turn, f"messages[{number}]."))
    return _filled(
        pb.ChatInput, {"messages": turns, "template": template, "add_generation_prompt": add_generation_prompt}
    )


def generate_request(
    text: str | None,
    messages: ChatMessages | None,
    token_ids: Sequence[int] | None,
    stream: bool,
    options: GenerateOptions,
) -> pb.GenerateRequest:
    """Raises ValueError unless exactly one input is given, TypeError for an option that does not exist, either of them,
    naming the option, for a value that it can not have."""
    if sum(given is not None for given in (text, messages, token_ids)) != 1:
        raise ValueError("give exactly one of text, messages and token_ids")
    values = {name: value for name, value in cast("dict[str, Any]", options).items() if value is not None}
    unknown = values.keys() - {*_SAMPLING, *_STOP, *_OUTPUT, *_REQUEST, *_CHAT}
    if unknown:
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}")

    def chosen(names: Iterable[str]) -> dict[str, Any]:
        return {name: values[name] for name in names if name in values}

    if messages is None and (misplaced := chosen(_CHAT)):
        raise ValueError(f"{', '.join(misplaced)}: only with messages")
    if isinstance(values.get("stop_strings"), str):  # each of its characters would stop the answer
        raise TypeError("stop_strings: a list of texts, not one text")
    request = _filled(
        pb.GenerateRequest,
        {
            "sampling": _filled(pb.SamplingParams, chosen(_SAMPLING)),
            "stop": _filled(pb.StopConditions, chosen(_STOP)),
            "output": _filled(pb.OutputOptions, chosen(_OUTPUT)),
            "stream": stream,
            **chosen(_REQUEST),
        },
    )
    if text is not None:
        request.MergeFrom(_filled(pb.GenerateRequest, {"text": text}))
    elif messages is not None:
        request.chat.CopyFrom(chat_input(messages, **chosen(_CHAT)))
    else:
        request.token_ids.CopyFrom(_filled(pb.TokenIds, {"ids": token_ids}, "token_ids."))
    return request


def _filled(kind: type[M], values: dict[str, Any], within: str = "") -> M:
    """A message with these fields. protobuf's own errors do not say which of them it can not take."""
    try:
        return kind(**values)
    except (TypeError, ValueError):
        for name, value in values.items():
            try:
                kind(**{name: value})
            except (TypeError, ValueError) as error:
                raised = TypeError if isinstance(error, TypeError) else ValueError
                what = NO_TEXT.format(error.start + 1) if isinstance(error, UnicodeEncodeError) else error
                raise raised(f"{within}{name}: {what}") from None
        raise


class EventReader:
    """Turns the messages of one Generate stream into events. Owned by one stream."""

    def __init__(self) -> None:
        self._started: set[int] = set()
        self._finished: set[int] = set()

    def feed(self, message: pb.GenerateResponse) -> list[Event]:
        events: list[Event] = []
        if message.HasField("started"):
            events.append(decode_started(message.started, message.index))
            self._started.add(message.index)
        if message.HasField("delta"):
            events.append(decode_delta(message.delta, message.index))
        if message.HasField("finished"):
            events.append(decode_finished(message.finished, message.index))
            self._finished.add(message.index)
        return events

    def end(self) -> None:
        """The stream ended with status OK. Raises BrokenStream when a choice's finish did not come before."""
        if not self._finished or self._started - self._finished:
            raise BrokenStream("the stream ended without a finish reason", reason="BROKEN_STREAM")


def add_event(events: dict[int, list[Event]], event: Event) -> Completion | None:
    """Books an event of several choices in `events`. Returns its choice's answer when it was the last of that.

    Raises BrokenStream when the first is missing.
    """
    own = events.setdefault(event.index, [])
    own.append(event)
    return completion(events.pop(event.index)) if isinstance(event, Finished) else None


def completion(events: Sequence[Event]) -> Completion:
    """One answer from all its events. Raises BrokenStream when the first or last is missing, ValueError when they are
    of several choices."""
    if any(event.index != events[0].index for event in events):
        raise ValueError("with n > 1 there are several answers: ask for completions()")
    started = next((e for e in events if isinstance(e, Started)), None)
    finished = next((e for e in events if isinstance(e, Finished)), None)
    if started is None or finished is None:
        raise BrokenStream("the answer has no beginning or no end", reason="BROKEN_STREAM")
    deltas = [e for e in events if isinstance(e, Delta)]
    return Completion(
        request_id=started.request_id,
        text="".join(d.text for d in deltas),
        token_ids=tuple(i for d in deltas for i in d.token_ids),
        finish_reason=finished.reason,
        usage=finished.usage,
        seed=started.seed,
        stop_token_id=finished.stop_token_id,
        stop_string=finished.stop_string,
        logprobs=tuple(p for d in deltas for p in d.logprobs),
        raw_logits=tuple(r for d in deltas for r in d.raw_logits),
        prompt_logprobs=tuple(p for d in deltas for p in d.prompt_logprobs),
        index=started.index,
    )


def health_request(service: str) -> bytes:
    """grpc.health.v1.HealthCheckRequest, spelled out here so that the client needs no further package."""
    name = service.encode()
    if len(name) > 127:
        raise ValueError("a service's name has at most 127 bytes")
    return b"\x0a" + bytes([len(name)]) + name if name else b""


def health_status(response: bytes) -> Health:
    """`status` of grpc.health.v1.HealthCheckResponse."""
    number = response[1] if response[:1] == b"\x08" and len(response) > 1 else 0
    known = (Health.UNKNOWN, Health.SERVING, Health.NOT_SERVING, Health.SERVICE_UNKNOWN)
    return known[number] if number < len(known) else Health.UNKNOWN
