"""Tensors out of checkpoint files, as torch tensors on the host. Never unpickles anything."""

import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from safetensors import SafetensorError, safe_open

from common.errors import ModelError
from common.model_files.description import ModelFiles
from common.model_files.gguf_header import GgufTensor
from common.model_files.gguf_model import GgufModel
from executor_svc.kernels_cpu.packing import Blocks, Format
from executor_svc.loader import gguf_blocks
from executor_svc.loader.gguf_tensors import check_shape, find_tensor
from executor_svc.loader.names import ROPE_DIVISORS, Part
from executor_svc.loader.random import RandomSource

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class TensorSource(Protocol):
    """An open checkpoint."""

    def read(self, part: Part) -> torch.Tensor:
        """The tensor behind `part`, of its shape, floating point, on the host (a random one: on the device it was asked
        for); maybe a view of the mapped file.

        Raises ModelError naming file and tensor when it is missing or has another type or shape.
        """
        ...

    def read_blocks(self, part: Part, *, only_kept: bool = False) -> Blocks | None:
        """The same as quantised blocks; None: it is not quantised or, for `only_kept`, in another way than Blocks can
        say."""
        ...

    def rope_divisors(self, head_dim: int) -> torch.Tensor | None:
        """float32 [head_dim // 2]; None: the file has none."""
        ...


@contextmanager
def open_source(files: ModelFiles, device: torch.device | None = None) -> Iterator[TensorSource]:
    """The checkpoint's files, mapped while the context lasts. Raises ModelError.

    `device`: where random weights are made, so that those of a large model need neither host memory nor the CPU's time.
    """
    if files.kind == "dummy":
        yield RandomSource(device or torch.device("cpu"), _deviation(files))
        return
    with ExitStack() as stack:
        if files.gguf is not None:
            buffers = {part.path: _map(part.path) for part in files.gguf.parts}
            yield _GgufSource(files.gguf, buffers, permuted=files.gguf.metadata["general.architecture"] == "llama")
        else:
            yield _SafetensorsSource(files, stack.enter_context)


def _map(path: Path) -> mmap.mmap:
    """Never closed: arrays made from it may outlive their source; the mapping goes with the last of them."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # an empty file can not be mapped
        raise ModelError(f"{path}: can not be read: {error}") from error


def _deviation(files: ModelFiles) -> float:
    value = files.config.get("initializer_range", 0.02)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ModelError(f"{files.config_source}: initializer_range must be a number between 0 and 1, not {value!r}")
    return float(value)


class _SafetensorsSource:
    def __init__(self, files: ModelFiles, enter: Callable[[Any], Any]) -> None:
        self._path = files.path
        self._shards = {tensor: shard for shard in files.shards for tensor in shard.tensors}
        self._open: dict[str, Any] = {}
        for shard in files.shards:
            try:
                self._open[shard.path.name] = enter(safe_open(str(shard.path), framework="pt", device="cpu"))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{shard.path}: can not be read: {error}") from error

    def read(self, part: Part) -> torch.Tensor:
        shard = self._shards.get(part.hf_name)
        if shard is None:
            raise ModelError(f"{self._path}: tensor {part.hf_name} is missing")
        info = shard.tensors[part.hf_name]
        if info.dtype not in _FLOATS:
            raise ModelError(f"{shard.path}: tensor {part.hf_name} has type {info.dtype}, not one of F32, F16, BF16")
        check_shape(str(shard.path), part.hf_name, info.shape, part.shape)
        tensor: torch.Tensor = self._open[shard.path.name].get_tensor(part.hf_name)
        return tensor

    def read_blocks(self, part: Part, *, only_kept: bool = False) -> Blocks | None:
        return None

    def rope_divisors(self, head_dim: int) -> torch.Tensor | None:
        return None


class _GgufSource:
    def __init__(self, model: GgufModel, buffers: Mapping[Path, mmap.mmap], *, permuted: bool) -> None:
        self._model = model
        self._buffers = buffers
        self._permuted = permuted

    def read(self, part: Part) -> torch.Tensor:
        return torch.from_numpy(self._in_order(part, self._dequantize(find_tensor(self._model, part))))

    def read_blocks(self, part: Part, *, only_kept: bool = False) -> Blocks | None:
        info = find_tensor(self._model, part)
        if len(info.shape) != 2 or gguf_blocks.format_of(info.type) is Format.DENSE:
            return None
        raw = self._in_order(part, self._raw(info).reshape(info.shape[0], -1))
        with self._dequantising(info):
            return gguf_blocks.read_blocks(raw, info.type, only_kept=only_kept)

    def _in_order(self, part: Part, rows: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
        return _unpermute(rows, part.rotary_heads) if part.rotary_heads and self._permuted else rows

    def rope_divisors(self, head_dim: int) -> torch.Tensor | None:
        info = self._model.tensors.get(ROPE_DIVISORS)
        if info is None:
            return None
        check_shape(str(info.path), info.name, info.shape, (head_dim // 2,))
        return torch.from_numpy(self._dequantize(info).astype(np.float32))

    def _dequantize(self, info: GgufTensor) -> np.ndarray[Any, np.dtype[Any]]:
        """Float array of the tensor's shape, newly made. F16 stays F16; everything else becomes float32."""
        raw = self._raw(info)
        if info.type == GGMLQuantizationType.F16:
            return raw.view(np.float16).reshape(info.shape).copy()
        if info.type == GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(info.shape).copy()
        rows = math.prod(info.shape[:-1])
        with self._dequantising(info):
            values: np.ndarray[Any, np.dtype[Any]] = dequantize(raw.reshape(rows, -1), info.type)
        return values.reshape(info.shape)

    def _raw(self, info: GgufTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.frombuffer(self._buffers[info.path], dtype=np.uint8, count=info.num_bytes, offset=info.offset)

    @contextmanager
    def _dequantising(self, info: GgufTensor) -> Iterator[None]:
        try:
            yield
        except NotImplementedError:
            raise ModelError(
                f"{info.path}: tensor {info.name} has type {info.type.name}, which can not be dequantised"
            ) from None


def _unpermute(array: np.ndarray[Any, np.dtype[Any]], heads: int) -> np.ndarray[Any, np.dtype[Any]]:
    """Back to halves: GGUF files of Llama's family hold the rows of q and k with the two halves of a head interleaved,
    because ggml rotates neighbours where Hugging Face rotates the two halves against each other."""
    rows = array.shape[0]
    paired = array.reshape(heads, rows // heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(array.shape)
