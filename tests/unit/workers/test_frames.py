"""Every message between core and worker processes survives the trip, field by field; nothing malformed gets through."""

import contextlib
import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from common import errors
from common.errors import ProtocolError, StepwireError
from common.messages import U32, ExecutorInfo, Output, OutputKind, u32
from scheduler_svc.api.validation import MAX_LOGPROBS
from scheduler_svc.app import core_config
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.executor_state import output_limit
from scheduler_svc.messages import Extras, FromCore, ToCore, TokenBatch, TopTokens
from scheduler_svc.workers.codec import Reader, codec_of
from scheduler_svc.workers.frames import KINDS, MAX_FRAME_BYTES, FrameReader, FrameWriter, signatures

ERRORS = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, StepwireError)]


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation, without knowing which messages there are."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple) if args[1:] == (...,) else st.tuples(*map(values, args))
    if origin is Mapping:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if origin is types.UnionType:
        return st.one_of(*(st.none() if arg is type(None) else values(arg) for arg in args))
    if origin is np.ndarray:
        return columns(np.dtype(typing.get_args(args[1])[0]), st.integers(0, 5))
    if origin is NDArray:
        return columns(np.dtype(args[0]), st.integers(0, 5))
    if kind is TokenBatch:
        return batches()
    if issubclass(kind, enum.Enum):
        return st.sampled_from(list(kind))
    if issubclass(kind, StepwireError):
        texts = st.text(max_size=8)
        numbers = st.integers(0, 1 << 40)
        return st.sampled_from(ERRORS).flatmap(
            lambda c: st.builds(c, texts, field=texts, limit=texts, retry_after_ms=numbers)
        )
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{field.name: values(hints[field.name]) for field in dataclasses.fields(kind)})
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(1 << 63), (1 << 64) - 1),
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=8),
        bytes: st.binary(max_size=8),
    }
    return plain[kind]


