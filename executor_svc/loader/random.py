"""Random weights in a model's shapes, for benchmarks and tests that need no checkpoint."""

import zlib

import torch

from executor_svc.kernels_cpu.packing import Blocks
from executor_svc.loader.names import Part
from executor_svc.models.config import ModelConfig
from executor_svc.models.decoder import Decoder, DecoderWeights, LayerWeights
from executor_svc.ops import Ops


class RandomSource:
    """A TensorSource without files: matrices and biases normal with deviation `scale`, norms 1, bfloat16, on `device`.

    Each tensor depends on its name alone; the bits differ from one kind of device to another.
    """

    def __init__(self, device: torch.device, scale: float) -> None:
        self._device = device
        self._scale = scale

    def read(self, part: Part) -> torch.Tensor:
        if len(part.shape) == 1 and not part.hf_name.endswith(".bias"):
            return torch.ones(part.shape, dtype=torch.bfloat16, device=self._device)
        generator = torch.Generator(device=self._device).manual_seed(zlib.crc32(part.hf_name.encode()))
        values = torch.empty(part.shape, dtype=torch.bfloat16, device=self._device)
        return values.normal_(0.0, self._scale, generator=generator)

    def read_blocks(self, part: Part) -> Blocks | None:
        return None

    def rope_divisors(self, head_dim: int) -> torch.Tensor | None:
        return None


def random_weights(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, seed: int = 0, scale: float = 0.02
) -> DecoderWeights:
    """Matrices and biases normal with deviation `scale`, norms 1. Same seed and device: same bits."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
        return weight.normal_(0.0, scale, generator=generator)

    def bias(size: int, wanted: bool) -> torch.Tensor | None:
        return (
            torch.empty(size, dtype=dtype, device=device).normal_(0.0, scale, generator=generator) if wanted else None
        )

    def norm(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    embedding = matrix(config.vocab_size, hidden)
    layers = [
        LayerWeights(
            input_norm=norm(hidden),
            qkv=matrix(qkv, hidden),
            output=matrix(hidden, heads),
            post_norm=norm(hidden),
            gate_up=matrix(2 * config.intermediate_size, hidden),
            down=matrix(hidden, config.intermediate_size),
            qkv_bias=bias(qkv, config.qkv_bias),
            output_bias=bias(hidden, config.output_bias),
            gate_up_bias=bias(2 * config.intermediate_size, config.mlp_bias),
            down_bias=bias(hidden, config.mlp_bias),
            q_norm=norm(config.head_dim) if config.qk_norm else None,
            k_norm=norm(config.head_dim) if config.qk_norm else None,
        )
        for _ in range(config.num_layers)
    ]
    head = embedding if config.tie_embeddings else matrix(config.vocab_size, hidden)
    return DecoderWeights(embedding, layers, norm(hidden), head)


def random_decoder(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    seed: int = 0,
    scale: float = 0.02,
    max_positions: int | None = None,
) -> Decoder:
    """A decoder over `random_weights`."""
    weights = random_weights(config, dtype=dtype, device=device, seed=seed, scale=scale)
    return Decoder(config, weights, ops, max_positions=max_positions)
