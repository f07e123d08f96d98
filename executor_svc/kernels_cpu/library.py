"""The C interface of step.cpp, found or built, and loaded. Structures mirror its own, field by field."""

import ctypes
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import ClassVar, Final

from common.errors import ModelError
from common.model_files.cache import exclusive
from executor_svc.kernels_cpu.compile import (
    DamagedKernels,
    NoKernels,
    build,
    built_before,
    cache_folders,
    check_able,
    find_compiler,
    is_whole,
    own_level,
)

log = logging.getLogger(__name__)

# What `stepwire_ready` answers, from 1 on: what the code was built for.
_INSTRUCTIONS: Final = ("AVX2", "AVX-512", "AVX-512 and tile registers")
# What `stepwire_spent` tells apart, in its order.
PARTS: Final = ("products", "attention", "norms", "head")


class CMatrix(Structure):
    _fields_: ClassVar = [
        ("data", c_void_p), ("bias", c_void_p), ("format", c_int32), ("columns", c_int32), ("depth", c_int32),
        ("reserved", c_int32),
    ]  # fmt: skip


class CLayer(Structure):
    _fields_: ClassVar = [
        ("qkv", CMatrix), ("output", CMatrix), ("gate_up", CMatrix), ("down", CMatrix), ("input_norm", c_void_p),
        ("post_norm", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p), ("keys", c_void_p), ("values", c_void_p),
        ("window", c_int32), ("reserved", c_int32),
    ]  # fmt: skip


class CShape(Structure):
    _fields_: ClassVar = [
        ("num_layers", c_int32), ("hidden", c_int32), ("heads", c_int32), ("kv_heads", c_int32),
        ("head_dim", c_int32), ("intermediate", c_int32), ("vocab", c_int32), ("block_size", c_int32),
        ("null_block", c_int64), ("eps", c_float), ("scale", c_float),
    ]  # fmt: skip


class CModel(Structure):
    _fields_: ClassVar = [
        ("shape", CShape), ("layers", POINTER(CLayer)), ("head", CMatrix), ("final_norm", c_void_p),
        ("rotary", c_void_p), ("embedding", c_void_p),
    ]  # fmt: skip


class CChunk(Structure):
    _fields_: ClassVar = [
        ("row", c_void_p), ("first", c_int64), ("count", c_int64), ("start", c_int64),
    ]  # fmt: skip


class CStep(Structure):
    _fields_: ClassVar = [
        ("token_ids", c_void_p), ("positions", c_void_p), ("slots", c_void_p), ("block_tables", c_void_p),
        ("lengths", c_void_p), ("decode_rows", c_void_p), ("decode_index", c_void_p), ("chunks", POINTER(CChunk)),
        ("num_tokens", c_int64), ("num_decodes", c_int64), ("table_size", c_int64), ("num_chunks", c_int64),
        ("out", c_void_p),
    ]  # fmt: skip


class CRows(Structure):
    _fields_: ClassVar = [
        ("lengths", c_void_p), ("last_token", c_void_p), ("dead", c_void_p), ("block_tables", c_void_p),
        ("table_size", c_int64), ("pad_row", c_int64), ("sink_block", c_int64),
    ]  # fmt: skip


class CBatch(Structure):
    _fields_: ClassVar = [
        ("rows", c_void_p), ("token_at", c_void_p), ("token_ids", c_void_p), ("positions", c_void_p),
        ("last_at", c_void_p), ("sampling", c_void_p), ("decode_tokens", c_void_p), ("decode_at", c_void_p),
        ("chunks", c_void_p), ("num_rows", c_int64), ("num_tokens", c_int64), ("num_decodes", c_int64),
        ("num_chunks", c_int64), ("num_sampling", c_int64), ("tokens", c_void_p), ("status", c_void_p),
    ]  # fmt: skip


