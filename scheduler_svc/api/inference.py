"""stepwire.v1.Inference: what clients call."""

from collections.abc import AsyncIterator
from typing import Final

import grpc
import grpc.aio

from common.errors import InvalidInput, StepwireError, TooLarge
from common.messages import u32
from common.model_files.description import SamplingDefaults
from scheduler_svc.api.calls import Context, answered
from scheduler_svc.api.generation import Generation, begin_trace
from scheduler_svc.api.prompt import PromptReader
from scheduler_svc.api.responses import add_completion, add_piece, plain_delta, started
from scheduler_svc.api.status import abort, only_stepwire_errors
from scheduler_svc.api.validation import check_token_ids, request_id
from scheduler_svc.api.worker import ApiWorker
from stepwire.v1 import inference_pb2, inference_pb2_grpc
from stepwire.v1 import inference_pb2 as pb

SERVICE_NAME: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
MAX_DETOKENIZE_IDS: Final = 1_000_000


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Every accepted Generate ends in exactly one `finished` for each choice or a non-OK status; however it ends, its
    work ends too."""

    def __init__(self, generation: Generation, prompts: PromptReader, worker: ApiWorker, version: str) -> None:
        self._generation = generation
        self._prompts = prompts
        self._worker = worker
        self._version = version

    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[bytes]:
        """Yields GenerateResponses, encoded: for most of them no message is ever built. See `add_inference`."""
        trace, trailing = begin_trace(context)
        active = None
        try:
            with only_stepwire_errors():
                active = await self._generation.accept(request, context, trace)
                messages = started(active.submit)  # by choice
                if active.valid.stream:
                    active.encode_tokens(plain_delta)
                    for message in messages:
                        yield message.SerializeToString()
                while not active.finished:
                    if (taken := active.take()) is None:
                        while (encoded := await active.wait()) is not None:
                            yield encoded
                        continue
                    index, piece = taken
                    message = pb.GenerateResponse(index=index) if active.valid.stream else messages[index]
                    add_piece(message, piece)
                    if piece.completion is not None:
                        add_completion(message, piece.completion)
                    if active.finished:
                        active.close()
                    if active.valid.stream or piece.completion is not None:
                        yield message.SerializeToString()
        except StepwireError as error:
            if active is not None:
                active.failed(error)
                active.close()
            await abort(context, error, trailing)
        finally:
            if active is not None:
                active.close()

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        return await answered(context, self._model_info(request))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        return await answered(context, self._tokenize(request))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        return await answered(context, self._detokenize(request))

    async def ApplyChatTemplate(
        self, request: pb.ApplyChatTemplateRequest, context: Context
    ) -> pb.ApplyChatTemplateResponse:
        return await answered(context, self._apply_chat_template(request))

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        return await answered(context, self._abort(request))

    async def _model_info(self, request: pb.GetModelInfoRequest) -> pb.GetModelInfoResponse:
        model = self._generation.model
        model.check_name(request.model)
        state = self._worker.state
        has_tokenizer = self._generation.has_tokenizer
        return pb.GetModelInfoResponse(
            model=model.name,
            model_hash=model.model_hash,
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            eos_token_ids=model.eos_ids,
            bos_token_id=model.bos_id,
            has_tokenizer=has_tokenizer,
            has_chat_template=has_tokenizer and self._prompts.tokenizer.has_chat_template,
            max_prompt_tokens=state.max_prompt_tokens,
            default_sampling=_default_sampling(model.defaults),
            features=state.info.features if state.info is not None else (),
            server_version=self._version,
        )

    async def _tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        self._generation.model.check_name(request.model)
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        ids, tokens = await self._prompts.tokenize(request.text, special)
        return pb.TokenizeResponse(ids=ids, tokens=tokens)

    async def _detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        model = self._generation.model
        model.check_name(request.model)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        if len(request.ids) > MAX_DETOKENIZE_IDS:
            raise TooLarge(f"{len(request.ids)} ids", field="ids", limit=str(MAX_DETOKENIZE_IDS))
        if model.vocab_size:
            check_token_ids(u32(request.ids), "ids", model.vocab_size)
        return pb.DetokenizeResponse(text=await self._prompts.decode(list(request.ids), skip))

    async def _apply_chat_template(self, request: pb.ApplyChatTemplateRequest) -> pb.ApplyChatTemplateResponse:
        self._generation.model.check_name(request.model)
        text, ids = await self._prompts.read_chat(request.chat)
        return pb.ApplyChatTemplateResponse(text=text, ids=ids)

    async def _abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        if not request.request_id:
            raise InvalidInput("request_id is empty", field="request_id")
        return pb.AbortResponse(found=await self._worker.abort(request_id(request.request_id)))


def add_inference(servicer: InferenceServicer, server: grpc.aio.Server) -> None:
    """As the generated add_InferenceServicer_to_server, but that Generate yields messages already encoded."""
    generate: grpc.RpcMethodHandler[pb.GenerateRequest, bytes] = grpc.unary_stream_rpc_method_handler(
        servicer.Generate, request_deserializer=pb.GenerateRequest.FromString
    )
    # Of two handlers for one method the first that was added serves it.
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, {"Generate": generate}),))
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)


def _default_sampling(defaults: SamplingDefaults) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=1.0 if defaults.temperature is None else defaults.temperature,
        top_k=defaults.top_k or 0,
        top_p=1.0 if defaults.top_p is None else defaults.top_p,
        min_p=defaults.min_p or 0.0,
        repetition_penalty=1.0 if defaults.repetition_penalty is None else defaults.repetition_penalty,
    )
