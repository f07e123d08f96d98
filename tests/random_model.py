"""Decoders of random weights: those that `load_format: dummy` serves, in any shape."""

import torch

from executor_svc.loader.load import load_weights
from executor_svc.loader.random import RandomSource
from executor_svc.models.config import ModelConfig
from executor_svc.models.decoder import Decoder, DecoderWeights
from executor_svc.ops import Ops

CPU = torch.device("cpu")


def random_weights(config: ModelConfig, *, dtype: torch.dtype = torch.float32, scale: float) -> DecoderWeights:
    """Matrices and biases normal with deviation `scale`, norms 1; on the CPU, the same each time."""
    return load_weights(config, RandomSource(CPU, scale), dtype=dtype, device=CPU)


def random_decoder(
    config: ModelConfig, ops: Ops, *, dtype: torch.dtype = torch.float32, scale: float, max_positions: int | None = None
) -> Decoder:
    return Decoder(config, random_weights(config, dtype=dtype, scale=scale), ops, max_positions=max_positions)