class Library:
    """The loaded kernels. Calls release the GIL."""

    def __init__(self, path: Path) -> None:
        """Raises NoKernels; DamagedKernels where another library in its place may do."""
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise DamagedKernels(f"the kernels can not be loaded: {error}") from error
        library.stepwire_create.restype = c_void_p
        library.stepwire_create.argtypes = [POINTER(CModel), c_int, POINTER(c_int)]
        library.stepwire_destroy.restype = None
        library.stepwire_destroy.argtypes = [c_void_p]
        library.stepwire_forward.argtypes = [c_void_p, POINTER(CStep)]
        library.stepwire_run.argtypes = [c_void_p, POINTER(CRows), POINTER(CBatch)]
        library.stepwire_logits.argtypes = [c_void_p, c_void_p, c_int, c_void_p]
        library.stepwire_greedy.argtypes = [c_void_p, c_void_p, c_int, c_void_p, c_void_p]
        library.stepwire_ticks.restype = c_uint64
        library.stepwire_spent.restype = None
        library.stepwire_spent.argtypes = [c_void_p, POINTER(c_uint64)]
        kind = library.stepwire_ready()
        if not kind:
            raise NoKernels("the operating system does not give the processor's tile registers")
        self.path = path
        self.instructions = _INSTRUCTIONS[kind - 1]
        self._library = library

    def create(self, model: CModel, threads: int, cpus: Sequence[int] = ()) -> int:
        """cpus: one for each thread, or none; see NativeDecoder. Raises MemoryError."""
        own = (c_int * threads)(*cpus) if cpus else None
        handle = self._library.stepwire_create(ctypes.byref(model), threads, own)
        if not handle:
            raise MemoryError(f"the CPU kernels could not have their buffers or {threads} threads")
        return int(handle)

    def destroy(self, handle: int) -> None:
        self._library.stepwire_destroy(handle)

    def forward(self, handle: int, step: CStep) -> None:
        if self._library.stepwire_forward(handle, ctypes.byref(step)):
            raise MemoryError("the CPU kernels could not allocate their buffers")

    def run(self, handle: int, rows: CRows, batch: CBatch) -> None:
        if self._library.stepwire_run(handle, ctypes.byref(rows), ctypes.byref(batch)):
            raise MemoryError("the CPU kernels could not allocate their buffers")

    def logits(self, handle: int, hidden: int, rows: int, out: int) -> None:
        if self._library.stepwire_logits(handle, hidden, rows, out):
            raise MemoryError("the CPU kernels could not allocate their buffers")

    def greedy(self, handle: int, hidden: int, rows: int, tokens: int, is_finite: int) -> None:
        if self._library.stepwire_greedy(handle, hidden, rows, tokens, is_finite):
            raise MemoryError("the CPU kernels could not allocate their buffers")

    def ticks(self) -> int:
        """The time stamp counter now."""
        return int(self._library.stepwire_ticks())

    def spent(self, handle: int) -> dict[str, int]:
        """Ticks of the time stamp counter by part since the last call, of the calling thread's share."""
        values = (c_uint64 * len(PARTS))()
        self._library.stepwire_spent(handle, values)
        return dict(zip(PARTS, values, strict=True))


def find_library() -> Library | None:
    """What was built before and loads here; None: nothing, but it can be built. Builds nothing. Raises NoKernels."""
    for path in built_before():
        try:
            return Library(path)
        except DamagedKernels as error:
            # Whole, but of another system (a home directory that several share), or where nothing may be executed.
            log.warning("%s", error)
    check_able()
    return None


def build_library() -> Library:
    """Builds it into the first cache from which it loads. Raises NoKernels."""
    check_able()
    level, compiler, refusals = own_level(), find_compiler(), []
    for folder in cache_folders():
        path = folder / level.file_name()
        try:
            # A lock of their own: whoever fetches a model holds the cache's for as long as that takes.
            with exclusive(folder) as work:
                with suppress(DamagedKernels):
                    if is_whole(path):  # whoever held the lock built it
                        return Library(path)
                if os.statvfs(work).f_flag & os.ST_NOEXEC:
                    raise DamagedKernels(f"{folder} is mounted noexec")
                log.info("building the CPU kernels (%s) with %s into %s", level.name, compiler, folder)
                build(compiler, level, work / path.name)
                (work / path.name).replace(path)
                return Library(path)
        except (OSError, ModelError, DamagedKernels) as error:
            refusals.append(str(error))
    raise NoKernels(f"no cache can hold the kernels: {'; '.join(refusals)}")


def load_library() -> Library:
    """The kernels of this machine, built at first use. Raises NoKernels."""
    return find_library() or build_library()
