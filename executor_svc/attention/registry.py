"""Attention backends by name."""

from collections.abc import Callable

from common.errors import ConfigError
from executor_svc.attention.exact import ExactAttention
from executor_svc.attention.layout import AttentionBackend, AttentionShape
from executor_svc.attention.torch_paged import TorchPagedAttention
from executor_svc.numerics import ExactOps, FastOps


def _torch(shape: AttentionShape, ops: FastOps | ExactOps) -> AttentionBackend:
    return TorchPagedAttention(shape)


def _exact(shape: AttentionShape, ops: FastOps | ExactOps) -> AttentionBackend:
    if not isinstance(ops, ExactOps):
        raise ConfigError("attention backend exact needs numerics=exact", field="attention_backend")
    return ExactAttention(shape, ops)


BACKENDS: dict[str, Callable[[AttentionShape, FastOps | ExactOps], AttentionBackend]] = {
    "torch": _torch,
    "exact": _exact,
}


def make_backend(name: str, shape: AttentionShape, ops: FastOps | ExactOps) -> AttentionBackend:
    """`name`: one of BACKENDS, or "auto": what suits `ops`. Raises ConfigError."""
    if name == "auto":
        name = "exact" if isinstance(ops, ExactOps) else "torch"
    if name not in BACKENDS:
        raise ConfigError(
            f"unknown attention backend {name!r}; there are: auto, {', '.join(sorted(BACKENDS))}",
            field="attention_backend",
        )
    if isinstance(ops, ExactOps) and name != "exact":
        raise ConfigError(f"numerics=exact needs attention backend exact, not {name}", field="attention_backend")
    return BACKENDS[name](shape, ops)
