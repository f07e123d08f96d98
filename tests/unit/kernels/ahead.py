"""Compiles for sm_90, with no GPU, what the launchers launch for the shapes that are served; a process of its own,
because in the tests' own the interpreter stands in for the compiler.

Each launcher is called as it is in service; instead of a launch its kernel is compiled with the arguments it got.
Takes which of how many shares of the cases to compile; prints one JSON object: name of the case to a list of what was
compiled.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from executor_svc.attention.triton_paged import EXACT_PART
from executor_svc.buffers import RowState
from executor_svc.cpu_device import CpuDevice
from executor_svc.kernels.activation import silu_mul
from executor_svc.kernels.decode_attention import (
    DecodeSplit,
    DecodeWorkspace,
    decode_attention,
    even_split,
    fixed_split,
)
from executor_svc.kernels.decode_inputs import decode_inputs
from executor_svc.kernels.early import launch_early
from executor_svc.kernels.kv_write import write_kv
from executor_svc.kernels.norm import add_rms_norm, rms_norm
from executor_svc.kernels.prefill_attention import prefill_attention
from executor_svc.kernels.rotary import rotate_and_write
from executor_svc.kernels.sampling import sample_step
from executor_svc.kernels.skinny import SkinnyConfig, candidates_for, skinny_linear
from executor_svc.kv_cache import KvCache, KvShape

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

# What to look for in PTX; the last two move 16 bytes for each thread at once.
INSTRUCTIONS = {
    "wgmma": r"wgmma",
    "mma.sync": r"mma\.sync",
    "cp.async": r"cp\.async",
    "cp.async of 16": r"cp\.async\.\w+\.shared\.global.*, 0x10,",
    "load of 16": r"ld\.global[\w.:]*\.v(4\.(b|u)32|2\.(b|u)64)",
}
_PLACE = re.compile(r"(@!?%p\d+ )?\t?(ld|st)\.global[^\[]*\[ *(%rd\d+ \+ \d+) *\]")
_TOUCHES_MEMORY = re.compile(r"\b(ld|st|atom|red)\.global|cp\.async\.\w+\.shared\.global")

compiled: list[dict[str, Any]] = []


def compile_instead(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
    """Stands in for JITFunction.run. Specialises as it does: on multiples of 16 and on the integer 1."""
    values = dict(zip(self.arg_names, args, strict=False))
    values |= {name: options.pop(name) for name in list(options) if name in self.arg_names}
    signature, constants, hints = {}, {}, {}
    for place, parameter in enumerate(self.params):
        value = values[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            hints[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[parameter.name], constants[parameter.name] = "constexpr", 1
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                hints[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=self, signature=signature, constexprs=constants, attrs=hints)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    compiled.append(
        {
            "kernel": self.__name__,
            "grid": grid,
            "warps": kernel.metadata.num_warps,
            "shared": kernel.metadata.shared,
            "target": next(line for line in kernel.asm["ptx"].splitlines() if line.startswith(".target")),
            "flags": {name: value for name, value in constants.items() if isinstance(value, bool)},
            "early": _early(kernel.asm["ptx"]),
            "sums": _sums(kernel.asm["ttgir"]),
            "in place": _in_place(kernel.asm["ptx"]),
            "instructions": [name for name, pattern in INSTRUCTIONS.items() if re.search(pattern, kernel.asm["ptx"])],
            **_resources(kernel.asm["cubin"]),
        }
    )


def _early(ptx: str) -> str:
    """Whether the kernel waits for the one before it, and does so before it touches memory."""
    wait, touch = ptx.find("griddepcontrol.wait"), _TOUCHES_MEMORY.search(ptx)
    if wait < 0:
        return "no"
    return "late" if touch is not None and touch.start() < wait else "prefetches" if "prefetch" in ptx[:wait] else "yes"


def _sums(ttgir: str) -> list[str]:
    """Products and reductions in their order, each with how its elements lie in the threads."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg.*)$", ttgir, re.MULTILINE))
    types = re.findall(r"(?:tt\.dot [^:]*|^ *\}\)) : (.*?)(?: loc\(.*)?$", ttgir, re.MULTILINE)
    return [re.sub(r"#\w+(?=[,}>])", lambda name: layouts.get(name[0], name[0]), told) for told in types]