def columns(dtype: "np.dtype[Any]", sizes: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    top = int(np.iinfo(dtype).max)
    return sizes.flatmap(lambda size: st.lists(st.integers(0, top), min_size=size, max_size=size)).map(
        lambda numbers: np.array(numbers, dtype)
    )


@st.composite
def batches(draw: st.DrawFn) -> TokenBatch:
    hints = typing.get_type_hints(TokenBatch)
    counts = np.array(draw(st.lists(st.integers(0, 3), max_size=5)), np.uint32)
    size, tokens = st.just(len(counts)), st.just(int(counts.sum()))
    return TokenBatch(
        keys=draw(columns(np.dtype(np.uint64), size)),
        counts=counts,
        tokens=draw(columns(np.dtype(np.uint32), tokens)),
        reasons=draw(columns(np.dtype(np.uint8), size)),
        cached=draw(columns(np.dtype(np.uint32), size)),
        extras=draw(values(hints["extras"])),
    )


def plain(value: Any) -> Any:
    """Comparable: arrays as lists, errors as their class and attributes."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, StepwireError):
        return type(value), vars(value)
    if dataclasses.is_dataclass(value):
        return type(value), {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return value


def test_every_message_of_the_design_has_a_frame() -> None:
    assert {*typing.get_args(ToCore), *typing.get_args(FromCore)} < set(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_field_survives(kind: Any, data: st.DataObject) -> None:
    message = data.draw(values(kind))
    frame = FrameWriter().encode(message)
    assert int.from_bytes(frame[:4], "little") == len(frame) - 4
    found = FrameReader().decode(frame[4:])
    assert plain(found) == plain(message)
    for field in dataclasses.fields(kind):
        value = getattr(found, field.name)
        assert not isinstance(value, np.ndarray) or not value.flags.writeable


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_a_cut_or_longer_frame_is_refused(kind: Any, data: st.DataObject) -> None:
    frame = FrameWriter().encode(data.draw(values(kind)))[4:]
    cut = data.draw(st.integers(0, len(frame) - 1))
    for wrong in (frame[:cut], frame + b"\0"):
        with pytest.raises(ProtocolError):
            FrameReader().decode(wrong)


@given(st.integers(0, 255), st.binary(max_size=64))
def test_nonsense_is_refused_or_is_a_message(kind: int, body: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert type(FrameReader().decode(bytes([kind]) + body)) in KINDS


@given(st.lists(st.sampled_from(KINDS).flatmap(values), max_size=6), st.integers(1, 50))
def test_a_stream_in_any_pieces_is_the_same_messages(messages: list[Any], piece: int) -> None:
    stream = b"".join(map(FrameWriter().encode, messages))
    reader = FrameReader()
    found = []
    for at in range(0, len(stream), piece):
        found += reader.feed(stream[at : at + piece])
    assert list(map(plain, found)) == list(map(plain, messages))


@given(st.lists(st.tuples(batches(), st.booleans(), st.booleans()), max_size=6))
def test_a_batch_for_the_requests_of_the_one_before_says_only_what_is_new(
    steps: list[tuple[TokenBatch, bool, bool]],
) -> None:
    writer, reader = FrameWriter(), FrameReader()
    before: TokenBatch | None = None
    for drawn, again, ends in steps:
        batch = drawn
        if before is not None and again:
            tokens = before.tokens + np.uint32(1)
            batch = dataclasses.replace(before, tokens=tokens, extras={})
            if not ends:
                batch = dataclasses.replace(batch, reasons=np.zeros(len(batch.keys), np.uint8))
        frame = writer.encode(batch)
        assert list(map(plain, reader.feed(frame))) == [plain(batch)]
        if batch is not drawn and not ends:
            assert (
                len(frame)
                == len(writer.encode(dataclasses.replace(batch, tokens=batch.tokens)))
                == 20 + batch.tokens.nbytes
            )
        before = batch


def test_a_first_batch_that_leaves_its_requests_out_is_refused() -> None:
    column = np.ones(1, np.uint32)
    batch = TokenBatch(column.astype(np.uint64), column, column, np.zeros(1, np.uint8), column, {})
    writer = FrameWriter()
    first, second = writer.encode(batch), writer.encode(batch)
    assert len(second) < len(first)
    with pytest.raises(ProtocolError):
        FrameReader().feed(second)


def test_a_frame_over_the_bound_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError):
        FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


def test_all_the_bulk_output_a_step_may_bring_fits_into_a_frame() -> None:
    """An executor may say that it makes gigabytes: the core plans what a worker can be told."""
    config = core_config(SchedulerConfig(executors=("127.0.0.1:1",)))
    info = ExecutorInfo(
        model_id="m", model_hash="h", vocab_size=50_000, eos_ids=(), num_rows=2048, max_num_seqs=1024,
        max_blocks_per_row=8, block_size=16, num_blocks=64, max_tokens_per_step=4096, max_context=128,
        max_output_bytes=(1 << 32) - 1,
    )  # fmt: skip
    rows, size = info.max_num_seqs, 4 * info.vocab_size
    num_raw = output_limit(info, config) // size
    logits = bytes(size)
    top = TopTokens(-1.0, tuple(range(MAX_LOGPROBS)), (-1.0,) * MAX_LOGPROBS)
    outputs = [(Output(1, OutputKind.RAW_LOGITS, row, row + 1, 0, 1, logits),) for row in range(num_raw)]
    extras = {row: Extras((top,), outputs[row] if row < num_raw else ()) for row in range(rows)}
    one: U32 = np.ones(rows, np.uint32)
    batch = TokenBatch(np.arange(rows, dtype=np.uint64), one, one, np.zeros(rows, np.uint8), one, extras)
    frame = FrameWriter().encode(batch)
    assert len(frame) < MAX_FRAME_BYTES
    (told,) = FrameReader().feed(frame)
    assert num_raw > 100 and len(told.extras) == rows and told.extras[num_raw - 1].outputs[0].data == logits


def test_a_batch_whose_extras_are_no_such_thing_is_refused() -> None:
    one: U32 = np.ones(1, np.uint32)
    output = Output(1, OutputKind.RAW_LOGITS, 0, 7, 0, 1, b"")
    batch = TokenBatch(one.astype(np.uint64), one, one, np.zeros(1, np.uint8), one, {0: Extras((), (output,))})
    frame = bytearray(FrameWriter().encode(batch))
    step_and_kind = frame.rindex(bytes([1, 1, 1, OutputKind.RAW_LOGITS, 1, 0]))
    frame[step_and_kind + 3] = 99
    with pytest.raises(ProtocolError):
        FrameReader().feed(bytes(frame))


def test_an_error_from_elsewhere_travels_as_its_nearest_public_class() -> None:
    class Private(errors.Overloaded):
        pass

    put, get = codec_of(StepwireError)
    out = bytearray()
    put(out, Private("full", limit="7", retry_after_ms=12))
    from scheduler_svc.workers.codec import Reader

    error = get(Reader(bytes(out)))
    assert type(error) is errors.Overloaded and (error.message, error.limit, error.retry_after_ms) == ("full", "7", 12)


def test_what_has_no_encoding_is_noticed_at_once() -> None:
    for kind in (object, list[int], set[int]):
        with pytest.raises(TypeError):
            codec_of(kind)


def test_signatures_do_not_change_between_processes_of_one_checkout() -> None:
    assert len(signatures()) == 64 and "0x" not in "".join(map(str, KINDS))


def test_arrays_are_known_by_either_form_of_their_annotation() -> None:
    """NumPy 2.5 made NDArray an alias of its own, which annotations then keep."""
    own: Any = NDArray
    for kind in (np.ndarray[Any, np.dtype[np.uint32]], types.GenericAlias(own, (np.uint32,))):
        put, get = codec_of(kind)
        out = bytearray()
        put(out, u32([1, 70000]))
        assert get(Reader(bytes(out))).tolist() == [1, 70000]


@pytest.mark.parametrize("other", ["counts", "cached"])
def test_a_batch_of_the_same_requests_that_says_something_else_of_them(other: str) -> None:
    """A second entry without a token, say, or the first tokens after another admission."""
    keys: NDArray[np.uint64] = np.array([1, 2], np.uint64)
    reasons: NDArray[np.uint8] = np.zeros(2, np.uint8)
    first = TokenBatch(keys, u32([1, 1]), u32([7, 8]), reasons, u32([0, 0]), {})
    second = TokenBatch(keys, u32([2, 0]), u32([9, 10]), reasons, u32([0, 0]), {})
    if other == "cached":
        second = TokenBatch(keys, u32([1, 1]), u32([9, 10]), reasons, u32([0, 16]), {})
    writer, reader = FrameWriter(), FrameReader()
    for batch in (first, second, first):
        (told,) = reader.feed(writer.encode(batch))
        assert told.counts.tolist() == batch.counts.tolist() and told.cached.tolist() == batch.cached.tolist()
        assert told.tokens.tolist() == batch.tokens.tolist()
