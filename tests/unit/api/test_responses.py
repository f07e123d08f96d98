"""Messages made by hand are those protobuf makes."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.api.responses import add_piece, plain_delta
from scheduler_svc.token_stream import Piece
from stepwire.v1 import inference_pb2 as pb


@given(st.integers(0, 300), st.text(max_size=300), st.lists(st.integers(0, (1 << 32) - 1), max_size=40))
def test_a_plain_delta_is_what_protobuf_encodes(index: int, text: str, token_ids: list[int]) -> None:
    text = text.encode(errors="replace").decode()
    message = pb.GenerateResponse(index=index)
    add_piece(message, Piece(text=text, token_ids=token_ids))
    if text or token_ids:
        assert plain_delta(index, text, token_ids) == message.SerializeToString(deterministic=True)
    assert pb.GenerateResponse.FromString(plain_delta(index, text, token_ids)).delta.text == text