def _in_place(ptx: str) -> str:
    """Who reads what is written in place: "itself", the thread that writes it, or "others" too; "": nothing is. A place
    is told by its address register: what is read by another is not found."""
    readers: dict[str, set[str]] = {}
    writers: dict[str, set[str]] = {}
    for condition, way, place in _PLACE.findall(ptx):
        (readers if way == "ld" else writers).setdefault(place, set()).add(condition)
    both = readers.keys() & writers.keys()
    if not both:
        return ""
    return "others" if any(readers[place] != writers[place] for place in both) else "itself"


def _resources(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        )
    fields = dict(field.split(":") for field in told.stdout.split() if field.startswith(("REG:", "STACK:", "LOCAL:")))
    return {"registers": int(fields["REG"]), "stack": int(fields["STACK"]), "local": int(fields["LOCAL"])}


def decode(
    dim: int, split: DecodeSplit, *, dtype: torch.dtype = torch.bfloat16, window: int = 0, is_mixed: bool = False
) -> None:
    """is_mixed: the step has chunks of prompts too, so that the rows that decode are told by an index."""
    heads, kv_heads, batch = 32, 8, 4
    q = torch.empty(batch, heads + 2 * kv_heads, dim, dtype=dtype)[:, :heads]
    cache = torch.empty(2, 9, 16, kv_heads, dim, dtype=dtype)
    decode_attention(
        q, cache[0], cache[1], torch.empty(5, 64, dtype=torch.int32), torch.empty(5, dtype=torch.int64),
        torch.empty(batch, dtype=torch.int64), torch.empty(batch, heads, dim, dtype=dtype),
        scale=dim**-0.5, window=window, split=split,
        workspace=DecodeWorkspace.make(batch, heads, dim, split, q.device),
        index=torch.empty(batch, dtype=torch.int64) if is_mixed else None,
    )  # fmt: skip


def prefill(dim: int, *, dtype: torch.dtype = torch.bfloat16, window: int = 0, split: int = 0) -> None:
    heads, kv_heads = 32, 8
    q = torch.empty(256, heads + 2 * kv_heads, dim, dtype=dtype)[:, :heads]
    cache = torch.empty(2, 9, 16, kv_heads, dim, dtype=dtype)
    prefill_attention(
        q, cache[0], cache[1], torch.empty(5, 64, dtype=torch.int32), torch.empty(4, dtype=torch.int64),
        torch.empty(4, 3, dtype=torch.int64), torch.empty(256, heads, dim, dtype=dtype),
        scale=dim**-0.5, window=window, split_tokens=split,
    )  # fmt: skip


