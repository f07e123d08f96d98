"""Bearer tokens on every call but health checks."""

import hmac
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar

import grpc
import grpc.aio

from common.errors import ConfigError, Unauthenticated
from scheduler_svc.api.calls import Context
from scheduler_svc.api.status import abort

EXEMPT_PREFIX: Final = "/grpc.health.v1.Health/"
MIN_TOKEN_CHARS: Final = 8

Req = TypeVar("Req")
Resp = TypeVar("Resp")


class BearerTokens(grpc.aio.ServerInterceptor):
    """Refuses calls without `authorization: Bearer <one of the tokens>` with UNAUTHENTICATED.

    The comparison takes the same time whichever token matches and however much of it does.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = tuple(token.encode() for token in tokens)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Req, Resp] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Req, Resp] | None":
        method = handler_call_details.method
        if str(method).startswith(EXEMPT_PREFIX) or self._allows(handler_call_details):
            return await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(_refuse)

    def _allows(self, details: grpc.HandlerCallDetails) -> bool:
        given = b""
        for key, value in details.invocation_metadata or ():
            if key == "authorization":
                raw = value if isinstance(value, bytes) else value.encode()
                scheme, _, token = raw.partition(b" ")
                if scheme.lower() == b"bearer":
                    given = token.strip()
        matches = [hmac.compare_digest(given, token) for token in self._tokens]
        return any(matches)


async def _refuse(request_iterator: object, context: Context) -> None:
    """A handler of the widest kind, stream to stream, refuses calls of every kind."""
    await abort(context, Unauthenticated("this server wants an accepted token: `authorization: Bearer <token>`"))


def read_tokens(path: Path) -> tuple[str, ...]:
    """One token per line; empty lines and lines that start with # are skipped.

    Raises ConfigError, for a token that no client could send too: headers carry visible ASCII.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {path} can not be read: {error}", field="auth_tokens_file") from error
    tokens = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not tokens:
        raise ConfigError(f"the token file {path} holds no token", field="auth_tokens_file")
    if any(len(token) < MIN_TOKEN_CHARS or not all("!" <= c <= "~" for c in token) for token in tokens):
        raise ConfigError(
            f"auth_tokens_file: {path}: a token has at least {MIN_TOKEN_CHARS} characters, visible ASCII, no spaces",
            field="auth_tokens_file",
            limit=str(MIN_TOKEN_CHARS),
        )
    return tokens
