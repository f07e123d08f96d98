"""One request's stream between the core's steps and its reader, without any waiting.

`TokenStream` is the state of one request in its worker: the worker feeds it what steps bring, the call that serves the
client takes what is there. It knows neither asyncio nor gRPC nor a clock; time comes in as a value. It is owned by the
worker's event loop.

Text rules: the texts of all pieces joined are the final text; the text of an EOS or stop token is no part of it;
nothing from a stop string on is ever shown.
"""

from dataclasses import dataclass, field
from enum import Enum

from common.errors import SequenceFailed, SlowReader, StepwireError
from common.messages import U32, Output, OutputKind
from scheduler_svc.messages import Extras, FinishReason, TopTokens
from scheduler_svc.prompt_logprobs import parse_prompt_logprobs
from scheduler_svc.text_cursor import TextCursor

TOKEN_BYTES = 8
TOP_BYTES = 12


@dataclass(frozen=True, slots=True)
class Completion:
    """How a request ended. `stop_token_id` with EOS and STOP_TOKEN, `stop_string` with STOP_STRING."""

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(slots=True)
class Piece:
    """What a stream has to say since the last piece. Columns of tokens have one length; `completion`: the last one.

    raw_logits: (position, float32 little-endian [vocab_size]). prompt_logprobs: (token id, its logprobs).
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TopTokens] = field(default_factory=list)
    raw_logits: list[tuple[int, bytes]] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, TopTokens]] = field(default_factory=list)
    completion: Completion | None = None


class Action(Enum):
    """What the worker has to tell the core after feeding a stream."""

    NONE = 0
    FINISH = 1  # a stop string matched at `num_tokens`
    CANCEL = 2  # the stream failed here; see `error`


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """`slow_reader_ns`: how long something may lie unread. `max_buffered_bytes`: how much. `max_piece_bytes`: rough."""

    slow_reader_ns: int = 30_000_000_000
    max_buffered_bytes: int = 64 * 1024 * 1024
    max_piece_bytes: int = 1024 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class StreamWants:
    """What one request wants. `num_prompt_logprobs` and `num_logprobs` as in common.messages.Sampling."""

    prompt: U32
    cursor: TextCursor | None
    vocab_size: int
    num_logprobs: int = 0
    num_prompt_logprobs: int = 0
    raw_logits: bool = False


class TokenStream:
    """One request between the core's steps and its reader.

    Raises nothing in `feed`, `fail`, `check_reader` and `crowd_out`; `take` raises the error the request ended with,
    after everything buffered before it was taken (a slow reader's buffer is dropped).
    """

    __slots__ = (
        "_buffer",
        "_cached",
        "_completion",
        "_decode",
        "_flushed",
        "_is_plain",
        "_limits",
        "_next_prompt_position",
        "_plain",
        "_prompt_bytes",
        "_reader_moved",
        "_token_bytes",
        "_undecoded",
        "_unread_since_ns",
        "_wants",
        "error",
        "num_tokens",
    )

    def __init__(self, wants: StreamWants, limits: StreamLimits) -> None:
        self._wants = wants
        self._limits = limits
        self._token_bytes = TOKEN_BYTES + wants.num_logprobs * TOP_BYTES + wants.raw_logits * wants.vocab_size * 4
        self._prompt_bytes = TOKEN_BYTES + wants.num_prompt_logprobs * TOP_BYTES
        self._buffer = Piece()
        self._undecoded: list[int] = []
        self._plain: list[int] = []  # tokens that came after everything in the buffer, of a stream that is plain
        self._is_plain = not (
            wants.num_logprobs
            or wants.num_prompt_logprobs
            or wants.raw_logits
            or (wants.cursor is not None and wants.cursor.matches)
        )
        self._decode = wants.cursor.push if wants.cursor is not None else None
        self._unread_since_ns: int | None = None
        self._reader_moved = False  # since the age of what is unread was looked at
        self._cached = 0
        self._next_prompt_position = 1
        self._completion: Completion | None = None
        self._flushed = False
        self.error: StepwireError | None = None
        self.num_tokens = 0

    @property
    def ended(self) -> bool:
        """Nothing more will be taken from steps."""
        return self._completion is not None or self.error is not None

    @property
    def buffered_bytes(self) -> int:
        buffer = self._buffer
        num_tokens = len(buffer.token_ids) + len(self._plain)
        return num_tokens * self._token_bytes + len(buffer.prompt_logprobs) * self._prompt_bytes

    def is_unread_since(self, before_ns: int) -> bool:
        """Something that came before then still waits for the reader."""
        return self._unread_since_ns is not None and self._unread_since_ns < before_ns

    # ------------------------------------------------------------------------------------------------ worker's side

    def feed_token(self, token: int, now_ns: int) -> bool:
        """One token in the usual case: a stream of text and ids alone whose reader keeps up. False: it is another, and
        `feed` has to take the entry."""
        if self._unread_since_ns is not None or not self._is_plain or self.ended:
            return False
        self._unread_since_ns = now_ns
        self.num_tokens += 1
        self._plain.append(token)
        return True

    def pass_token(self, token: int) -> str | None:
        """The text of one token, handed over without being buffered: only for a reader that waits for it now. None: as
        `feed_token`, or the text could not be made and the stream has ended."""
        if self._unread_since_ns is not None or not self._is_plain or self.ended:
            return None
        self.num_tokens += 1
        try:
            return self._decode((token,)) if self._decode is not None else ""
        except Exception as error:  # noqa: BLE001 - as in `feed`
            self.fail(SequenceFailed(f"the text of this request could not be made: {type(error).__name__}: {error}"))
            return None

    def feed(self, tokens: list[int], reason: int, cached: int, extras: Extras | None, now_ns: int) -> Action:
        """Takes one entry of a TokenBatch. After the end it does nothing, so late entries are harmless."""
        if self._completion is not None or self.error is not None:
            return Action.NONE
        self._cached = cached
        if self._unread_since_ns is None:
            self._unread_since_ns = now_ns
        try:
            action = self._append(tokens, FinishReason(reason) if reason else None, extras)
        except StepwireError as error:
            self.fail(error)
            return Action.CANCEL
        except Exception as error:  # noqa: BLE001 - a defect in one request's decoding must not end the loop for all
            self.fail(SequenceFailed(f"the text of this request could not be made: {type(error).__name__}: {error}"))
            return Action.CANCEL
        if action is Action.NONE and not self.ended and self._is_too_slow(now_ns):
            self._fail_slow()
            return Action.CANCEL
        return action

    def fail(self, error: StepwireError) -> None:
        """Ends the stream with an error. The first end counts."""
        if not self.ended:
            self.error = error

    def check_reader(self, now_ns: int) -> bool:
        """Ends the stream when its reader stalled, even if generation is over. True: it did so now."""
        if self.error is None and self._is_too_slow(now_ns):
            self._fail_slow()
            return True
        return False

    def crowd_out(self, max_unread_bytes: int) -> None:
        """Ends the stream: all streams of its worker together leave more than that unread, and this one the most."""
        self._drop_reader(
            f"this stream left {self.buffered_bytes} bytes unread, the most of all, which together reached their limit",
            f"max_unread_bytes={max_unread_bytes}",
        )

    def _is_too_slow(self, now_ns: int) -> bool:
        if self._reader_moved:  # slowly, but it reads: its time runs anew
            self._reader_moved = False
            self._unread_since_ns = None if self._unread_since_ns is None else now_ns
        since = self._unread_since_ns
        late = since is not None and now_ns - since >= self._limits.slow_reader_ns
        return late or self.buffered_bytes > self._limits.max_buffered_bytes

    def _fail_slow(self) -> None:
        seconds = self._limits.slow_reader_ns / 1e9
        self._drop_reader(
            f"the stream was not read for {seconds:g} s, or {self._limits.max_buffered_bytes} bytes lay unread",
            f"slow_reader_s={seconds:g}",
        )

    def _drop_reader(self, message: str, limit: str) -> None:
        self._completion = None
        self._buffer = Piece()
        self._undecoded = []
        self._plain = []
        self.error = SlowReader(message, limit=limit)

    def _settle_plain(self) -> None:
        self._buffer.token_ids += self._plain
        self._undecoded += self._plain
        self._plain = []

    def _append(self, tokens: list[int], reason: FinishReason | None, extras: Extras | None) -> Action:
        if self._is_plain and reason is None:
            self.num_tokens += len(tokens)
            self._plain += tokens
            return Action.NONE
        self._settle_plain()
        ended_by_token = reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        texted = tokens[:-1] if ended_by_token else tokens
        taken = len(tokens)
        cursor = self._wants.cursor
        stopped = False
        text = ""
        if cursor is not None and cursor.matches:
            before = cursor.num_tokens
            text = cursor.push(texted)
            if cursor.matched is None and reason is not None:
                text += cursor.finish()
            if cursor.matched is not None:
                stopped = True
                taken = cursor.num_tokens - before
        self._append_columns(tokens[:taken], extras)
        self._buffer.text += text
        if cursor is not None and not cursor.matches:
            self._undecoded += texted
        if stopped:
            self._complete(FinishReason.STOP_STRING, None)
            return Action.FINISH if reason is None else Action.NONE
        if reason is not None:
            self._complete(reason, tokens[-1] if ended_by_token and tokens else None)
        return Action.NONE

    def _append_columns(self, tokens: list[int], extras: Extras | None) -> None:
        """All columns or, when the executor left one out, none: a later token's must not move to an earlier one."""
        logprobs: tuple[TopTokens, ...] = ()
        logits: list[tuple[int, bytes]] = []
        if self._wants.num_logprobs and tokens:
            logprobs = extras.logprobs[: len(tokens)] if extras is not None else ()
            if len(logprobs) < len(tokens):
                raise SequenceFailed(f"the executor sent {len(logprobs)} logprobs for {len(tokens)} tokens")
        if self._wants.raw_logits and tokens:
            outputs = extras.outputs if extras is not None else ()
            found = {output.position: output.data for output in outputs if output.kind is OutputKind.RAW_LOGITS}
            first = len(self._wants.prompt) + self.num_tokens
            logits = [(position, found.get(position, b"")) for position in range(first, first + len(tokens))]
            if missing := [position for position, data in logits if not data]:
                raise SequenceFailed(f"the executor sent no logits for position {missing[0]}")
        self.num_tokens += len(tokens)
        self._buffer.token_ids += tokens
        self._buffer.logprobs += logprobs
        self._buffer.raw_logits += logits
        if extras is not None and self._wants.num_prompt_logprobs:
            for output in extras.outputs:
                if output.kind is OutputKind.PROMPT_LOGPROBS:
                    self._append_prompt_logprobs(output)

    def _append_prompt_logprobs(self, output: Output) -> None:
        for offset, top in enumerate(parse_prompt_logprobs(output, self._wants.num_prompt_logprobs)):
            position = output.position + offset
            if position < self._next_prompt_position:
                continue  # computed again after a preemption
            self._buffer.prompt_logprobs.append((int(self._wants.prompt[position]), top))
            self._next_prompt_position = position + 1

    def _complete(self, reason: FinishReason, stop_token_id: int | None) -> None:
        self._completion = Completion(
            reason=reason,
            prompt_tokens=len(self._wants.prompt),
            cached_tokens=self._cached,
            completion_tokens=self.num_tokens,
            stop_token_id=stop_token_id,
            stop_string=self._wants.cursor.matched if self._wants.cursor else None,
        )

    # ------------------------------------------------------------------------------------------------ reader's side

    def take(self) -> Piece | None:
        """Everything that came since the last piece, within `max_piece_bytes`; None: nothing yet.

        Raises the error the request ended with.
        """
        self._settle_plain()
        self._decode_pending()
        buffer, done = self._buffer, self._completion
        if not (buffer.token_ids or buffer.text or buffer.prompt_logprobs or done):
            if self.error is not None:
                raise self.error
            self._unread_since_ns = None  # an entry without content: nothing is left unread
            return None
        piece = self._cut()
        self._reader_moved = True
        rest = self._buffer
        if not (rest.token_ids or rest.text or rest.prompt_logprobs):
            self._unread_since_ns = None
            piece.completion = done
        return piece

    def _decode_pending(self) -> None:
        """Without stop strings nobody needs the text before the reader does; many tokens then decode in one go."""
        cursor = self._wants.cursor
        if cursor is None or cursor.matches:
            self._undecoded = []
            return
        if self._undecoded:
            self._buffer.text += cursor.push(self._undecoded)
            self._undecoded = []
        if self._completion is not None and not self._flushed:
            self._flushed = True
            self._buffer.text += cursor.finish()

    def _cut(self) -> Piece:
        """Takes whole tokens off the buffer's head; all text there is goes with the first of them."""
        buffer = self._buffer
        num_prompt = max(1, self._limits.max_piece_bytes // self._prompt_bytes)
        if len(buffer.prompt_logprobs) > num_prompt:
            piece = Piece(prompt_logprobs=buffer.prompt_logprobs[:num_prompt])
            buffer.prompt_logprobs = buffer.prompt_logprobs[num_prompt:]
            return piece
        num_tokens = max(1, self._limits.max_piece_bytes // self._token_bytes)
        if len(buffer.token_ids) <= num_tokens:
            self._buffer = Piece()
            return buffer
        self._buffer = Piece(
            "", buffer.token_ids[num_tokens:], buffer.logprobs[num_tokens:], buffer.raw_logits[num_tokens:]
        )
        return Piece(
            buffer.text,
            buffer.token_ids[:num_tokens],
            buffer.logprobs[:num_tokens],
            buffer.raw_logits[:num_tokens],
            buffer.prompt_logprobs,
        )
