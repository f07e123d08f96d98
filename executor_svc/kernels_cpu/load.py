"""A native decoder out of a model's files. What GGUF has quantised stays so."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from common.errors import ModelError
from common.model_files.description import ModelFiles, Progress, no_progress
from executor_svc.kernels_cpu.decoder import NativeDecoder, pack_weights
from executor_svc.kernels_cpu.library import Library
from executor_svc.kernels_cpu.packing import Blocks, Format
from executor_svc.loader.names import Part, parts
from executor_svc.loader.sources import open_source
from executor_svc.models.config import ModelConfig


def load_native(
    files: ModelFiles,
    config: ModelConfig,
    library: Library,
    *,
    wanted: Format | None,
    threads: int,
    cpus: Sequence[int] = (),
    progress: Progress = no_progress,
    max_positions: int | None = None,
) -> NativeDecoder:
    """`wanted`: see pack_weights; `cpus`: see NativeDecoder. Host memory beyond the mapped file and the packed weights
    stays below that of a few copies of one matrix. Raises ModelError naming file and tensor."""
    fields: dict[tuple[int, str], list[Part]] = {}
    for part in parts(config):
        fields.setdefault((part.layer, part.field), []).append(part)
    total, done = sum(torch.Size(p.shape).numel() for own in fields.values() for p in own), 0
    with open_source(files) as source, torch.inference_mode():

        def read(layer: int, field: str) -> Sequence[torch.Tensor | Blocks]:
            nonlocal done
            pieces: list[torch.Tensor | Blocks] = []
            for part in fields.get((layer, field), ()):
                piece = source.read_blocks(part, only_kept=wanted is not None) or source.read(part)
                shape = tuple(piece.numbers.shape if isinstance(piece, Blocks) else piece.shape)
                if shape != part.shape:
                    raise ModelError(f"{files.path}: tensor {part.hf_name} came out as {list(shape)}")
                pieces.append(piece)
                done = min(total, done + torch.Size(part.shape).numel())
                progress(f"loading {files.description.id}", done, total)
            return pieces

        weights = pack_weights(config, read, wanted)
        weights = replace(weights, rope_divisors=source.rope_divisors(config.head_dim))
    return NativeDecoder(config, weights, library, threads=threads, cpus=cpus, max_positions=max_positions or 0)
