"""Part "model" of bench.gpu: the whole model is right on this device.

`reference`: bfloat16 as served against transformers in float32 with the same weights. Right: the logprobs' error is at
most MARGIN times that of transformers' own bfloat16, and a graph's tokens are those of the same step without it.
`exact`: tokens are those of float32 transformers but for near-ties, and the same whatever the depth, the chunks, the
company, with graphs and without; once with torch's attention, once with the kernels'.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from bench.gpu_reference import Judge
from bench.gpu_serve import Emit, Row
from bench.gpu_shapes import SHAPES, write_shape
from bench.plans import Request, make_plans, random_requests
from bench.replay import Replayer, Seen, seen_of, tokens_of
from common.messages import Sampling
from common.model_files.describe import read_model
from executor_svc.build import build_runner, make_device, make_ops
from executor_svc.loader.load import load_model
from executor_svc.models.decoder import Decoder
from executor_svc.numerics import ExactOps, FastOps
from executor_svc.runner import Runner

MARGIN: Final = 1.5
TOPS: Final = 8
MAX_SEQS: Final = 8
BUCKETS: Final = (1, 2, 4, 8)
# A graph for every number of rows: no step is padded.
EVERY: Final = tuple(range(1, MAX_SEQS + 1))


@dataclass(frozen=True)
class Sizes:
    """`reference`: shapes, and their number of layers where not all. Prompts are of these lengths; depths x chunks are
    all tried."""

    reference: tuple[tuple[str, int], ...] = (("l1b", 0), ("l8b", 4))
    exact: str = "exact"
    prompts: tuple[int, ...] = (1, 7, 64, 130, 200, 33, 500, 256)
    output: int = 24
    depths: tuple[int, ...] = (1, 2, 4)
    chunks: tuple[int, ...] = (0, 64, 16)


REHEARSED: Final = Sizes((("tiny", 0),), "tiny", (1, 7, 40), 4, (1, 4), (0, 16))


def run(device: str, sizes: Sizes, place: Path, emit: Emit) -> None:
    for shape, layers in sizes.reference:
        changes = {"num_hidden_layers": layers} if layers else {}
        with torch.inference_mode():
            emit(check_reference(write_shape(shape, place, **changes), SHAPES[shape] | changes, device, sizes))
        if device != "cpu":
            torch.cuda.empty_cache()
    with torch.inference_mode():
        for row in check_exact(write_shape(sizes.exact, place), SHAPES[sizes.exact], device, sizes):
            emit(row)


# --------------------------------------------------------------------------------------------------------------- parts


def check_reference(directory: Path, values: dict[str, Any], device: str, sizes: Sizes) -> Row:
    model, ops = load(directory, "fast", torch.bfloat16, device)
    requests = [r for i, n in enumerate(sizes.prompts) for r in _greedy(1, n, sizes.output, values["vocab_size"], i)]
    told = _seen(build(model, ops, device, BUCKETS), requests)
    # Told with logprobs, where a graph ends at the logits, and without, where it ends at the token.
    plain = [(prompt, replace(wish, num_logprobs=0)) for prompt, wish in requests]
    runner = build(model, ops, device, EVERY)
    whole, replayed = _play(runner, plain, 2, MAX_SEQS, 64), _seen(runner, requests)
    runner = build(model, ops, device, ())
    whole_eager, eager = _play(runner, plain, 2, MAX_SEQS, 64), _seen(runner, requests)
    # No kernel of ours adds in an order that varies, nor does the library on one stream, and `settle` chose the
    # products once for all runners: steps of the same shapes give the same bits. So no tolerance.
    different = _different(replayed, eager) + sum(
        a != b for x, y in zip(whole, whole_eager, strict=True) for a, b in zip(x, y, strict=True)
    )
    early = told
    if ops.has_kernels:
        from executor_svc.kernels.early import launch_early  # only now: a rehearsal needs no triton

        launch_early(True)
        try:
            early = _seen(build(model, ops, device, BUCKETS), requests)
        finally:
            launch_early(False)
    judge = Judge(model, values)
    ids = top_ids(told)
    want = judge.logprobs(requests, tokens(told), ids)
    judge.to_bfloat16()
    library = _rms(judge.logprobs(requests, tokens(told), ids), want)
    own = _rms(torch.tensor([one.top_logprobs for of in told for one in of]), want)
    return {
        "what": "check",
        "name": f"bfloat16 against float32 transformers, {directory.name}, {values['num_hidden_layers']} layers",
        "error_rms": own,
        "library_error_rms": library,
        "tokens": sum(map(len, told)),
        "different_without_graphs": different,
        # Near-ties may: padding changes the products' shapes. Launching early changes nothing but times.
        "different_unpadded": _different(told, eager),
        "different_launched_early": _different(told, early),
        "right": own <= MARGIN * library and different == 0 and _different(told, early) == 0,
    }


def _seen(runner: Runner, requests: Sequence[Request]) -> list[list[Seen]]:
    """Closes the runner."""
    plans = make_plans(runner.info, requests, depth=2, at_once=MAX_SEQS, prefill_chunk=64)
    results = Replayer(runner).replay(plans, depth=2).results
    runner.close()
    return seen_of(plans, results)


def _different(some: Sequence[Sequence[Seen]], others: Sequence[Sequence[Seen]]) -> int:
    return sum(a.token != b.token for x, y in zip(some, others, strict=True) for a, b in zip(x, y, strict=True))


def check_exact(directory: Path, values: dict[str, Any], device: str, sizes: Sizes) -> Iterator[Row]:
    model, ops = load(directory, "exact", torch.float32, device)
    vocab = values["vocab_size"]
    requests: list[Request] = []
    for i, length in enumerate(sizes.prompts):
        seeded = Sampling(seed=1, max_tokens=sizes.output, temperature=0.9, top_k=50, top_p=0.95, ignore_eos=True)
        requests += (
            random_requests(1, length, seeded, vocab, i) if i % 2 else _greedy(1, length, sizes.output, vocab, i)
        )
    greedy = [i for i in range(len(requests)) if i % 2 == 0]
    judge = Judge(model, values)
    for backend, depths, chunks in (
        ("exact", sizes.depths, sizes.chunks),
        ("triton", sizes.depths[-1:], sizes.chunks[-1:]),  # bits hang on the kernels alone: one company shows it
    ):
        graphs = build(model, ops, device, BUCKETS, backend)
        alone = _play(graphs, requests, 1, 1, 0)
        wrong = judge.differences([requests[i] for i in greedy], [alone[i] for i in greedy])
        yield {
            "what": "check", "name": f"float32 ({backend}) against transformers, greedy tokens but for near-ties",
            "tokens": len(greedy) * sizes.output, "different": wrong, "right": wrong == 0,
            "products": ops.products.value if isinstance(ops, ExactOps) else "",
        }  # fmt: skip
        for depth, chunk in itertools.product(depths, chunks):
            got = _play(graphs, requests, depth, MAX_SEQS, chunk)
            name = f"{backend}: {MAX_SEQS} at once, depth {depth}, chunk {chunk or 'none'}"
            yield _same(name, got, alone)
        graphs.close()
        eager = build(model, ops, device, (), backend)
        yield _same(f"{backend}: without graphs", _play(eager, requests, 2, MAX_SEQS, 0), alone)
        eager.close()


def _same(name: str, got: list[list[int]], want: list[list[int]]) -> Row:
    differ = sum(a != b for a, b in zip(got, want, strict=True))
    return {"what": "check", "name": name, "requests": len(want), "different": differ, "right": differ == 0}


def _greedy(count: int, length: int, output: int, vocab: int, seed: int) -> list[Request]:
    wish = Sampling(seed=1, max_tokens=output, temperature=0.0, ignore_eos=True, num_logprobs=TOPS)
    return random_requests(count, length, wish, vocab, seed)


def _play(runner: Runner, requests: Sequence[Request], depth: int, at_once: int, chunk: int) -> list[list[int]]:
    plans = make_plans(runner.info, requests, depth=depth, at_once=at_once, prefill_chunk=chunk)
    return tokens_of(plans, Replayer(runner).replay(plans, depth=depth).results)


def _rms(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).pow(2).mean().sqrt())


def top_ids(seen: Sequence[Sequence[Seen]]) -> list[list[tuple[int, ...]]]:
    return [[one.top_ids for one in own] for own in seen]


def tokens(seen: Sequence[Sequence[Seen]]) -> list[list[int]]:
    return [[one.token for one in own] for own in seen]


def load(directory: Path, numerics: str, dtype: torch.dtype, device: str) -> tuple[Decoder, FastOps | ExactOps]:
    where = make_device(device).torch_device
    ops = make_ops(numerics, where)
    return load_model(read_model(directory, dummy=True), dtype=dtype, device=where, ops=ops, max_positions=1024), ops


def build(
    model: Decoder, ops: FastOps | ExactOps, device: str, buckets: tuple[int, ...], backend: str = "auto"
) -> Runner:
    return build_runner(
        model, ops=ops, device=make_device(device), num_blocks=1024, max_num_seqs=MAX_SEQS, max_tokens_per_step=512,
        max_context=1024, buckets=buckets, attention_backend=backend,
    )  # fmt: skip
