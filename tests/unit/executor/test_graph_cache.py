"""Buckets: which one holds a step, what reaches the static buffers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.build import default_buckets
from executor_svc.graph_cache import GraphCache, GraphShape, bucket_for, context_buckets


@given(st.lists(st.integers(1, 100), min_size=1, unique=True).map(sorted), st.integers(0, 120))
def test_the_smallest_bucket_that_holds(buckets: list[int], size: int) -> None:
    found = bucket_for(buckets, size)
    holding = [bucket for bucket in buckets if bucket >= size]
    assert found == (min(holding) if holding and size else None)


@pytest.mark.parametrize("most", [1, 3, 8, 64, 100, 256, 500])
def test_default_buckets_end_at_the_largest_batch(most: int) -> None:
    buckets = default_buckets(most)
    assert buckets[-1] == most and buckets[0] == 1
    assert list(buckets) == sorted(set(buckets))


def test_context_buckets_end_at_the_context() -> None:
    assert context_buckets(8192) == (256, 1024, 4096, 8192)
    assert context_buckets(100) == (100,)


def test_replay_sees_the_rows_and_padding_behind_them() -> None:
    seen: list[tuple[list[int], GraphShape]] = []

    def body(idx: torch.Tensor, shape: GraphShape) -> tuple[torch.Tensor, ...]:
        seen.append((idx.tolist(), shape))
        return (idx * 2,)

    cache = GraphCache((2, 4), (16, 64))
    told: list[tuple[int, int]] = []
    cache.capture_all(body, torch.device("cpu"), lambda done, total: told.append((done, total)))
    assert told[-1] == (8, 8) and len(told) == 8
    assert not seen, "there is nothing to capture here"
    found = cache.find(3, 20, with_sampling=True)
    assert found is not None
    shape, graph = found
    assert shape == GraphShape(4, 64, True)
    graph.replay(torch.tensor([5, 1, 9]))
    (outputs,) = graph.replay(torch.tensor([8, 7]))
    assert [idx for idx, _ in seen] == [[5, 1, 9, -1], [8, 7, -1, -1]]
    assert outputs[:2].tolist() == [16, 14]


def test_what_no_shape_holds_is_not_found() -> None:
    cache = GraphCache((2, 4), (16, 64))
    assert cache.find(2, 8, with_sampling=True) is None, "nothing is captured yet"
    cache.capture_all(lambda idx, shape: (idx,), torch.device("cpu"), lambda done, total: None)
    assert cache.find(2, 8, with_sampling=False) is not None
    assert cache.find(5, 8, with_sampling=True) is None
    assert cache.find(2, 65, with_sampling=True) is None
    assert GraphCache((), (16,)).find(1, 1, with_sampling=True) is None
