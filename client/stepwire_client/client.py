"""The synchronous client. Safe to share between threads; each stream belongs to the thread that reads it."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

import grpc

from stepwire_client._gen.stepwire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from stepwire_client.errors import Cancelled, StepwireError, from_rpc_error
from stepwire_client.options import (
    DEFAULT_ADDRESS,
    DEFAULT_MAX_MESSAGE_BYTES,
    Retry,
    Tls,
    call_metadata,
    channel_options,
    limit_of,
    pause_before_retry,
)
from stepwire_client.requests import (
    ChatMessages,
    EventReader,
    add_event,
    chat_input,
    completion,
    generate_request,
    health_request,
    health_status,
)
from stepwire_client.types import (
    CacheReset,
    Completion,
    Delta,
    Event,
    GenerateOptions,
    Health,
    ModelInfo,
    Prompt,
    Stats,
    Step,
    Tokens,
    decode_model_info,
    decode_stats,
    decode_steps,
)

T = TypeVar("T")
R = TypeVar("R")


class Stream(Generic[T]):
    """Iterates what a streaming call brings. Leaving it early (`close`, `with`, dropping it) cancels the call.

    Errors are the classes of stepwire_client.errors; after `close` it raises Cancelled.
    """

    def __init__(
        self,
        start: Callable[[float | None], Any],
        feed: Callable[[Any], Sequence[T]],
        end: Callable[[], None],
        deadline: float | None,
        retry: Retry,
    ) -> None:
        self._start = start
        self._feed = feed
        self._end = end
        self._ready: deque[T] = deque()
        self._give_up_at = None if deadline is None else time.monotonic() + deadline
        self._retry = retry
        self._pauses = retry.pauses()
        self._closed = threading.Event()
        self._done = self._begun = False
        self._call = start(deadline)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        while not self._ready:
            if self._done:
                raise StopIteration
            if self._closed.is_set():
                raise Cancelled("the stream was closed", reason="CLIENT_CLOSED")
            try:
                message = next(self._call)
            except StopIteration:
                self._done = True
                self._end()
            except grpc.RpcError as error:
                self._again_or_raise(from_rpc_error(error))
            else:
                self._begun = True
                self._ready.extend(self._feed(message))
        return self._ready.popleft()

    def _again_or_raise(self, error: StepwireError) -> None:
        """Starts the call anew after a pause, which `close` ends, if nothing had come yet and that may help."""
        left = None if self._give_up_at is None else self._give_up_at - time.monotonic()
        pause = None
        if not (self._begun or self._closed.is_set()):
            pause = pause_before_retry(error, self._retry, self._pauses, left)
        if pause is None:
            self._done = not self._closed.is_set()
            raise error from None
        if self._closed.wait(pause):
            return
        self._call = self._start(None if self._give_up_at is None else self._give_up_at - time.monotonic())
        if self._closed.is_set():  # meanwhile, so `close` had the call before
            self._call.cancel()

    def close(self) -> None:
        """Cancels the call unless it is over. Idempotent; any thread."""
        self._closed.set()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):  # else the call never started
            self._call.cancel()


class Generation(Stream[Event]):
    """The events of one request: Started, then Deltas, last Finished. With n > 1 so for each choice, by `index`; the
    choices' Started come first, the rest interleaved."""

    def texts(self) -> Iterator[str]:
        """Only the text, as it comes. Raises ValueError where n is above 1."""
        for event in self:
            if event.index:
                raise ValueError("with n > 1 the texts of several answers are interleaved: read the events' index")
            if isinstance(event, Delta) and event.text:
                yield event.text

    def completion(self) -> Completion:
        """Reads to the end and returns all of it. Raises ValueError where n is above 1."""
        return completion(list(self))

    def choices(self) -> Iterator[Completion]:
        """Each choice's whole answer when it has ended."""
        events: dict[int, list[Event]] = {}
        for event in self:
            if (answer := add_event(events, event)) is not None:
                yield answer

    def completions(self) -> tuple[Completion, ...]:
        """Reads to the end and returns all of it, by choice."""
        return tuple(sorted(self.choices(), key=lambda answer: answer.index))


