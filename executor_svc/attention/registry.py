"""Attention backends by name."""

from collections.abc import Callable
from importlib.util import find_spec

import torch

from common.errors import ConfigError
from executor_svc.attention.exact import ExactAttention
from executor_svc.attention.layout import AttentionBackend, AttentionShape
from executor_svc.attention.torch_paged import TorchPagedAttention
from executor_svc.attention.varlen import make_varlen, why_no_varlen, why_not_for
from executor_svc.environment import why_no_triton
from executor_svc.kv_cache import KvShape
from executor_svc.numerics import ExactOps, FastOps

Ops = FastOps | ExactOps


def _torch(shape: AttentionShape, kv: KvShape, ops: Ops, device: torch.device) -> AttentionBackend:
    if isinstance(ops, ExactOps):
        raise ConfigError(
            "numerics=exact needs attention backend exact or triton, not torch", field="attention_backend"
        )
    return TorchPagedAttention(shape)


def _exact(shape: AttentionShape, kv: KvShape, ops: Ops, device: torch.device) -> AttentionBackend:
    if not isinstance(ops, ExactOps):
        raise ConfigError("attention backend exact needs numerics=exact", field="attention_backend")
    return ExactAttention(shape, ops)


def _triton(shape: AttentionShape, kv: KvShape, ops: Ops, device: torch.device) -> AttentionBackend:
    if (reason := why_no_triton()) and (device.type == "cuda" or find_spec("triton") is None):
        raise ConfigError(f"attention backend triton: {reason}", field="attention_backend")
    if device.type != "cuda" and not _is_interpreted():
        raise ConfigError(f"attention backend triton needs a CUDA device, not {device}", field="attention_backend")
    # Only now: the package is no part of a CPU's installation.
    from executor_svc.attention.triton_paged import TritonAttention

    return TritonAttention(shape, exact=isinstance(ops, ExactOps))


def _varlen(shape: AttentionShape, kv: KvShape, ops: Ops, device: torch.device) -> AttentionBackend:
    reason = why_no_varlen()
    if not reason and device.type != "cuda":
        reason = f"it needs a CUDA device, not {device}"
    if not reason and isinstance(ops, ExactOps):
        reason = "numerics=exact computes in float32, which it does not"
    if reason := reason or why_not_for(kv):
        raise ConfigError(f"attention backend varlen: {reason}", field="attention_backend")
    return make_varlen(shape)


BACKENDS: dict[str, Callable[[AttentionShape, KvShape, Ops, torch.device], AttentionBackend]] = {
    "torch": _torch,
    "exact": _exact,
    "triton": _triton,
    "varlen": _varlen,
}


def make_backend(name: str, shape: AttentionShape, kv: KvShape, ops: Ops, device: torch.device) -> AttentionBackend:
    """`name`: one of BACKENDS, or "auto": what suits `ops` and the device. `kv`: of the cache. Raises ConfigError."""
    if name == "auto":
        if isinstance(ops, ExactOps):
            name = "exact"
        else:
            name = "triton" if device.type == "cuda" and not why_no_triton() else "torch"
    if name not in BACKENDS:
        raise ConfigError(
            f"unknown attention backend {name!r}; there are: auto, {', '.join(sorted(BACKENDS))}",
            field="attention_backend",
        )
    return BACKENDS[name](shape, kv, ops, device)


def _is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which tests do on the CPU."""
    import triton

    return bool(triton.knobs.runtime.interpret)
