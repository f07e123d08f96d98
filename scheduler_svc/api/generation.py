"""One request from its call's point of view: what Inference.Generate and VllmEngine.Generate have in common."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from common.errors import DeadlinePassed, Draining, RequestAborted, StepwireError, Unavailable
from common.messages import U32
from scheduler_svc.api.calls import Context, on_done
from scheduler_svc.api.prompt import PromptReader
from scheduler_svc.api.request_tracer import (
    TRACEPARENT,
    AttributeValue,
    RequestTracer,
    completion_attributes,
    request_attributes,
    trace_context,
)
from scheduler_svc.api.served_model import ServedModel, TextTokenizer
from scheduler_svc.api.status import Metadata
from scheduler_svc.api.stream import Choices, RequestStream
from scheduler_svc.api.validation import Limits, ValidRequest, validate
from scheduler_svc.api.worker import ApiWorker
from scheduler_svc.choice_seed import choice_seed
from scheduler_svc.messages import Child, Submit
from scheduler_svc.text_cursor import TextCursor
from scheduler_svc.token_stream import Completion, Piece, StreamLimits, StreamWants, TokenStream
from stepwire.v1 import inference_pb2 as pb

GONE: Final = RequestAborted("the caller went away")
# The caller's clock ends its deadline, too, and its cancelling may be here first.
EARLY_NS: Final = 10_000_000


class ActiveRequest:
    """A request some call serves. `close` comes from its end and from the done callback; the first counts."""

    def __init__(
        self,
        worker: ApiWorker,
        tracer: RequestTracer,
        submit: Submit,
        valid: ValidRequest,
        attributes: Mapping[str, AttributeValue],
    ) -> None:
        self.submit = submit
        self.valid = valid
        self._worker = worker
        self._tracer = tracer
        self._streams: list[RequestStream] = []
        self._choices: Choices | None = None
        self._completions: list[Completion] = []
        self._error: StepwireError | None = GONE
        self._closed = False
        self._seen_token = False
        self._encode: Callable[[int, str, Sequence[int]], bytes] | None = None
        self._handle = tracer.on_request(submit, attributes)

    async def start(self, states: Sequence[TokenStream]) -> None:
        """Returns when the core accepted the request. Raises what it was refused with. `states`: by choice."""
        self._streams = self._worker.open(self.submit, states)
        self._choices = Choices(self._streams)
        await self._worker.wait_accepted(self._streams)

    @property
    def finished(self) -> bool:
        """The last piece of every choice was taken."""
        return self._choices is not None and self._choices.finished

    def wait(self) -> "asyncio.Future[bytes | None]":
        """Once `take` had nothing: until it may have something. Resolves to a message instead where `encode_tokens`
        asked for them: the next one of the stream, to be written as it is."""
        assert self._choices is not None
        return self._choices.bell.wait()

    def encode_tokens(self, encode: Callable[[int, str, Sequence[int]], bytes]) -> None:
        """From the first piece on, let single tokens come as messages: (choice, text, ids) to bytes."""
        self._encode = encode

    def take(self) -> tuple[int, Piece] | None:
        """The next piece and whose it is; None: not yet. Raises the StepwireError the request ended with."""
        assert self._choices is not None
        if (taken := self._choices.take()) is None:
            return None
        _, piece = taken
        if not self._seen_token and piece.token_ids:
            self._seen_token = True
            if self._encode is not None:
                for index, stream in enumerate(self._streams):
                    stream.encode = partial(self._encode, index)
            elapsed_ns = self._worker.clock.monotonic_ns() - self.submit.arrival_ns
            self._tracer.on_first_token(self._handle, elapsed_ns / 1e9)
        if piece.completion is not None:
            self._completions.append(piece.completion)
            if self.finished:
                self._error = None
        return taken

    async def next(self) -> tuple[int, Piece]:
        """As `take`, once there is something."""
        while (taken := self.take()) is None:
            await self.wait()
        return taken

    def failed(self, error: StepwireError) -> None:
        self._error = error

    def close(self) -> None:
        """Frees everything the request holds, in the core too, whatever state it is in."""
        if self._closed:
            return
        self._closed = True
        for stream in self._streams:
            self._worker.close(stream)
        self._tracer.on_end(self._handle, completion_attributes(self._completions), self._cause())

    def _cause(self) -> StepwireError | None:
        """To gRPC a deadline that passes is a caller that goes away."""
        deadline_ns = self.submit.deadline_ns
        if self._error is GONE and deadline_ns and self._worker.clock.monotonic_ns() > deadline_ns - EARLY_NS:
            return DeadlinePassed("the request's deadline passed")
        return self._error


class Generation:
    """Makes ActiveRequests. Owned by the event loop."""

    def __init__(
        self,
        worker: ApiWorker,
        prompts: PromptReader,
        tokenizer: TextTokenizer | None,
        model: ServedModel,
        tracer: RequestTracer,
        stream_limits: StreamLimits,
        max_message_bytes: int,
    ) -> None:
        self._worker = worker
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._model = model
        self._tracer = tracer
        self._stream_limits = stream_limits
        self._max_message_bytes = max_message_bytes

    @property
    def model(self) -> ServedModel:
        """The model as known now: completed by what the executor told."""
        return self._model.resolve(self._worker.state)

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def limits(self) -> Limits:
        """Raises Unavailable while no executor was ever connected, Draining while no request is admitted."""
        state = self._worker.state
        if state.draining:
            raise Draining("the server is draining and takes no new requests", retry_after_ms=1000)
        if state.info is None:
            raise Unavailable("no executor has connected yet", retry_after_ms=1000)
        return Limits(
            vocab_size=state.info.vocab_size,
            max_context=state.max_context,
            max_prompt_tokens=state.max_prompt_tokens,
            features=frozenset(state.info.features),
            has_tokenizer=self.has_tokenizer,
            max_message_bytes=self._max_message_bytes,
            eos_ids=state.info.eos_ids,
        )

    async def accept(self, request: pb.GenerateRequest, context: Context, trace: bytes) -> ActiveRequest:
        """Validates, tokenises, and brings the request into the core. Raises StepwireError.

        The request is closed when the call ends, however it ends.
        """
        arrival_ns = self._worker.clock.monotonic_ns()
        deadline_ns = _deadline_ns(context, arrival_ns)
        model = self.model
        limits = self.limits()
        model.check_name(request.model)
        valid = validate(request, model.defaults, limits)
        prompt = await self._prompts.read(request, limits)
        seed = valid.sampling.seed
        submit = Submit(
            key=self._worker.next_key(),
            request_id=valid.request_id,
            prompt=prompt,
            sampling=valid.sampling,
            arrival_ns=arrival_ns,
            raw_logits=valid.raw_logits,
            priority=valid.priority,
            cache_salt=valid.cache_salt,
            tenant=valid.tenant,
            deadline_ns=deadline_ns,
            trace_context=trace,
            children=tuple(Child(self._worker.next_key(), choice_seed(seed, i)) for i in range(1, valid.num_choices)),
        )
        operation = "chat" if request.WhichOneof("input") == "chat" else "text_completion"
        attributes = request_attributes(submit, model.name, operation)
        active = ActiveRequest(self._worker, self._tracer, submit, valid, attributes)
        on_done(context, active.close)
        try:
            await active.start([self._new_stream(valid, prompt, limits, i) for i in range(valid.num_choices)])
        except StepwireError as error:
            active.failed(error)
            active.close()
            raise
        return active

    def _new_stream(self, valid: ValidRequest, prompt: U32, limits: Limits, index: int) -> TokenStream:
        cursor = None
        if valid.detokenize and self._tokenizer is not None:
            decoder = self._tokenizer.decoder(prompt)
            cursor = TextCursor(decoder, valid.stop_strings, valid.sampling.min_tokens)
        wants = StreamWants(
            prompt=prompt,
            cursor=cursor,
            vocab_size=limits.vocab_size,
            num_logprobs=valid.sampling.num_logprobs,
            num_prompt_logprobs=0 if index else valid.sampling.num_prompt_logprobs,
            raw_logits=valid.raw_logits,
        )
        return TokenStream(wants, self._stream_limits)


def begin_trace(context: Context) -> tuple[bytes, Metadata]:
    """(Submit.trace_context, trailing metadata). The metadata is set on the call; errors must repeat it."""
    trace, traceparent = trace_context(context)
    if not traceparent:
        return trace, ()
    trailing: Metadata = ((TRACEPARENT, traceparent),)
    context.set_trailing_metadata(trailing)
    return trace, trailing


def _deadline_ns(context: Context, now_ns: int) -> int:
    remaining: float | None = context.time_remaining()
    if remaining is None or not math.isfinite(remaining):
        return 0
    if remaining <= 0:
        raise DeadlinePassed("the deadline had passed when the request came in")
    return now_ns + int(remaining * 1e9)
