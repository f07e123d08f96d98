"""Messages of vllm.grpc.engine and of Stepwire, one as the other."""

import hashlib
import io
import zipfile
from collections.abc import Sequence
from typing import Any, Final

from smg_grpc_proto import vllm_engine_pb2 as vllm

from common.errors import InvalidInput, NotSupported
from scheduler_svc.api.generation import ActiveRequest
from scheduler_svc.api.served_model import ExportableTokenizer
from scheduler_svc.messages import FinishReason, TopTokens
from scheduler_svc.token_stream import Completion, Piece
from stepwire.v1 import inference_pb2 as pb

_LENGTH: Final = (FinishReason.MAX_TOKENS, FinishReason.CONTEXT)


def pack_tokenizer(tokenizer: ExportableTokenizer) -> tuple[bytes, str]:
    """(zip, its SHA-256 in hexadecimal). The same files make the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(tokenizer.files().items()):
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    packed = buffer.getvalue()
    return packed, hashlib.sha256(packed).hexdigest()


def to_stepwire(request: Any) -> pb.GenerateRequest:
    """The same request in Stepwire's terms. Raises NotSupported for what has none, naming the field.

    In vLLM's message 0 means "not given" for top_p and repetition_penalty, and nothing takes the model's defaults: the
    gateway has filled these in.
    """
    params = request.sampling_params
    _refuse_unsupported(request, params)
    sampling = pb.SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_k=params.top_k,
        top_p=params.top_p or 1.0,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
    )
    if params.HasField("seed"):
        sampling.seed = params.seed & 0xFFFF_FFFF_FFFF_FFFF
    for token_id, bias in params.logit_bias.items():
        if token_id < 0:
            field = f"sampling_params.logit_bias[{token_id}]"
            raise InvalidInput(f"{field}: a token id is not negative", field=field, limit="0")
        sampling.logit_bias[token_id] = bias
    converted = pb.GenerateRequest(
        request_id=request.request_id,
        sampling=sampling,
        stop=pb.StopConditions(
            max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
            min_tokens=params.min_tokens,
            stop_token_ids=params.stop_token_ids,
            stop_strings=params.stop,
            ignore_eos=params.ignore_eos,
        ),
        output=pb.OutputOptions(
            logprobs=_count(params, "logprobs"),
            prompt_logprobs=_count(params, "prompt_logprobs"),
            detokenize=bool(params.stop),
        ),
        stream=request.stream,
        n=params.n or 1,
    )
    if request.WhichOneof("input") == "tokenized":
        converted.token_ids.ids.extend(request.tokenized.input_ids)
    elif request.WhichOneof("input") == "text":
        converted.text = request.text
    return converted


def _count(params: Any, name: str) -> int | None:
    if not params.HasField(name):
        return None
    value: int = getattr(params, name)
    if value < 0:
        raise NotSupported(f"sampling_params.{name} = {value} (all of the vocabulary)", field=f"sampling_params.{name}")
    return value


def _refuse_unsupported(request: Any, params: Any) -> None:
    wanted = {
        "mm_inputs": request.HasField("mm_inputs"),
        "extra_mm_inputs": bool(request.extra_mm_inputs),
        "media_refs": request.HasField("media_refs"),
        "kv_transfer_params": request.HasField("kv_transfer_params"),
        "kv_transfer_params_json": request.HasField("kv_transfer_params_json"),
        "data_parallel_rank": request.data_parallel_rank > 0,
        "sampling_params.truncate_prompt_tokens": params.HasField("truncate_prompt_tokens"),
        f"sampling_params.{params.WhichOneof('constraint')}": params.WhichOneof("constraint") is not None,
    }
    for field, is_wanted in wanted.items():
        if is_wanted:
            raise NotSupported(f"{field} is not supported by this server", field=field)


def append(whole: Piece, piece: Piece) -> None:
    whole.token_ids += piece.token_ids
    whole.logprobs += piece.logprobs
    whole.prompt_logprobs += piece.prompt_logprobs


def chunk(active: ActiveRequest, index: int, piece: Piece, first: bool) -> Any:
    return vllm.GenerateStreamChunk(
        index=index,
        token_ids=piece.token_ids,
        prompt_tokens=len(active.submit.prompt),
        completion_tokens=len(piece.token_ids),
        output_logprobs=_output_logprobs(piece),
        input_logprobs=_input_logprobs(active, piece, first),
    )


def complete(active: ActiveRequest, index: int, piece: Piece, completion: Completion) -> Any:
    message = vllm.GenerateComplete(
        index=index,
        output_ids=piece.token_ids,
        finish_reason="length" if completion.reason in _LENGTH else "stop",
        prompt_tokens=completion.prompt_tokens,
        completion_tokens=completion.completion_tokens,
        cached_tokens=completion.cached_tokens,
        output_logprobs=_output_logprobs(piece),
        input_logprobs=None if active.valid.stream else _input_logprobs(active, piece, True),
    )
    if completion.reason is FinishReason.STOP_TOKEN and completion.stop_token_id is not None:
        message.matched_token_id = completion.stop_token_id
    elif completion.stop_string is not None:
        message.matched_stop_str = completion.stop_string
    return message


def _output_logprobs(piece: Piece) -> Any:
    if not piece.logprobs:
        return None
    return vllm.OutputLogProbs(
        token_logprobs=[top.chosen for top in piece.logprobs],
        token_ids=piece.token_ids,
        top_logprobs=_tops(piece.logprobs),
    )


def _input_logprobs(active: ActiveRequest, piece: Piece, first: bool) -> Any:
    """Prompt logprobs; the first token of the prompt, which has none, goes with the `first` of them."""
    if not piece.prompt_logprobs:
        return None
    message = vllm.InputLogProbs()
    if first:
        message.token_logprobs.add()
        message.token_ids.append(int(active.submit.prompt[0]))
        message.top_logprobs.add()
    message.token_ids.extend(token_id for token_id, _ in piece.prompt_logprobs)
    message.token_logprobs.extend(vllm.InputTokenLogProb(value=top.chosen) for _, top in piece.prompt_logprobs)
    message.top_logprobs.extend(_tops([top for _, top in piece.prompt_logprobs]))
    return message


def _tops(tops: Sequence[TopTokens]) -> list[Any]:
    return [vllm.TopLogProbs(values=top.logprobs, token_ids=top.ids) for top in tops]
