"""Promises of the decoder beyond its logits."""

from dataclasses import replace

import pytest
import torch

from executor_svc import numerics
from executor_svc.models.config import ModelConfig, RopeConfig
from executor_svc.models.decoder import Decoder
from executor_svc.models.rope import RotaryTable, inverse_frequencies
from tests.random_model import random_decoder
from tests.reference import PlainOps

# Wide enough for PyTorch to split an element-wise kernel between threads, and no multiple of a vector's length.
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=1021,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=256,
    windows=(0, 0),
    tie_embeddings=True,
)
CPU = torch.device("cpu")


class ExactOps(PlainOps):
    """One row at a time: a row's bits can not depend on others."""

    name = "exact"

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.cat([super(ExactOps, self).linear(row, weight, bias) for row in x.split(1)])  # type: ignore[no-untyped-call]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.cat([super(ExactOps, self).rms_norm(row, weight, eps) for row in x.split(1)])  # type: ignore[no-untyped-call]

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return numerics.ExactOps().silu_mul(gate_up)


def own_value(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of tokens that see only themselves, queries mixed in so that rotation matters."""
    group = q.shape[1] // k.shape[1]
    return q + k.repeat_interleave(group, 1) + v.repeat_interleave(group, 1)


def make(config: ModelConfig = CONFIG, max_positions: int | None = None) -> Decoder:
    return random_decoder(config, ExactOps(), scale=0.3, max_positions=max_positions)


@pytest.mark.parametrize("threads", [1, 3])
def test_in_exact_mode_the_bits_of_a_token_do_not_depend_on_its_batch(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        decoder = make()
        ids = torch.randint(0, 64, (150,), generator=torch.Generator().manual_seed(1))
        positions = torch.arange(150)
        with torch.inference_mode():
            together = decoder.forward(ids, positions, own_value)
            for size in (1, 7, 33, 149):
                parts = [
                    decoder.forward(ids[at : at + size], positions[at : at + size], own_value)
                    for at in range(0, 150, size)
                ]
                assert torch.equal(torch.cat(parts), together)
    finally:
        torch.set_num_threads(before)


def test_tied_weights_are_one_tensor_and_counted_once() -> None:
    tied, untied = make(), make(replace(CONFIG, tie_embeddings=False))
    assert tied.weights.head is tied.weights.embedding
    assert untied.weights.num_bytes - tied.weights.num_bytes == 64 * 32 * 4
    norms = (2 * CONFIG.num_layers + 1) * 32
    assert tied.weights.num_bytes == (CONFIG.num_parameters + norms) * 4


def test_the_table_covers_what_was_asked_for_and_no_more_than_the_model() -> None:
    assert make(max_positions=16)._rotary.max_positions == 16
    assert make(max_positions=10**9)._rotary.max_positions == CONFIG.max_positions


def test_divisors_divide_the_frequencies() -> None:
    rope = RopeConfig(theta=100.0)
    divisors = torch.tensor([1.0, 2.0, 4.0, 8.0])
    table = RotaryTable(rope, 8, 32, dtype=torch.float32, device=CPU, divisors=divisors)
    cos, sin = table.gather(torch.tensor([0, 31]))
    angles = 31 * inverse_frequencies(rope, 8) / divisors
    torch.testing.assert_close(cos[:, 0], torch.stack((torch.ones(4), angles.cos())))
    torch.testing.assert_close(sin[:, 0], torch.stack((torch.zeros(4), angles.sin())))