def between_products(dim: int, hidden: int, *, has_norms: bool) -> None:
    x, weight = torch.empty(4, hidden, dtype=torch.bfloat16), torch.empty(hidden, dtype=torch.bfloat16)
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, x, weight, 1e-5)
    silu_mul(torch.empty(4, 8 * hidden, dtype=torch.bfloat16))
    qkv, table = torch.empty(4, 48, dim, dtype=torch.bfloat16), torch.empty(64, 2, dim // 2, dtype=torch.bfloat16)
    tokens, cache = torch.empty(4, dtype=torch.int64), torch.empty(64, 8, dim, dtype=torch.bfloat16)
    norms = (weight[:dim], weight[:dim]) if has_norms else None
    rotate_and_write(qkv, tokens, table, tokens, cache, cache, 48, norms=norms, eps=1e-5)
    write_kv(qkv[:, 32:40], qkv[:, 40:], tokens, cache, cache, 48)


def norms() -> None:
    """Of a model narrower than a program has threads, and of one that fills no power of two."""
    for hidden in (32, 576):
        for dtype in (torch.bfloat16, torch.float32):
            x, weight = torch.empty(4, hidden, dtype=dtype), torch.empty(hidden, dtype=dtype)
            add_rms_norm(x, x.clone(), weight, 1e-5)


def write_exact(dim: int) -> None:
    """What exact numerics launch beside attention."""
    tokens, cache = torch.empty(4, dtype=torch.int64), torch.empty(64, 8, dim)
    k, v = torch.empty(2, 4, 8, dim)
    write_kv(k, v, tokens, cache, cache, 48)


def sampling(batch: int, *, is_full: bool) -> None:
    """A graph's, which finds its slots by the cursor, and those launched one by one: of all rows and of a few, whose
    tokens the caller puts into the ring."""
    device, most = CpuDevice(threads=1), 64
    state = RowState(device, most, 64, 9, 128256)
    device.close()
    if is_full:
        state.output_counts = torch.empty(1, dtype=torch.int32)
        state.in_prompt = state.stops = torch.empty(1, dtype=torch.bool)
        state.bias = torch.empty(1)
    rows = torch.arange(batch)
    logits = torch.empty(batch, 128256, dtype=torch.bfloat16)
    cache = KvCache(KvShape(1, 8, 64, 16, torch.bfloat16), 1, lambda size, dtype: torch.empty(size, dtype=dtype))
    decode_inputs(rows, state, cache)
    decode_inputs(torch.empty(3, most, dtype=torch.int64)[:, :batch], state, cache, torch.empty(1, dtype=torch.int64))
    ring = torch.empty(3, 2, most, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
    for out in (ring, None):
        sample_step(logits, rows, rows, state, is_random=is_full, has_penalties=is_full, out=out)


def early(case: Callable[[], None]) -> Callable[[], None]:
    """The same, launched before the kernel ahead ends."""

    def launched() -> None:
        launch_early(True)
        try:
            case()
        finally:
            launch_early(False)

    return launched


def skinny(num_out: int, inner: int, config: SkinnyConfig) -> None:
    skinny_linear(
        torch.empty(1, inner, dtype=torch.bfloat16), torch.empty(num_out, inner, dtype=torch.bfloat16), config
    )


def products() -> None:
    for config in candidates_for(1):
        skinny(2048, 8192, config)


def decode_early() -> None:
    for is_mixed in (False, True):
        decode(64, even_split(1, 8, 4096), is_mixed=is_mixed)


def decode_cases() -> dict[str, Callable[[], None]]:
    exact = {"split": fixed_split(4096, EXACT_PART), "dtype": torch.float32}
    kinds: dict[str, dict[str, Any]] = {
        "l1b": {"dim": 64, "split": even_split(1, 8, 4096)},
        "l8b": {"dim": 128, "split": even_split(1, 8, 4096)},
        "one part": {"dim": 128, "split": DecodeSplit(1)},
        "window": {"dim": 128, "split": DecodeSplit(2), "window": 1024},
        "exact": {"dim": 128, **exact},
        "exact, window": {"dim": 128, "window": 1024, **exact},
    }
    cases: dict[str, Callable[[], None]] = {}
    for kind, told in kinds.items():
        cases[f"decode, {kind}"] = partial(decode, **told)
        cases[f"decode, {kind}, mixed"] = partial(decode, **told, is_mixed=True)
    return cases


CASES: dict[str, Callable[[], None]] = {
    **decode_cases(),
    "prefill, l1b": lambda: prefill(64),
    "prefill, l8b": lambda: prefill(128),
    "prefill, window": lambda: prefill(128, window=1024),
    "prefill, float32": lambda: prefill(128, dtype=torch.float32),
    "prefill, exact": lambda: prefill(128, dtype=torch.float32, split=EXACT_PART),
    "prefill, exact, window": lambda: prefill(128, dtype=torch.float32, split=EXACT_PART, window=1024),
    "write, exact": lambda: write_exact(128),
    "between products, l1b": lambda: between_products(64, 2048, has_norms=False),
    "between products, l8b": lambda: between_products(128, 4096, has_norms=True),
    "norms in place": norms,
    "sampling, greedy": lambda: sampling(1, is_full=False),
    "sampling, full": lambda: sampling(64, is_full=True),
    **{f"skinny, {c}": lambda c=c: skinny(2048, 8192, c) for c in candidates_for(1)},  # type: ignore[misc]
    "early, attention": early(decode_early),
    "early, between products": early(lambda: between_products(64, 2048, has_norms=False)),
    "early, sampling": early(lambda: sampling(64, is_full=True)),
    "early, products": early(products),
}


def main() -> None:
    assert not os.environ.get("TRITON_INTERPRET")
    JITFunction.run = compile_instead
    share, shares = map(int, sys.argv[1:])
    told = {}
    for name, case in list(CASES.items())[share::shares]:
        compiled.clear()
        case()
        told[name] = list(compiled)
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
