"""Decode steps of few fixed shapes, captured once and replayed.

A shape is a bucket of rows, a bucket of context and how far the graph goes. A step is padded up to both; padding rows
are -1 in the batch and write nowhere. A graph reads its batch from the staging ring and writes tokens into the output
ring, at the place a cursor on the device names, so that a replay is all there is to launch. A step that no shape holds
runs the same functions eagerly, unpadded. On a device without graphs a replay is a call of the body on the same rings,
so that buckets and padding are the same everywhere.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from executor_svc.capturing import capturing


class Variant(Enum):
    """How far a graph goes."""

    GREEDY = "to the most likely token"
    FULL = "to a token chosen by any row's own parameters"
    FORWARD = "to the logits, which others read"


@dataclass(frozen=True, slots=True)
class GraphShape:
    """rows: of the batch; context: tokens a row may attend to."""

    rows: int
    context: int
    variant: Variant


# Computes a step of the shape; where its batch and its output lie, it finds by itself. Returns what is read after a
# replay; everything else a graph makes lies in memory that other graphs use too.
Body = Callable[[GraphShape], tuple[torch.Tensor, ...]]


class Graph(Protocol):
    """One captured shape. Used by the COMPUTE stream alone."""

    def replay(self) -> tuple[torch.Tensor, ...]:
        """Returns what the body returned, valid until the next replay of this graph."""
        ...


class PlainGraph:
    """Where there is nothing to capture: the body is called."""

    def __init__(self, shape: GraphShape, body: Body) -> None:
        self._shape = shape
        self._body = body

    def replay(self) -> tuple[torch.Tensor, ...]:
        return self._body(self._shape)


class CudaGraph:
    """Captured on the current stream, which must be the one that replays. All rows are padding meanwhile."""

    def __init__(self, shape: GraphShape, body: Body, device: torch.device, pool: object) -> None:
        # Kernels are compiled and chosen, and what they keep is allocated, on their first run.
        body(shape)
        torch.cuda.current_stream(device).synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph, pool):
            self._outputs = body(shape)
        # The driver may take some of a graph's memory at its first replay: now, while what graphs take is measured.
        self._graph.replay()

    def replay(self) -> tuple[torch.Tensor, ...]:
        self._graph.replay()
        return self._outputs


class GraphCache:
    """All shapes, captured at start by `capture`; `find` is a lookup."""

    def __init__(self, row_buckets: Sequence[int], context_buckets: Sequence[int]) -> None:
        """Both ascending; empty row_buckets: no graphs."""
        self.row_buckets = tuple(row_buckets)
        self._context_buckets = tuple(context_buckets)
        self._graphs: dict[GraphShape, Graph] = {}
        self._pool: object = None  # memory of all graphs, from the first on

    def capture(
        self,
        row_buckets: Sequence[int],
        body: Body,
        device: torch.device,
        variants: Sequence[Variant],
        progress: Callable[[GraphShape, int, int], None],
    ) -> None:
        """The shapes of these buckets, descending: the smaller reuse the largest's memory. Runs on the COMPUTE stream.

        progress: a shape that is captured, how many are by then, and of how many.
        """
        if device.type == "cuda" and self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        shapes = [
            GraphShape(rows, context, variant)
            for rows in row_buckets
            for context in reversed(self._context_buckets)
            for variant in variants
        ]
        for number, shape in enumerate(shapes):
            if device.type == "cuda":
                self._graphs[shape] = CudaGraph(shape, body, device, self._pool)
            else:
                self._graphs[shape] = PlainGraph(shape, body)
            progress(shape, number + 1, len(shapes))

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def find(self, num_rows: int, context: int, variant: Variant) -> tuple[GraphShape, Graph] | None:
        """The smallest shape that holds the step; None: run it eagerly."""
        rows = bucket_for(self.row_buckets, num_rows)
        width = bucket_for(self._context_buckets, context)
        if rows is None or width is None:
            return None
        shape = GraphShape(rows, width, variant)
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
