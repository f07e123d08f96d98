"""Client for Stepwire's gRPC API. This file names what is public; everything else may change."""

from stepwire_client.aio import AsyncClient, AsyncGeneration, AsyncStream
from stepwire_client.client import Client, Generation, Stream
from stepwire_client.errors import (
    AlreadyExists,
    BrokenStream,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    NotImplementedByServer,
    PermissionDenied,
    ResourceExhausted,
    StepwireError,
    Unauthenticated,
    Unavailable,
)
from stepwire_client.options import Retry, Tls
from stepwire_client.types import (
    CacheReset,
    Completion,
    Delta,
    Event,
    ExecutorStats,
    Finished,
    FinishReason,
    GenerateOptions,
    Health,
    Message,
    ModelInfo,
    Prompt,
    RawLogits,
    Sampling,
    Started,
    Stats,
    Step,
    TenantStats,
    TokenLogprobs,
    Tokens,
    TopLogprob,
    Usage,
)

__all__ = [
    "AlreadyExists", "AsyncClient", "AsyncGeneration", "AsyncStream", "BrokenStream", "CacheReset", "Cancelled",
    "Client", "Completion", "DeadlineExceeded", "Delta", "Event", "ExecutorStats", "FailedPrecondition", "FinishReason",
    "Finished", "GenerateOptions", "Generation", "Health", "Internal", "InvalidArgument", "Message", "ModelInfo",
    "NotFound", "NotImplementedByServer", "PermissionDenied", "Prompt", "RawLogits", "ResourceExhausted", "Retry",
    "Sampling", "Started", "Stats", "Step", "StepwireError", "Stream", "TenantStats", "Tls", "TokenLogprobs", "Tokens",
    "TopLogprob", "Unauthenticated", "Unavailable", "Usage",
]  # fmt: skip
