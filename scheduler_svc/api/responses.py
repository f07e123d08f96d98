"""Pieces of a token stream as messages of stepwire.v1."""

from collections.abc import Sequence

from scheduler_svc.messages import Submit, TopTokens
from scheduler_svc.token_stream import Completion, Piece
from stepwire.v1 import inference_pb2 as pb


def started(request: Submit) -> list[pb.GenerateResponse]:
    """The first message of each choice."""
    seeds = (request.sampling.seed, *(child.seed for child in request.children))
    first = pb.Started(request_id=request.request_id, prompt_tokens=len(request.prompt))
    messages = [pb.GenerateResponse(started=first, index=index) for index in range(len(seeds))]
    for message, seed in zip(messages, seeds, strict=True):
        message.started.seed = seed
    return messages


def plain_delta(index: int, text: str, token_ids: Sequence[int]) -> bytes:
    """A whole GenerateResponse, encoded: a delta of text and ids. One is made for every token that is streamed, and
    building the message to have it encoded takes several times as long."""
    utf8 = text.encode()
    ids = _varint(token_ids[0]) if len(token_ids) == 1 else b"".join(map(_varint, token_ids))
    parts = [b"\n", _varint(len(utf8)), utf8] if utf8 else []
    if ids:
        parts += b"\x12", _varint(len(ids)), ids
    delta = b"".join(parts)
    message = b"".join((b"\x12", _varint(len(delta)), delta))
    return message + b"\x20" + _varint(index) if index else message


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _BYTES[value]
    if value < 0x4000:
        return _BYTES[value & 0x7F | 0x80] + _BYTES[value >> 7]
    return _BYTES[value & 0x7F | 0x80] + _varint(value >> 7)


_BYTES = [bytes((value,)) for value in range(256)]


def add_piece(message: pb.GenerateResponse, piece: Piece) -> None:
    """Appends the piece to the message's delta. An empty piece leaves no delta behind."""
    if not (piece.text or piece.token_ids or piece.prompt_logprobs):
        return
    delta = message.delta
    delta.text += piece.text
    delta.token_ids.extend(piece.token_ids)
    for token_id, top in zip(piece.token_ids, piece.logprobs, strict=False):
        delta.logprobs.append(_logprobs(token_id, top))
    for position, data in piece.raw_logits:
        delta.raw_logits.add(position=position, data=data)
    for token_id, top in piece.prompt_logprobs:
        delta.prompt_logprobs.append(_logprobs(token_id, top))


def add_completion(message: pb.GenerateResponse, completion: Completion) -> None:
    message.finished.CopyFrom(
        pb.Finished(
            reason=pb.FinishReason.ValueType(completion.reason),
            usage=pb.Usage(
                prompt_tokens=completion.prompt_tokens,
                cached_tokens=completion.cached_tokens,
                completion_tokens=completion.completion_tokens,
            ),
            stop_token_id=completion.stop_token_id,
            stop_string=completion.stop_string,
        )
    )


def _logprobs(token_id: int, top: TopTokens) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        token_id=token_id,
        logprob=top.chosen,
        top=[pb.TopLogprob(token_id=i, logprob=value) for i, value in zip(top.ids, top.logprobs, strict=True)],
    )
