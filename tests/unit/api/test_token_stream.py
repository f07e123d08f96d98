"""One request's stream: what was fed comes out once, in order, with its extras, and ends once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import RequestAborted, SequenceFailed, SlowReader
from common.messages import Output, OutputKind, u32
from scheduler_svc.messages import Extras, FinishReason, TopTokens
from scheduler_svc.text_cursor import TextCursor
from scheduler_svc.token_stream import Action, Piece, StreamLimits, StreamWants, TokenStream
from tests.unit.api.fakes import EOS, ByteDecoder

SECOND = 1_000_000_000
PROMPT = u32([10, 11, 12, 13])
LIMITS = StreamLimits(slow_reader_ns=30 * SECOND, max_buffered_bytes=4000)


def stream(
    stops: tuple[str, ...] = (),
    *,
    text: bool = True,
    limits: StreamLimits = LIMITS,
    num_logprobs: int = 0,
    num_prompt_logprobs: int = 0,
    raw_logits: bool = False,
) -> TokenStream:
    cursor = TextCursor(ByteDecoder(), stops) if text else None
    wants = StreamWants(PROMPT, cursor, 4, num_logprobs, num_prompt_logprobs, raw_logits)
    return TokenStream(wants, limits)


def feed(state: TokenStream, data: bytes, reason: int = 0, extras: Extras | None = None, now_ns: int = 0) -> Action:
    return state.feed(list(data), reason, 0, extras, now_ns)


def drain(state: TokenStream) -> list[Piece]:
    pieces = []
    while (piece := state.take()) is not None:
        pieces.append(piece)
        if piece.completion is not None:
            return pieces
    return pieces


def test_what_the_reader_missed_comes_as_one_piece() -> None:
    state = stream()
    feed(state, b"he")
    feed(state, b"llo")
    piece = state.take()
    assert piece is not None and piece.text == "hello" and piece.token_ids == list(b"hello")
    assert state.take() is None


def test_an_entry_without_content_is_nothing_left_unread() -> None:
    state = stream(num_prompt_logprobs=1)
    feed(state, b"")
    assert state.take() is None
    assert not state.check_reader(31 * SECOND) and state.error is None


def test_text_of_the_stop_token_is_not_shown_but_its_id_is() -> None:
    for stops in ((), ("zz",)):
        state = stream(stops)
        assert state.feed([*b"hi", ord("!")], FinishReason.STOP_TOKEN, 3, None, 0) is Action.NONE
        (piece,) = drain(state)
        assert piece.text == "hi" and piece.token_ids == list(b"hi!")
        assert piece.completion is not None
        assert piece.completion.stop_token_id == ord("!") and piece.completion.stop_string is None
        assert piece.completion.completion_tokens == 3 and piece.completion.cached_tokens == 3
        assert piece.completion.prompt_tokens == 4


def test_a_stop_string_ends_the_stream_and_tells_the_core_how_many_tokens_counted() -> None:
    state = stream(("END",))
    assert feed(state, b"okE") is Action.NONE
    assert feed(state, b"NDmore") is Action.FINISH
    assert state.num_tokens == 5
    assert feed(state, b"late") is Action.NONE, "what comes after the end is dropped"
    pieces = drain(state)
    assert "".join(piece.text for piece in pieces) == "ok"
    assert [i for piece in pieces for i in piece.token_ids] == list(b"okEND")
    completion = pieces[-1].completion
    assert completion is not None
    assert (completion.reason, completion.stop_string) == (FinishReason.STOP_STRING, "END")
    assert completion.completion_tokens == 5


def test_a_stop_string_is_found_without_a_reader() -> None:
    state = stream(("b",))
    assert feed(state, b"a") is Action.NONE
    assert feed(state, b"b") is Action.FINISH


def test_a_stop_string_wins_over_the_end_of_the_same_batch() -> None:
    state = stream(("lo",))
    assert feed(state, b"hello", FinishReason.MAX_TOKENS) is Action.NONE, "the core has ended it already"
    (piece,) = drain(state)
    assert piece.text == "hel" and piece.completion is not None
    assert piece.completion.reason is FinishReason.STOP_STRING


def test_the_held_back_tail_comes_at_the_end() -> None:
    state = stream(("END",))
    feed(state, b"okEN")
    assert [piece.text for piece in drain(state)] == ["ok"]
    feed(state, b"", FinishReason.MAX_TOKENS)
    (piece,) = drain(state)
    assert piece.text == "EN" and piece.completion is not None


def test_an_error_comes_after_what_was_buffered() -> None:
    state = stream()
    feed(state, b"par")
    state.fail(RequestAborted("aborted"))
    state.fail(SequenceFailed("the second end does not count"))
    piece = state.take()
    assert piece is not None and piece.text == "par"
    for _ in range(2):
        with pytest.raises(RequestAborted):
            state.take()


def test_a_reader_that_stalls_is_ended_when_tokens_go_on() -> None:
    state = stream()
    assert feed(state, b"a", now_ns=SECOND) is Action.NONE
    assert feed(state, b"b", now_ns=31 * SECOND - 1) is Action.NONE
    assert feed(state, b"c", now_ns=31 * SECOND) is Action.CANCEL
    assert state.buffered_bytes == 0
    with pytest.raises(SlowReader):
        state.take()


def test_reading_starts_the_time_anew() -> None:
    state = stream()
    feed(state, b"a", now_ns=0)
    drain(state)
    assert not state.check_reader(100 * SECOND), "nothing lies unread"
    assert feed(state, b"b", now_ns=100 * SECOND) is Action.NONE


def test_a_reader_that_reads_slowly_is_not_one_that_stalls() -> None:
    state = stream(limits=StreamLimits(30 * SECOND, 4000, max_piece_bytes=1))
    feed(state, b"abc", FinishReason.MAX_TOKENS, now_ns=0)
    assert not state.check_reader(29 * SECOND)
    piece = state.take()
    assert piece is not None and piece.completion is None
    assert not state.check_reader(31 * SECOND)
    assert not state.check_reader(60 * SECOND)
    assert state.check_reader(61 * SECOND)


def test_a_stalled_reader_of_a_finished_request_is_ended_by_the_sweep() -> None:
    state = stream()
    feed(state, b"a", FinishReason.MAX_TOKENS, now_ns=0)
    assert not state.check_reader(29 * SECOND)
    assert state.check_reader(30 * SECOND)
    assert not state.check_reader(31 * SECOND), "once"
    with pytest.raises(SlowReader):
        state.take()


def test_too_much_unread_ends_the_stream_whatever_the_time() -> None:
    state = stream()
    assert feed(state, b"x" * 500) is Action.NONE
    assert feed(state, b"x") is Action.CANCEL


def tops(*values: float) -> tuple[TopTokens, ...]:
    return tuple(TopTokens(value, (1,), (value,)) for value in values)


def test_logprobs_stay_with_their_tokens() -> None:
    state = stream(("c",), num_logprobs=2)
    feed(state, b"a", extras=Extras(logprobs=tops(-1.0)))
    feed(state, b"bcd", extras=Extras(logprobs=tops(-2.0, -3.0, -4.0)))
    (piece,) = drain(state)
    assert [top.chosen for top in piece.logprobs] == [-1.0, -2.0, -3.0]
    assert piece.token_ids == list(b"abc")


def logits(position: int) -> Output:
    return Output(1, OutputKind.RAW_LOGITS, 0, 1, position, 1, np.full(4, position, "<f4").tobytes())


def test_raw_logits_stay_with_their_positions() -> None:
    state = stream(raw_logits=True)
    feed(state, b"a", extras=Extras(outputs=(logits(4),)))
    feed(state, b"bc", extras=Extras(outputs=(logits(6), logits(5))))
    (piece,) = drain(state)
    assert [position for position, _ in piece.raw_logits] == [4, 5, 6]
    assert [np.frombuffer(data, "<f4")[0] for _, data in piece.raw_logits] == [4, 5, 6]


def test_missing_extras_fail_the_request_instead_of_shifting_others() -> None:
    for state in (stream(raw_logits=True), stream(num_logprobs=1)):
        assert feed(state, b"a") is Action.CANCEL
        with pytest.raises(SequenceFailed):
            state.take()


def prompt_logprobs(position: int, count: int) -> Output:
    record = np.zeros((count, 3), "<u4")
    record[:, 1] = 7
    record.view("<f4")[:, 0] = -np.arange(position, position + count)
    record.view("<f4")[:, 2] = -0.5
    return Output(1, OutputKind.PROMPT_LOGPROBS, 0, 1, position, count, record.tobytes())


def test_prompt_logprobs_come_before_the_first_token_and_once() -> None:
    state = stream(num_prompt_logprobs=2)
    feed(state, b"", extras=Extras(outputs=(prompt_logprobs(1, 2),)))
    first = state.take()
    assert first is not None and first.token_ids == []
    assert first.prompt_logprobs == [(11, TopTokens(-1.0, (7,), (-0.5,))), (12, TopTokens(-2.0, (7,), (-0.5,)))]
    feed(state, b"", extras=Extras(outputs=(prompt_logprobs(1, 3),)))  # recomputed after a preemption
    second = state.take()
    assert second is not None and [token for token, _ in second.prompt_logprobs] == [13]


def test_a_damaged_output_fails_the_request() -> None:
    state = stream(num_prompt_logprobs=2)
    damaged = Output(1, OutputKind.PROMPT_LOGPROBS, 0, 1, 1, 2, b"1234")
    assert feed(state, b"", extras=Extras(outputs=(damaged,))) is Action.CANCEL


def test_a_defect_in_decoding_ends_only_this_request() -> None:
    class Broken:
        def push(self, token_ids: object) -> str:
            raise KeyError("no such piece")

        def flush(self) -> str:
            return ""

    state = TokenStream(StreamWants(PROMPT, TextCursor(Broken(), ["x"]), 4), LIMITS)
    assert feed(state, b"a") is Action.CANCEL
    with pytest.raises(SequenceFailed):
        state.take()


def test_large_pieces_are_cut_between_tokens() -> None:
    limits = StreamLimits(max_piece_bytes=3 * (8 + 16))
    state = stream(raw_logits=True, limits=limits)
    feed(state, b"abcdefg", extras=Extras(outputs=tuple(logits(4 + i) for i in range(7))))
    feed(state, b"", FinishReason.MAX_TOKENS)
    pieces = drain(state)
    assert [len(piece.token_ids) for piece in pieces] == [3, 3, 1]
    assert [len(piece.raw_logits) for piece in pieces] == [3, 3, 1]
    assert "".join(piece.text for piece in pieces) == "abcdefg"
    assert [piece.completion is not None for piece in pieces] == [False, False, True]


def test_long_prompt_logprobs_are_cut_before_the_tokens() -> None:
    state = stream(num_prompt_logprobs=2, limits=StreamLimits(max_piece_bytes=32))
    feed(state, b"a", FinishReason.MAX_TOKENS, Extras(outputs=(prompt_logprobs(1, 3),)))
    pieces = drain(state)
    assert [len(piece.prompt_logprobs) for piece in pieces] == [1, 1, 1]
    assert [piece.token_ids for piece in pieces] == [[], [], [ord("a")]]


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=4), st.booleans()), max_size=12), st.booleans())
def test_pieces_joined_are_the_whole_however_it_was_read(steps: list[tuple[bytes, bool]], with_stops: bool) -> None:
    state = stream(("\x00never",) if with_stops else (), limits=StreamLimits())
    pieces = []
    for data, read in steps:
        feed(state, data)
        if read and (piece := state.take()) is not None:
            pieces.append(piece)
    state.feed([EOS], FinishReason.EOS, 0, None, 0)
    pieces += drain(state)
    whole = b"".join(data for data, _ in steps)
    assert [i for piece in pieces for i in piece.token_ids] == [*whole, EOS]
    assert "".join(piece.text for piece in pieces) == whole.decode("utf-8", "replace")
    assert [piece.completion is not None for piece in pieces].count(True) == 1
