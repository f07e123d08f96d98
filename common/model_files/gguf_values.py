"""Typed access to a GGUF file's metadata; every complaint names the file and the key."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from common.errors import ModelError

_Kind = TypeVar("_Kind", str, int)


class GgufValues:
    """A key that is missing has the default; one of another type raises ModelError."""

    def __init__(self, metadata: Mapping[str, Any], source: object) -> None:
        self._metadata = metadata
        self._source = source

    def has(self, key: str) -> bool:
        return key in self._metadata

    def text(self, key: str, default: str | None = None) -> str | None:
        return self._of(str, key, default, "a text")

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(key, default)
        if not isinstance(value, int) or value not in (0, 1):  # some writers have no type for it, and give 1 or 0
            raise self._mistyped(key, "true or false", value)
        return bool(value)

    def whole(self, key: str, default: int | None = None) -> int | None:
        """A list of one number for each layer is that number, where it is the same for all."""
        value = self._metadata.get(key, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
            if (value != value[0]).any():
                raise ModelError(f"{self._source}: {key} differs from layer to layer, which is not supported")
            return int(value[0])
        return self._of(int, key, default, "a whole number")

    def positive(self, *keys: str) -> float:
        """Of the first key that the file has; none, or 0: 1, which as a factor changes nothing."""
        key = next((key for key in keys if key in self._metadata), keys[0])
        value = self._metadata.get(key, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise self._mistyped(key, "a positive number", value)
        return float(value or 1.0)

    def texts(self, key: str) -> list[str]:
        """[]: the file has none."""
        value = self._metadata.get(key, [])
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self._mistyped(key, "a list of texts", value)
        return value

    def numbers(self, key: str) -> list[Any]:
        """int or float; []: the file has none."""
        value = self._metadata.get(key, [])
        array = np.asarray(value) if isinstance(value, np.ndarray | list) else None
        if array is None or array.dtype.kind not in "iuf" or array.ndim != 1:
            raise self._mistyped(key, "a list of numbers", value)
        numbers: list[Any] = array.tolist()
        return numbers

    def _of(self, kind: type[_Kind], key: str, default: _Kind | None, name: str) -> _Kind | None:
        value = self._metadata.get(key, default)
        if value is None or (isinstance(value, kind) and not isinstance(value, bool)):
            return value
        raise self._mistyped(key, name, value)

    def _mistyped(self, key: str, name: str, value: Any) -> ModelError:
        return ModelError(f"{self._source}: {key} must be {name}, not {str(value)[:80]!r}")
