"""Reads a GGUF file's metadata and tensor table, not its data.

Own parser because `gguf.GGUFReader` makes several numpy objects per vocabulary entry (seconds for a large vocabulary)
and meets a truncated file with an arbitrary exception. Format: ggml's docs/gguf.md, versions 2 and 3.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from common.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ARRAYS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` is row-major (the file's order reversed); `offset` counts from the start of the file `path`."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int
    path: Path


@dataclass(frozen=True, slots=True, eq=False)
class GgufHeader:
    """`metadata` values: int, float, bool, str, list[str] or a numpy array. `data_offset`: where tensor data begins."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    size: int
    data_offset: int


class _Cursor:
    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.at = 0

    def scalar(self, code: str) -> Any:
        form = "<" + code
        (value,) = struct.unpack_from(form, self.buffer, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self.buffer, self.at)
        start = self.at + 8
        self.at = start + length
        if self.at > len(self.buffer):
            raise struct.error("string past the end")
        return self.buffer[start : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item_kind, count = self.scalar("I"), self.scalar("Q")
        if item_kind in (_STRING, _ARRAY):
            return [self.value(item_kind) for _ in range(count)]
        items = np.frombuffer(self.buffer, dtype=_ARRAYS[item_kind], count=count, offset=self.at).copy()
        self.at += items.nbytes
        return items


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises ModelError naming the file, and the tensor where one lies past the end of the file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            return _parse(path, buffer)
    except OSError as error:
        raise ModelError(f"{path}: can not be read: {error.strerror}") from error
    except (struct.error, ValueError, KeyError, OverflowError, MemoryError, RecursionError) as error:
        raise ModelError(f"{path}: truncated or damaged GGUF file ({error})") from error


def _parse(path: Path, buffer: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(buffer)
    if buffer[:4] != b"GGUF":
        raise ModelError(f"{path}: not a GGUF file (its first bytes are {buffer[:4]!r})")
    cursor.at = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in (2, 3):
            raise ModelError(f"{path}: a big-endian GGUF file, which is not read (gguf-convert-endian turns it round)")
        raise ModelError(f"{path}: GGUF version {version} is not supported; 2 and 3 are")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    entries = [_tensor_entry(cursor, path) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"{path}: general.alignment must be a positive integer, not {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        elements, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % elements:
            raise ModelError(f"{path}: tensor {name}: rows of {shape[-1]} do not fit {kind.name} blocks of {elements}")
        num_bytes = int(np.prod(shape, dtype=object)) // elements * block_bytes
        end = start + offset + num_bytes
        if end > len(buffer):
            raise ModelError(f"{path}: truncated: tensor {name} ends at byte {end}, the file has {len(buffer)}")
        if name in tensors:
            raise ModelError(f"{path}: tensor {name} is in it twice")
        tensors[name] = GgufTensor(name, shape, kind, start + offset, num_bytes, path)
    return GgufHeader(path, metadata, tensors, len(buffer), start)


def _tensor_entry(cursor: _Cursor, path: Path) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = cursor.string()
    num_dimensions = cursor.scalar("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ModelError(f"{path}: tensor {name} has {num_dimensions} dimensions: damaged GGUF file")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dimensions))[::-1]
    kind = cursor.scalar("I")
    try:
        return name, shape, GGMLQuantizationType(kind), cursor.scalar("Q")
    except ValueError:
        raise ModelError(f"{path}: tensor {name} has the unknown type {kind}") from None
