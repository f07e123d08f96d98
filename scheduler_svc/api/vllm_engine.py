"""vllm.grpc.engine.VllmEngine over the same worker, so that the SMG gateway can put an HTTP API in front.

Token ids come in and go out; the gateway tokenises and detokenises. What Stepwire does not have (grammars, images,
embeddings, KV transfer, profiling) is answered with UNIMPLEMENTED, never ignored. Streams follow what the gateway
expects of vLLM: chunks carry new tokens and count only these; a `complete` message ends each choice, with the last
tokens again when it streamed, else with all.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any, Final, NoReturn

from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from common.errors import NotSupported, StepwireError
from scheduler_svc.api.calls import Context, answered
from scheduler_svc.api.generation import Generation, begin_trace
from scheduler_svc.api.served_model import ExportableTokenizer, TextTokenizer
from scheduler_svc.api.status import abort, only_stepwire_errors
from scheduler_svc.api.vllm_messages import append, chunk, complete, pack_tokenizer, to_stepwire
from scheduler_svc.api.worker import ApiWorker
from scheduler_svc.token_stream import Piece

SERVICE_NAME: Final = "vllm.grpc.engine.VllmEngine"
TOKENIZER_CHUNK_BYTES: Final = 256 * 1024


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """Owned by the event loop, as the other servicers. `version`: of Stepwire."""

    def __init__(
        self, generation: Generation, worker: ApiWorker, tokenizer: TextTokenizer | None, version: str
    ) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._packed: asyncio.Future[tuple[bytes, str]] | None = None
        self._worker = worker
        self._version = version
        self._started_ns = worker.clock.monotonic_ns()
        self._last_receive_s = 0.0

    async def Generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        trace, trailing = begin_trace(context)
        self._last_receive_s = self._worker.clock.wall_ns() / 1e9
        active = None
        try:
            with only_stepwire_errors():
                active = await self._generation.accept(to_stepwire(request), context, trace)
                wholes = [Piece() for _ in range(active.valid.num_choices)]
                first = True
                while not active.finished:
                    index, piece = await active.next()
                    if request.stream:
                        if piece.token_ids or piece.prompt_logprobs:
                            yield vllm.GenerateResponse(chunk=chunk(active, index, piece, first))
                        first = first and not piece.prompt_logprobs
                        wholes[index] = piece
                    else:
                        append(wholes[index], piece)
                    if active.finished:
                        active.close()
                    if piece.completion is not None:
                        message = complete(active, index, wholes[index], piece.completion)
                        yield vllm.GenerateResponse(complete=message)
        except StepwireError as error:
            if active is not None:
                active.failed(error)
                active.close()
            await abort(context, error, trailing)
        finally:
            if active is not None:
                active.close()

    async def Abort(self, request: Any, context: Context) -> Any:
        async def work() -> Any:
            for request_id in request.request_ids:
                await self._worker.abort(request_id)
            return vllm.AbortResponse()

        return await answered(context, work())

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        state = self._worker.state
        if state.ready:
            return vllm.HealthCheckResponse(healthy=True, message="ready")
        return vllm.HealthCheckResponse(healthy=False, message="draining" if state.draining else "no executor")

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        model = self._generation.model
        defaults = model.defaults
        named = {
            "temperature": defaults.temperature,
            "top_k": defaults.top_k,
            "top_p": defaults.top_p,
            "min_p": defaults.min_p,
            "repetition_penalty": defaults.repetition_penalty,
        }
        return vllm.GetModelInfoResponse(
            model_path=model.name,
            is_generation=True,
            max_context_length=model.max_context,
            vocab_size=model.vocab_size,
            served_model_name=model.name,
            architectures=[model.architecture] if model.architecture else [],
            eos_token_ids=model.eos_ids,
            bos_token_id=0 if model.bos_id is None else model.bos_id,
            max_req_input_len=self._worker.state.max_prompt_tokens,
            default_sampling_params_json=json.dumps({k: v for k, v in named.items() if v is not None}),
        )

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        info = self._worker.state.info
        return vllm.GetServerInfoResponse(
            active_requests=self._worker.num_streams,
            is_paused=self._worker.state.draining,
            last_receive_timestamp=self._last_receive_s,
            uptime_seconds=(self._worker.clock.monotonic_ns() - self._started_ns) / 1e9,
            server_type="vllm-grpc",
            data_parallel_size=1,
            kv_cache_dtype=info.kv_dtype if info else "",
            block_size=info.block_size if info else 0,
            model_dtype=info.dtype if info else "",
            max_num_seqs=info.max_num_seqs if info else 0,
        )

    async def GetLoads(self, request: Any, context: Context) -> Any:
        stats = await answered(context, self._worker.stats())
        info = self._worker.state.info
        block_size = info.block_size if info else 0
        total = sum(executor.num_blocks for executor in stats.executors)
        used = total - sum(executor.free_blocks for executor in stats.executors)
        usage = used / total if total else 0.0
        load = vllm.SchedulerLoad(
            num_running_reqs=stats.running,
            num_waiting_reqs=stats.waiting,
            num_total_reqs=stats.running + stats.waiting,
            num_used_tokens=used * block_size,
            max_total_num_tokens=total * block_size,
            token_usage=usage,
            utilization=usage,
            cache_hit_rate=stats.cache_hit_tokens / max(1, stats.cache_queried_tokens),
            max_running_requests=info.max_num_seqs if info else 0,
        )
        seconds = self._worker.clock.wall_ns() / 1e9
        timestamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
        return vllm.GetLoadsResponse(timestamp=timestamp, version=self._version, dp_rank_count=1, loads=[load])

    async def Embed(self, request: Any, context: Context) -> NoReturn:
        await abort(context, NotSupported("Stepwire computes no embeddings"))

    async def FlushCache(self, request: Any, context: Context) -> Any:
        """Admin.ResetPrefixCache: nothing has to stop for it, so there is nothing to wait for either."""
        answer = await answered(context, self._worker.reset_prefix_cache())
        message = f"{answer.dropped} blocks dropped, {answer.forgotten} in use forgotten"
        return common_pb2.FlushCacheResponse(success=True, message=message)

    async def StartProfile(self, request: Any, context: Context) -> NoReturn:
        await abort(context, NotSupported("Stepwire's timelines are OpenTelemetry traces; there is no profiler call"))

    async def StopProfile(self, request: Any, context: Context) -> NoReturn:
        await abort(context, NotSupported("Stepwire's timelines are OpenTelemetry traces; there is no profiler call"))

    async def GetTokenizer(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """A zip of the tokenizer's files in pieces; the last carries the hash of the whole."""
        data, digest = await answered(context, self._packed_tokenizer())
        for start in range(0, len(data), TOKENIZER_CHUNK_BYTES):
            end = start + TOKENIZER_CHUNK_BYTES
            yield common_pb2.GetTokenizerChunk(data=data[start:end], sha256=digest if end >= len(data) else "")

    async def SubscribeKvEvents(self, request: Any, context: Context) -> AsyncIterator[Any]:
        await abort(context, NotSupported("Stepwire publishes no KV cache events; GetLoads tells the load"))
        yield  # makes this an async generator, as a streaming method must be

    async def _packed_tokenizer(self) -> tuple[bytes, str]:
        """Made once, off the event loop. Raises NotSupported."""
        tokenizer = self._tokenizer
        if not isinstance(tokenizer, ExportableTokenizer):
            raise NotSupported("this server has no tokenizer to hand out; give the gateway one of its own")
        if self._packed is None:
            self._packed = asyncio.ensure_future(asyncio.to_thread(pack_tokenizer, tokenizer))
        return await asyncio.shield(self._packed)
