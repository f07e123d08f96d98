"""Reads the headers of safetensors files, single or sharded, not their data. Format: the safetensors README."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ModelError

_MAX_HEADER_BYTES = 100 * 1024 * 1024
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """`dtype` is the format's own name: F32, F16, BF16, …"""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SafetensorsHeader:
    """One file. `raw`: its header as it stands in the file."""

    path: Path
    tensors: Mapping[str, SafetensorsTensor]
    size: int
    raw: bytes


def read_safetensors_header(path: Path) -> SafetensorsHeader:
    """Raises ModelError naming the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise ModelError(f"{path}: truncated: {size} bytes are no safetensors file")
            (length,) = struct.unpack("<Q", prefix)
            if length > _MAX_HEADER_BYTES:
                raise ModelError(f"{path}: not a safetensors file (header of {length} bytes)")
            raw = file.read(length)
    except OSError as error:
        raise ModelError(f"{path}: can not be read: {error.strerror}") from error
    if len(raw) < length:
        raise ModelError(f"{path}: truncated: the header needs {length} bytes, the file has {size - 8} after its start")
    try:
        entries = json.loads(raw)
        tensors, end = _tensors(entries)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ModelError(f"{path}: not a safetensors file (header: {error})") from error
    if end + 8 + length != size:
        state = "truncated" if end + 8 + length > size else "longer than its header says"
        raise ModelError(f"{path}: {state}: {end + 8 + length} bytes expected, {size} found")
    return SafetensorsHeader(path, tensors, size, raw)


def _tensors(entries: Any) -> tuple[dict[str, SafetensorsTensor], int]:
    tensors, end = {}, 0
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        shape = tuple(int(size) for size in entry["shape"])
        tensors[name] = SafetensorsTensor(name, str(entry["dtype"]), shape)
        end = max(end, int(entry["data_offsets"][1]))
    return tensors, end


def read_shards(directory: Path) -> tuple[SafetensorsHeader, ...]:
    """Every weight file of a Hugging Face directory, by name.

    Raises ModelError when there is none, one is missing, or the index names a tensor its file lacks.
    """
    index = directory / INDEX_NAME
    if index.is_file():
        return _indexed(directory, index)
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if files:
        return tuple(read_safetensors_header(path) for path in files)
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    hint = f" ({', '.join(pickled)} would have to be unpickled, which Stepwire never does)" if pickled else ""
    raise ModelError(f"{directory}: no *.safetensors file{hint}")


def _indexed(directory: Path, index: Path) -> tuple[SafetensorsHeader, ...]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index}: weight_map must be an object of file names")
    shards = {}
    for name in sorted(set(weight_map.values())):
        path = directory / name
        if path.resolve().parent != directory.resolve() and not path.is_symlink():
            raise ModelError(f"{index}: {name} lies outside the model's directory")
        if not path.is_file():
            raise ModelError(f"{path}: missing, though {index.name} names it")
        shards[name] = read_safetensors_header(path)
    for tensor, name in weight_map.items():
        if tensor not in shards[name].tensors:
            raise ModelError(f"{directory / name}: tensor {tensor} is missing, though {index.name} places it there")
    return tuple(shards.values())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: can not be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value
