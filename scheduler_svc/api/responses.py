"""Pieces of a token stream as messages of stepwire.v1."""

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
