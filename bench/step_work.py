"""What a step has to move and to compute at least: the one place that counts it.

Weights are read once in a step, the head's only where a row samples. Attention reads each key and value once for every
row that decodes and for every piece of a prompt, and writes those of the tokens that are computed. Left out: the rows
of the embedding, norms, activations, and what the sampler reads.
"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.step_batch import Batch, attention_flops, keys_read, pairs
from executor_svc.kernels_cpu.decoder import NativeDecoder
from executor_svc.kv_cache import KvShape
from executor_svc.models.config import ModelConfig
from executor_svc.models.decoder import Decoder
from executor_svc.step_model import Model


@dataclass(frozen=True, slots=True)
class Work:
    """Of one step or, summed, of several. tokens: that are computed; outputs: tokens that come out."""

    tokens: int
    outputs: int
    weight_bytes: int
    kv_read_bytes: int
    kv_written_bytes: int
    flops: int

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_read_bytes + self.kv_written_bytes

    @classmethod
    def sum(cls, works: Iterable["Work"]) -> "Work":
        each = [astuple(work) for work in works]
        return cls(*(sum(column) for column in zip(*each, strict=True))) if each else NO_WORK


NO_WORK: Final = Work(0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class StepSize:
    """What one model brings to each step, as an executor holds it. kv_token_bytes: keys and values of one token in one
    layer; layer_bytes: matrices of all layers; head_bytes: of the head."""

    config: ModelConfig
    layer_bytes: int
    head_bytes: int
    kv_token_bytes: int

    @classmethod
    def of(cls, model: Model, kv: KvShape) -> "StepSize":
        layers, head = _held(model)
        return cls(model.config, layers, head, kv.block_bytes // kv.block_size // kv.num_layers)

    def weights_read(self, batch: Batch) -> int:
        """Bytes: the layers' matrices once, however many tokens; the head's once if a row samples."""
        return self.layer_bytes + (self.head_bytes if batch.num_sampling else 0)

    def kv_read(self, batch: Batch) -> int:
        """Bytes: in each layer keys and values of all that its window lets rows and pieces see; see `keys_read`."""
        return self.kv_token_bytes * sum(keys_read(batch, window) for window in self.config.windows)

    def kv_written(self, batch: Batch) -> int:
        """Bytes: in each layer the key and value of every token that is computed."""
        return self.kv_token_bytes * self.config.num_layers * batch.num_tokens

    def flops(self, batch: Batch) -> int:
        """A product and a sum for each number of the layers' matrices and token, for each of the head's and row that
        samples, and attention's."""
        config = self.config
        head = config.vocab_size * config.hidden_size
        layers = config.num_parameters - head * (1 if config.tie_embeddings else 2)
        num_pairs = sum(pairs(batch, window) for window in config.windows)
        products = batch.num_tokens * layers + batch.num_sampling * head
        return 2 * products + attention_flops(config.num_heads, config.head_dim, num_pairs)

    def work(self, batch: Batch) -> Work:
        if not batch.num_tokens:
            return NO_WORK
        return Work(
            batch.num_tokens, batch.num_sampling,
            self.weights_read(batch), self.kv_read(batch), self.kv_written(batch), self.flops(batch),
        )  # fmt: skip


def _held(model: Model) -> tuple[int, int]:
    """Bytes of the layers' matrices and of the head's."""
    if isinstance(model, NativeDecoder):
        head = model.weights.head.num_bytes
        return model.weights.step_bytes - head, head
    assert isinstance(model, Decoder)
    weights = model.weights
    matrices = [(w.qkv, w.output, w.gate_up, w.down) for w in weights.layers]
    return sum(m.nbytes for layer in matrices for m in layer), weights.head.nbytes


def rates(step_ns: Sequence[int] | NDArray[np.int64], works: Sequence[Work]) -> dict[str, Any]:
    """Percentiles of a step, mean megabytes of one, and what all together moved, computed and brought in their time."""
    total, ns = Work.sum(works), float(np.sum(step_ns))
    return {
        "steps": len(works),
        **{f"p{p}_ms": round(float(np.percentile(step_ns, p)) / 1e6, 3) for p in (50, 95, 99)},
        "output_tokens_per_s": round(total.outputs / ns * 1e9, 1),
        "computed_tokens_per_s": round(total.tokens / ns * 1e9, 1),
        "weights_mb": round(total.weight_bytes / len(works) / 1e6, 3),
        "kv_read_mb": round(total.kv_read_bytes / len(works) / 1e6, 3),
        "kv_written_mb": round(total.kv_written_bytes / len(works) / 1e6, 3),
        "gb_s": round(total.num_bytes / ns, 2),
        "gflop_s": round(total.flops / ns, 1),
    }
