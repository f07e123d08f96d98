"""Capturing a CUDA graph."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: object = None) -> Iterator[None]:
    """What is launched on the current stream, which is not the default one, goes into `graph`.

    `pool`: its memory; None: of its own. Other threads may use CUDA meanwhile: only what this one does must be fit for
    a graph. Nothing is collected meanwhile: the end of another graph breaks a capture (pytorch pull request 161037),
    and runners of the past, which hold themselves, leave theirs to the collector.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
        try:
            yield
        except BaseException:
            # A capture that something broke fails again at its end, and only says that it was broken before.
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    finally:
        if is_on:
            gc.enable()
