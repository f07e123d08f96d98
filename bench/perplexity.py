"""What each precision costs in quality: perplexity of a model on a text that ships with Python.

    python -m bench.perplexity                        all precisions, 24 windows of 512 tokens
    python -m bench.perplexity --windows 4 --json     last line is one object: conditions, results

The text is `pydoc_data.topics`, the language reference as Python's help() shows it. Windows do not overlap, and the
first 64 tokens of each are context alone. The reference is torch in float32, weights as the file has them. For each
precision: perplexity, its ratio to the reference, the mean Kullback-Leibler divergence from the reference's
distribution, and how often both find another token most likely.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from typing import Final

import torch

from bench.serving import commit
from common.model_files.catalog import resolve
from common.model_files.description import ModelFiles
from executor_svc.attention.layout import AttentionBackend, AttentionShape, PrefillPart, RowTables, StepLayout
from executor_svc.attention.torch_paged import TorchPagedAttention
from executor_svc.build import make_ops
from executor_svc.kernels_cpu.decoder import NativeAttention
from executor_svc.kernels_cpu.library import load_library
from executor_svc.kernels_cpu.load import load_native
from executor_svc.kernels_cpu.packing import Format
from executor_svc.kv_cache import KvCache, KvShape
from executor_svc.loader.load import load_model, model_config
from executor_svc.step_model import Model

WINDOW: Final = 512
CONTEXT: Final = 64
BLOCK_SIZE: Final = 16
FORMATS: Final = {"auto": None, "dense": Format.DENSE, "int8": Format.INT8, "int4": Format.INT4}
CPU: Final = torch.device("cpu")

# Log-probabilities of every position of a window, float32 [WINDOW, vocab].
Score = Callable[[torch.Tensor], torch.Tensor]


def scorer(model: Model, backend: AttentionBackend, *, chunk: int = WINDOW) -> Score:
    """Windows through the paged path, `chunk` tokens in a step."""
    config = model.config
    shape = KvShape(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, model.dtype)
    cache = KvCache(shape, WINDOW // BLOCK_SIZE, lambda size, dtype: torch.zeros(size, dtype=dtype))
    tables = RowTables(torch.arange(WINDOW // BLOCK_SIZE, dtype=torch.int32)[None], torch.tensor([WINDOW]), BLOCK_SIZE)

    def score(ids: torch.Tensor) -> torch.Tensor:
        pieces = []
        for start in range(0, WINDOW, chunk):
            positions = torch.arange(start, start + chunk)
            part = PrefillPart(0, chunk, start, torch.tensor([0]))
            attend = backend.begin(cache, StepLayout(positions, tables, None, (part,), None))
            hidden = model.forward(ids[start : start + chunk], positions, attend)
            pieces.append(model.logits(hidden).log_softmax(-1))
        return torch.cat(pieces)

    return score


def scorers(files: ModelFiles, threads: int) -> dict[str, Score]:
    """The reference first."""
    ops, config = make_ops("fast"), model_config(files)
    shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, config.windows)
    reference = load_model(files, dtype=torch.float32, device=CPU, ops=ops)
    made = {"float32": scorer(reference, TorchPagedAttention(shape))}
    for name, wanted in FORMATS.items():
        model = load_native(files, config, load_library(), wanted=wanted, threads=threads)
        made[name] = scorer(model, NativeAttention())
        if name == "auto":  # few rows take another way through the kernels
            for chunk in (16, 4):
                model = load_native(files, config, load_library(), wanted=wanted, threads=threads)
                made[f"auto, {chunk} rows"] = scorer(model, NativeAttention(), chunk=chunk)
    return made


def text_windows(files: ModelFiles, count: int) -> torch.Tensor:
    """int64 [count, WINDOW], spread over the whole text."""
    from pydoc_data.topics import topics

    from scheduler_svc.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(files)
    assert tokenizer is not None
    ids = torch.tensor(tokenizer.encode("\n\n".join(topics.values())))
    whole = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    return whole[torch.linspace(0, len(whole) - 1, count).long()]


def compare(scores: dict[str, Score], windows: torch.Tensor) -> dict[str, dict[str, float]]:
    totals = {name: {"nll": 0.0, "kl": 0.0, "other": 0.0} for name in scores}
    count = 0
    with torch.inference_mode():
        for ids in windows:
            seen = slice(CONTEXT, WINDOW - 1)
            targets = ids[CONTEXT + 1 :]
            count += len(targets)
            reference: torch.Tensor | None = None
            for name, score in scores.items():
                logprobs = score(ids)[seen]
                reference = logprobs if reference is None else reference
                own = totals[name]
                own["nll"] -= float(logprobs.gather(1, targets[:, None]).double().sum())
                own["kl"] += float((reference.exp() * (reference - logprobs)).sum(-1).double().sum())
                own["other"] += float((reference.argmax(-1) != logprobs.argmax(-1)).sum())
    base = math.exp(totals["float32"]["nll"] / count)
    return {
        name: {
            "perplexity": round(math.exp(own["nll"] / count), 4),
            "ratio": round(math.exp(own["nll"] / count) / base, 5),
            "kl": round(own["kl"] / count, 6),
            "other_token": round(own["other"] / count, 5),
        }
        for name, own in totals.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="as of `stepwire up`; none: the default model")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    files = resolve(args.model, lambda what, done, total: None)
    results = compare(scorers(files, args.threads), text_windows(files, args.windows))
    conditions = {
        "model": files.description.id,
        "text": f"pydoc_data.topics of Python {sys.version.split()[0]}",
        "windows": args.windows,
        "window": WINDOW,
        "context_only": CONTEXT,
        "torch": torch.__version__,
        "commit": commit(),
    }
    if args.json:
        print(json.dumps({"conditions": conditions, "results": results}))
    else:
        for name, own in results.items():
            print(f"{name:<16} {own}")
        print(json.dumps(conditions))
    return 0


if __name__ == "__main__":
    sys.exit(main())
