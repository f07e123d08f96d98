"""Decode steps of few fixed shapes, captured once and replayed.

A shape is a bucket of rows and a bucket of context. A step is padded up to both; padding rows are -1 in `idx` and
write nowhere. A step that no shape holds runs the same function eagerly, unpadded. On a device without graphs a
replay is a call with the static, padded buffers, so that buckets and padding are the same everywhere.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class GraphShape:
    """rows: of the batch; context: tokens a row may attend to; with_sampling: up to the chosen token, else logits."""

    rows: int
    context: int
    with_sampling: bool


Body = Callable[[torch.Tensor, GraphShape], tuple[torch.Tensor, ...]]


class Graph(Protocol):
    """One captured shape. Used by the COMPUTE stream alone, like its buffers."""

    def replay(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """rows: int64 [n], n up to the shape's. Returns the body's outputs, valid until the next replay."""
        ...


class PlainGraph:
    """Where there is nothing to capture: the static buffers are real, the body is called."""

    def __init__(self, shape: GraphShape, body: Body, device: torch.device) -> None:
        self._shape = shape
        self._body = body
        self._idx = torch.full((shape.rows,), -1, dtype=torch.int64, device=device)

    def replay(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fill_idx(self._idx, rows)
        return self._body(self._idx, self._shape)


class CudaGraph:
    """Captured on the current stream, which must be the one that replays."""

    _WARM_UPS = 2

    def __init__(self, shape: GraphShape, body: Body, device: torch.device, pool: object) -> None:
        self._idx = torch.full((shape.rows,), -1, dtype=torch.int64, device=device)
        # Kernels choose themselves and allocate on their first runs; all rows are padding meanwhile.
        for _ in range(self._WARM_UPS):
            body(self._idx, shape)
        torch.cuda.current_stream(device).synchronize()
        torch.cuda.empty_cache()  # what the warm-ups took is not the graphs' pool's, and nobody else's while captured
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA meanwhile: only what this one does must be fit for a graph.
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
        try:
            self._outputs = body(self._idx, shape)
        finally:
            self._graph.capture_end()

    def replay(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fill_idx(self._idx, rows)
        self._graph.replay()
        return self._outputs


def fill_idx(idx: torch.Tensor, rows: torch.Tensor) -> None:
    """Rows at the head, -1 behind."""
    count = rows.shape[0]
    idx[:count].copy_(rows)
    idx[count:].fill_(-1)


class GraphCache:
    """All shapes, captured at start by `capture_all`; `find` is a lookup."""

    def __init__(self, row_buckets: Sequence[int], context_buckets: Sequence[int]) -> None:
        """Both ascending; empty row_buckets: no graphs."""
        self.row_buckets = tuple(row_buckets)
        self._context_buckets = tuple(context_buckets)
        self._graphs: dict[GraphShape, Graph] = {}

    def capture_all(self, body: Body, device: torch.device, progress: Callable[[int, int], None]) -> None:
        """Largest first, so that the smaller reuse its memory. Runs on the COMPUTE stream."""
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        shapes = [
            GraphShape(rows, context, sampling)
            for rows in reversed(self.row_buckets)
            for context in reversed(self._context_buckets)
            for sampling in (True, False)
        ]
        for number, shape in enumerate(shapes):
            if device.type == "cuda":
                self._graphs[shape] = CudaGraph(shape, body, device, pool)
            else:
                self._graphs[shape] = PlainGraph(shape, body, device)
            progress(number + 1, len(shapes))

    def find(self, num_rows: int, context: int, *, with_sampling: bool) -> tuple[GraphShape, Graph] | None:
        """The smallest shape that holds the step; None: run it eagerly."""
        rows = bucket_for(self.row_buckets, num_rows)
        width = bucket_for(self._context_buckets, context)
        if rows is None or width is None:
            return None
        shape = GraphShape(rows, width, with_sampling)
        graph = self._graphs.get(shape)
        return None if graph is None else (shape, graph)


def bucket_for(buckets: Sequence[int], size: int) -> int | None:
    """The smallest bucket that holds `size`; None where none does, or size is 0."""
    if size < 1:
        return None
    at = bisect_left(buckets, size)
    return buckets[at] if at < len(buckets) else None


def context_buckets(max_context: int, *, smallest: int = 256, factor: int = 4) -> tuple[int, ...]:
    """smallest, smallest * factor, ... up to max_context."""
    buckets = []
    size = smallest
    while size < max_context:
        buckets.append(size)
        size *= factor
    return (*buckets, max_context)