class Client:
    """Calls one Stepwire server.

    `address`: any gRPC address, `unix:` too. `num_channels`: connections, used in turn. `tls`: None for plain text.
    `token`: sent as a bearer token. `deadline`: seconds for each call that is given none of its own; None: no limit.

        with Client("127.0.0.1:50051") as client:
            for text in client.generate("Once upon a time", max_tokens=32).texts():
                print(text, end="", flush=True)
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        num_channels: int = 1,
        tls: Tls | None = None,
        token: str | None = None,
        deadline: float | None = None,
        retry: Retry | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        if num_channels < 1:
            raise ValueError("num_channels must be at least 1")
        self.address = address
        self._metadata = call_metadata(token)
        self._deadline = deadline
        self._retry = retry or Retry()
        options = channel_options(address, max_message_bytes)
        credentials = tls.credentials() if tls else None
        self._channels = [
            grpc.secure_channel(address, credentials, options)
            if credentials
            else grpc.insecure_channel(address, options)
            for _ in range(num_channels)
        ]
        self._turn = itertools.cycle(range(num_channels))
        self._inference = [inference_pb2_grpc.InferenceStub(channel) for channel in self._channels]
        self._admin = [admin_pb2_grpc.AdminStub(channel) for channel in self._channels]

    def close(self) -> None:
        """Ends every call still running."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------- generating

    def generate(
        self,
        text: str | None = None,
        *,
        messages: ChatMessages | None = None,
        token_ids: Sequence[int] | None = None,
        stream: bool = True,
        deadline: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Starts a request and returns its events. Exactly one of text, messages and token_ids is given."""
        request = generate_request(text, messages, token_ids, stream, options)
        reader = EventReader()

        def start(timeout: float | None) -> Any:
            return self._inference[next(self._turn)].Generate(request, timeout=timeout, metadata=self._metadata)

        return Generation(start, reader.feed, reader.end, self._limit(deadline), self._retry)

    def complete(
        self,
        text: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        deadline: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """The whole answer to a text or to token ids."""
        with self.generate(text, token_ids=token_ids, stream=False, deadline=deadline, **options) as generation:
            return generation.completion()

    def completions(
        self,
        text: str | None = None,
        *,
        messages: ChatMessages | None = None,
        token_ids: Sequence[int] | None = None,
        deadline: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> tuple[Completion, ...]:
        """The whole answers of a request with `n`, by choice."""
        with self.generate(
            text, messages=messages, token_ids=token_ids, stream=False, deadline=deadline, **options
        ) as generation:
            return generation.completions()

    def chat(
        self, messages: ChatMessages, *, deadline: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """The whole answer to a chat."""
        with self.generate(messages=messages, stream=False, deadline=deadline, **options) as generation:
            return generation.completion()

    def abort(self, request_id: str, *, deadline: float | None = None) -> bool:
        """Ends a request by its exact id. Whether it was live."""
        request = inference_pb2.AbortRequest(request_id=request_id)
        return self._call(lambda i: self._inference[i].Abort, request, deadline).found

    # -------------------------------------------------------------------------------------------------- the model

    def model_info(self, model: str = "", *, deadline: float | None = None) -> ModelInfo:
        request = inference_pb2.GetModelInfoRequest(model=model)
        return decode_model_info(self._call(lambda i: self._inference[i].GetModelInfo, request, deadline))

    def tokenize(
        self, text: str, *, model: str = "", add_special_tokens: bool | None = None, deadline: float | None = None
    ) -> Tokens:
        request = inference_pb2.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
        answer = self._call(lambda i: self._inference[i].Tokenize, request, deadline)
        return Tokens(tuple(answer.ids), tuple(answer.tokens))

    def detokenize(
        self,
        ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        deadline: float | None = None,
    ) -> str:
        request = inference_pb2.DetokenizeRequest(model=model, ids=ids, skip_special_tokens=skip_special_tokens)
        return self._call(lambda i: self._inference[i].Detokenize, request, deadline).text

    def apply_chat_template(
        self,
        messages: ChatMessages,
        *,
        model: str = "",
        template: str = "",
        add_generation_prompt: bool | None = None,
        deadline: float | None = None,
    ) -> Prompt:
        chat = chat_input(messages, template, add_generation_prompt)
        request = inference_pb2.ApplyChatTemplateRequest(model=model, chat=chat)
        answer = self._call(lambda i: self._inference[i].ApplyChatTemplate, request, deadline)
        return Prompt(answer.text, tuple(answer.ids))

    # ------------------------------------------------------------------------------------------------- operations

    def stats(self, *, deadline: float | None = None) -> Stats:
        return decode_stats(self._call(lambda i: self._admin[i].GetStats, admin_pb2.GetStatsRequest(), deadline))

    def watch_steps(self, max_steps: int = 0, *, interval_ms: int = 0, deadline: float | None = None) -> Stream[Step]:
        """Each step finished from now on; max_steps 0: until closed. The client's own deadline does not apply.

        `interval_ms`: steps come that much later, at most 250, many in one message: what watching costs the scheduler
        then hardly grows with the number of steps.
        """
        request = admin_pb2.WatchStepsRequest(max_steps=max_steps, interval_ms=interval_ms)

        def start(timeout: float | None) -> Any:
            return self._admin[next(self._turn)].WatchSteps(request, timeout=timeout, metadata=self._metadata)

        return Stream(start, decode_steps, lambda: None, limit_of(deadline), self._retry)

    def reset_prefix_cache(self, *, deadline: float | None = None) -> CacheReset:
        """From now on no request finds anything in the prefix cache that was computed before."""
        request = admin_pb2.ResetPrefixCacheRequest()
        answer = self._call(lambda i: self._admin[i].ResetPrefixCache, request, deadline)
        return CacheReset(answer.dropped_blocks, answer.forgotten_blocks)

    def drain(self, deadline_ms: int = 0) -> int:
        """Stops admission and waits for running requests. Returns how many the deadline (0: configured) ended."""
        request = admin_pb2.DrainRequest(deadline_ms=deadline_ms)
        return self._call(lambda i: self._admin[i].Drain, request, None, limited=False).unfinished

    def health(self, service: str = "", *, deadline: float | None = None) -> Health:
        """ "" and "stepwire.v1.Inference": readiness. "stepwire.liveness": only false when the server is stuck."""

        def method(index: int) -> Callable[..., bytes]:
            return self._channels[index].unary_unary(
                "/grpc.health.v1.Health/Check", request_serializer=health_request, response_deserializer=None
            )

        try:
            return health_status(self._call(method, service, deadline))
        except StepwireError as error:
            if error.status == "NOT_FOUND":
                return Health.SERVICE_UNKNOWN
            raise

    # ------------------------------------------------------------------------------------------------------ calls

    def _limit(self, deadline: float | None) -> float | None:
        return limit_of(deadline, self._deadline)

    def _call(
        self, method: Callable[[int], Callable[..., R]], request: Any, deadline: float | None, limited: bool = True
    ) -> R:
        """One unary call, tried again as `retry` says. `method` picks the callable of the channel whose turn it is."""
        limit = self._limit(deadline) if limited else limit_of(deadline)
        give_up_at = None if limit is None else time.monotonic() + limit
        pauses = self._retry.pauses()
        while True:
            left = None if give_up_at is None else give_up_at - time.monotonic()
            try:
                return method(next(self._turn))(request, timeout=left, metadata=self._metadata)
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
            left = None if give_up_at is None else give_up_at - time.monotonic()
            pause = pause_before_retry(failure, self._retry, pauses, left)
            if pause is None:
                raise failure from None
            time.sleep(pause)
