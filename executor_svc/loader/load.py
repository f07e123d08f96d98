"""Builds a Decoder from a model's files: each tensor is read, converted and copied into its place once."""

from typing import Any

import torch

from common.errors import ModelError
from common.model_files.description import ModelFiles, Progress, no_progress
from executor_svc.loader.gguf_tensors import check_tensors
from executor_svc.loader.names import EMBEDDING, FINAL_NORM, HEAD, Part, parts
from executor_svc.loader.sources import TensorSource, open_source
from executor_svc.models.config import ModelConfig, parse_config
from executor_svc.models.decoder import Decoder, DecoderWeights, LayerWeights
from executor_svc.ops import Ops

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def model_config(files: ModelFiles) -> ModelConfig:
    """The decoder's shape. Raises ModelError naming the file: for an unsupported architecture, a mistyped value, or
    tensors of a GGUF file that are not those of such a decoder."""
    config = parse_config(files.config, files.config_source)
    if files.gguf is not None:
        check_tensors(files.gguf, config)
    return config


def model_dtype(files: ModelFiles) -> torch.dtype:
    """The precision the model was published in; bfloat16 where its files do not say (GGUF)."""
    name = files.config.get("dtype") or files.config.get("torch_dtype")
    return _DTYPES.get(str(name), torch.bfloat16)


def load_model(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    progress: Progress = no_progress,
    max_positions: int | None = None,
) -> Decoder:
    """Reads every weight in `dtype` onto `device`.

    Host memory beyond the mapped file stays below that of the largest tensor in float32. `progress` counts bytes of
    `dtype` as they arrive. Raises ModelError naming file and tensor.
    """
    config = model_config(files)
    with open_source(files, device) as source, torch.inference_mode():
        weights = load_weights(
            config, source, dtype=dtype, device=device, name=files.description.id, where=str(files.path),
            progress=progress,
        )  # fmt: skip
    return Decoder(config, weights, ops, max_positions=max_positions)


def load_weights(
    config: ModelConfig,
    source: TensorSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    name: str = "",
    where: str = "",
    progress: Progress = no_progress,
) -> DecoderWeights:
    """All that `config` names, out of `source`. name, where: of the model, for people."""
    wanted = list(parts(config))
    weights = _Builder(config, wanted, dtype, device)
    total = sum(_numel(part) for part in wanted) * dtype.itemsize
    done = 0
    for part in wanted:
        weights.place(part, _read(source, part, where))
        done += _numel(part) * dtype.itemsize
        progress(f"loading {name}", done, total)
    return weights.finish(source.rope_divisors(config.head_dim))


def _read(source: TensorSource, part: Part, where: str) -> torch.Tensor:
    tensor = source.read(part)
    if tuple(tensor.shape) != part.shape:
        raise ModelError(f"{where}: tensor {part.hf_name} came out as {list(tensor.shape)}")
    return tensor


def _numel(part: Part) -> int:
    return torch.Size(part.shape).numel()


class _Builder:
    """Allocates the fused tensors and takes parts in any order."""

    def __init__(self, config: ModelConfig, wanted: list[Part], dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        sizes: dict[tuple[int, str], tuple[int, ...]] = {}
        for part in wanted:
            rows = part.start + part.shape[0]
            key = (part.layer, part.field)
            sizes[key] = (max(rows, sizes.get(key, (0,))[0]), *part.shape[1:])
        self._tensors = {key: torch.empty(size, dtype=dtype, device=device) for key, size in sizes.items()}

    def place(self, part: Part, values: torch.Tensor) -> None:
        target = self._tensors[part.layer, part.field]
        target[part.start : part.start + part.shape[0]].copy_(values)

    def finish(self, rope_divisors: torch.Tensor | None) -> DecoderWeights:
        layers: list[LayerWeights] = []
        for layer in range(self._config.num_layers):
            fields: dict[str, Any] = {field: t for (at, field), t in self._tensors.items() if at == layer}
            layers.append(LayerWeights(**fields))
        embedding = self._tensors[-1, EMBEDDING]
        head = self._tensors.get((-1, HEAD), embedding)
        return DecoderWeights(embedding, layers, self._tensors[-1, FINAL_NORM], head, rope_divisors)
