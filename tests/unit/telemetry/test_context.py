"""The 25 bytes."""

import pytest

from common.errors import ProtocolError
from common.telemetry.context import TRACE_CONTEXT_BYTES, TraceContext, new_trace, parse_traceparent, unpack

CONTEXT = TraceContext(0x0102030405060708090A0B0C0D0E0F10, 0x1112131415161718, 1)


def test_layout_is_trace_id_span_id_flags() -> None:
    assert CONTEXT.pack() == bytes(range(1, 17)) + bytes(range(0x11, 0x19)) + b"\x01"
    assert len(CONTEXT.pack()) == TRACE_CONTEXT_BYTES


def test_pack_and_unpack_are_inverse() -> None:
    for context in (CONTEXT, new_trace(), TraceContext((1 << 128) - 1, (1 << 64) - 1, 0)):
        assert unpack(context.pack()) == context


def test_empty_means_not_traced() -> None:
    assert unpack(b"") is None


@pytest.mark.parametrize("data", [b"\x01", bytes(25), bytes(16) + b"\x01" * 9, b"\x01" * 16 + bytes(8) + b"\x01"])
def test_malformed_bytes_are_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError) as error:
        unpack(data)
    assert error.value.field == "trace_context"


def test_a_child_shares_trace_and_flags() -> None:
    child = CONTEXT.child()
    assert (child.trace_id, child.flags) == (CONTEXT.trace_id, CONTEXT.flags)
    assert child.span_id != CONTEXT.span_id


def test_traceparent_both_ways() -> None:
    assert CONTEXT.traceparent == "00-0102030405060708090a0b0c0d0e0f10-1112131415161718-01"
    assert parse_traceparent(CONTEXT.traceparent) == CONTEXT
    for bad in ("", "00-1-2-3", "ff" + CONTEXT.traceparent[2:], f"00-{'0' * 32}-{'1' * 16}-01", f"00-{'x' * 32}-1-01"):
        assert parse_traceparent(bad) is None
