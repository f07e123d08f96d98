"""Buckets: which one holds a step, which graphs there are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.build import default_buckets
from executor_svc.graph_cache import GraphCache, GraphShape, Variant, bucket_for, context_buckets
from executor_svc.warm_up import largest_chunks


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


def test_default_buckets_of_the_largest_batches() -> None:
    buckets = default_buckets(512)
    assert buckets[:5] == (1, 2, 4, 8, 16) and buckets[-3:] == (480, 496, 512)
    assert set(range(8, 257, 8)) <= set(buckets) and len(buckets) == 3 + 32 + 16


def test_context_buckets_end_at_the_context() -> None:
    assert context_buckets(8192) == (256, 1024, 4096, 8192)
    assert context_buckets(100) == (100,)


def test_each_shape_is_made_and_found() -> None:
    seen: list[GraphShape] = []

    def body(shape: GraphShape) -> tuple[torch.Tensor, ...]:
        seen.append(shape)
        return (torch.tensor(shape.rows),)

    cache = GraphCache((2, 4), (16, 64))
    told: list[tuple[GraphShape, int, int]] = []
    variants = (Variant.GREEDY, Variant.FORWARD)
    cache.capture((4, 2), body, torch.device("cpu"), variants, lambda *one: told.append(one))
    assert told[-1] == (GraphShape(2, 16, Variant.FORWARD), 8, 8) and len(told) == cache.num_graphs == 8
    assert not seen, "there is nothing to capture here"
    found = cache.find(3, 20, Variant.FORWARD)
    assert found is not None
    shape, graph = found
    assert shape == GraphShape(4, 64, Variant.FORWARD)
    assert graph.replay()[0] == 4
    assert seen == [shape]


def test_what_no_shape_holds_is_not_found() -> None:
    cache = GraphCache((2, 4), (16, 64))
    assert cache.find(2, 8, Variant.GREEDY) is None, "nothing is captured yet"
    cache.capture((4, 2), lambda shape: (), torch.device("cpu"), [Variant.GREEDY], lambda *told: None)
    assert cache.find(2, 8, Variant.GREEDY) is not None
    assert cache.find(2, 8, Variant.FULL) is None
    assert cache.find(5, 8, Variant.GREEDY) is None
    assert cache.find(2, 65, Variant.GREEDY) is None
    assert GraphCache((), (16,)).find(1, 1, Variant.GREEDY) is None


@given(st.integers(1, 64), st.integers(1, 4096), st.integers(1, 1024))
def test_the_largest_step_is_warmed_up(num_rows: int, max_tokens: int, context: int) -> None:
    chunks = largest_chunks(num_rows, max_tokens, context)
    assert all(1 <= chunk <= context for chunk in chunks) and 1 <= len(chunks) <= max(1, num_rows - 1)
    total = sum(chunks) + num_rows - len(chunks)
    chunked = max(1, num_rows - 1)
    assert total == max(num_rows, min(max_tokens, chunked * context + num_rows - chunked))
