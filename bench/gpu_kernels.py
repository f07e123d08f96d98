"""Part "kernels" of bench.gpu: each kernel against torch in float32, then its speed beside torch's and the bound."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from bench.gpu_attention import decode, prefill
from bench.gpu_layers import layers
from bench.gpu_report import Part, Row, Shape, Sizes, error_of, make_row, random_bf16
from bench.gpu_shapes import VECTOR_GOAL_TB_PER_S
from bench.gpu_step import inputs, writes
from bench.gpu_timing import Bounds, measure_bounds, time_us
from executor_svc.buffers import RowState
from executor_svc.build import make_device
from executor_svc.kernels.activation import silu_mul
from executor_svc.kernels.norm import add_rms_norm
from executor_svc.kernels.rotary import rotate_and_write
from executor_svc.kernels.sampling import sample_step
from executor_svc.kernels.skinny import candidates_for, config_for, skinny_linear
from executor_svc.models.rope import rotate
from executor_svc.rows import RowNeeds
from executor_svc.sampler import SamplePlan, sample

MASKED = RowNeeds.BIAS | RowNeeds.MIN_TOKENS

SIZES = Sizes(
    shapes=(
        Shape("l1b", 32, 8, 64, 2048, 8192, 128256),
        Shape("l8b", 32, 8, 128, 4096, 14336, 128256),
    ),
    decode=((1, 384), (1, 8192), (8, 32768), (64, 768), (256, 640)),
    fixed=((1, 8192), (64, 768)),
    prefill=((1, 2048, 0), (4, 512, 0), (1, 512, 4096), (1, 16, 32768)),
    tokens=(1, 64, 256, 2048),
    rows=(1, 4, 16),
)


def run(device: torch.device, sizes: Sizes = SIZES, emit: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Prints and emits as it goes; returns the same as rows."""
    bounds = measure_bounds(device)
    print(f"bounds: copy {bounds.bytes_per_s / 1e12:.2f} TB/s, bf16 product {bounds.flops_per_s / 1e12:.0f} TFLOP/s")
    rows = [{"kernel": "bounds", "bytes_per_s": bounds.bytes_per_s, "flops_per_s": bounds.flops_per_s}]
    emit(rows[0])
    for shape in sizes.shapes:
        for part in PARTS:
            with torch.inference_mode():
                for row in part(shape, sizes, bounds, device):
                    rows.append(row)
                    emit(row)
                    print("  ".join(f"{name}={_short(value)}" for name, value in row.items()), flush=True)
            if device.type == "cuda":  # each timing's graph had memory of its own
                torch.cuda.empty_cache()
    return rows


# One size of everything, for a rehearsal without a device.
REHEARSED = Sizes(
    shapes=(Shape("tiny", 2, 1, 16, 32, 48, 64),),
    decode=((2, 40),),
    fixed=((2, 40),),
    prefill=((2, 8, 16),),
    tokens=(2,),
    rows=(1, 2),
    spread_bytes=1,
)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _between_products(shape: Shape, sizes: Sizes, bounds: Bounds, device: torch.device) -> Iterator[Row]:
    weight = random_bf16(shape.hidden, device=device)
    all_heads = shape.heads + 2 * shape.kv_heads
    table = torch.randn(4096, 2, shape.dim // 2, device=device).to(torch.bfloat16)
    for tokens in sizes.tokens:
        x, residual = (random_bf16(tokens, shape.hidden, device=device) for _ in range(2))
        want = F.rms_norm((x + residual).float(), (shape.hidden,), weight.float(), 1e-5)
        error = error_of(add_rms_norm(x, residual.clone(), weight, 1e-5), want)
        us = time_us([lambda x=x, r=residual: add_rms_norm(x, r, weight, 1e-5)])  # type: ignore[misc]
        torch_us = time_us([lambda x=x, r=residual: F.rms_norm(r + x, weight.shape, weight, 1e-5)])  # type: ignore[misc]
        moved = 4 * x.numel() * 2
        yield make_row("norm and residual", shape, f"{tokens}", us, torch_us, error, moved / bounds.bytes_per_s * 1e6)

        gate_up = random_bf16(tokens, 2 * shape.intermediate, device=device)
        halves = gate_up.chunk(2, -1)
        gate, up = (half.float() for half in halves)
        error = error_of(silu_mul(gate_up), F.silu(gate) * up)
        us = time_us([lambda g=gate_up: silu_mul(g)])  # type: ignore[misc]
        torch_us = time_us([lambda a=halves: F.silu(a[0]).mul_(a[1])])  # type: ignore[misc]
        moved = 3 * tokens * shape.intermediate * 2
        yield make_row("gate", shape, f"{tokens}", us, torch_us, error, moved / bounds.bytes_per_s * 1e6)

        qkv = random_bf16(tokens, all_heads, shape.dim, device=device)
        positions = torch.arange(tokens, device=device) % 4096
        keys, values = (random_bf16(tokens + 16, shape.kv_heads, shape.dim, device=device) for _ in range(2))

        def fused(qkv: torch.Tensor = qkv, positions: torch.Tensor = positions, keys: torch.Tensor = keys,
                  values: torch.Tensor = values, tokens: int = tokens) -> torch.Tensor:  # fmt: skip
            return rotate_and_write(qkv, positions, table, positions, keys, values, tokens)

        def plain(qkv: torch.Tensor = qkv, positions: torch.Tensor = positions, keys: torch.Tensor = keys,
                  values: torch.Tensor = values) -> torch.Tensor:  # fmt: skip
            turns = table.index_select(0, positions)
            rotated = rotate(qkv[:, : shape.heads + shape.kv_heads], turns[:, :1], turns[:, 1:])
            keys.index_copy_(0, positions, rotated[:, shape.heads :])
            values.index_copy_(0, positions, qkv[:, shape.heads + shape.kv_heads :])
            return rotated[:, : shape.heads]

        q = fused()
        got = torch.cat((q, keys[:tokens]), 1)
        turns = table.float().index_select(0, positions)
        error = error_of(got, rotate(qkv.float()[:, : shape.heads + shape.kv_heads], turns[:, :1], turns[:, 1:]))
        moved = 2 * qkv.numel() * 2
        yield make_row(
            "rotation and write", shape, f"{tokens}", time_us([fused]), time_us([plain]), error,
            moved / bounds.bytes_per_s * 1e6,
        )  # fmt: skip


def _sampling(shape: Shape, sizes: Sizes, bounds: Bounds, device: torch.device) -> Iterator[Row]:
    """error: the share of rows whose token is not the sampler's."""
    owner = make_device(device.type)
    for count in [tokens for tokens in sizes.tokens if tokens <= 256]:
        state = RowState(owner, count, 4, 9, shape.vocab)
        rows = torch.arange(count, device=device)
        logits = torch.randn(count, shape.vocab, device=device) * 3
        status = torch.ones_like(rows)
        state.ints[:, 0] = torch.arange(count + 1, device=device) * 7919
        _fill_changes(state, device)
        for name, needs, values, top_k in (
            ("greedy", RowNeeds.NONE, (0.0, 1.0, 0.0, 1.0, 0.0, 0.0), 0),
            ("random", RowNeeds.RANDOM, (0.8, 1.0, 0.0, 1.0, 0.0, 0.0), 0),
            ("top-k 50, top-p 0.9", RowNeeds.RANDOM | RowNeeds.FILTER, (0.8, 0.9, 0.0, 1.0, 0.0, 0.0), 50),
            ("penalties", RowNeeds.PENALTIES, (0.0, 1.0, 0.0, 1.3, 0.4, 0.3), 0),
            ("bias, min tokens", MASKED, (0.0, 1.0, 0.0, 1.0, 0.0, 0.0), 0),
            (
                "penalties, bias, min tokens, top-k 50, top-p 0.9",
                RowNeeds.RANDOM | RowNeeds.FILTER | RowNeeds.PENALTIES | MASKED,
                (0.8, 0.9, 0.0, 1.3, 0.4, 0.3),
                50,
            ),
        ):
            state.floats[:] = torch.tensor(values, device=device)
            state.ints[:, 1] = top_k
            state.changes[:] = int(needs & (RowNeeds.PENALTIES | MASKED))
            plan = SamplePlan(needs, rows if needs & RowNeeds.FILTER else None, rows if needs & MASKED else None)

            def library(logits: torch.Tensor = logits, rows: torch.Tensor = rows, state: RowState = state,
                        plan: SamplePlan = plan) -> torch.Tensor:  # fmt: skip
                return sample(logits, rows, state, plan)

            def fused(logits: torch.Tensor = logits, rows: torch.Tensor = rows, state: RowState = state,
                      status: torch.Tensor = status, plan: SamplePlan = plan) -> torch.Tensor:  # fmt: skip
                is_random = bool(plan.needs & RowNeeds.RANDOM)
                has_penalties = bool(plan.needs & (RowNeeds.PENALTIES | MASKED))
                return sample_step(logits, rows, status, state, is_random=is_random, has_penalties=has_penalties)[0]

            want = library()  # before the kernels, which commit
            error = float((fused() != want).float().mean())
            us, torch_us = time_us([fused]), time_us([library], least_calls=4)  # milliseconds, where rows are many
            # Logits; a count and whether it is in the prompt; a bias and whether it stops.
            size = 4 + 5 * bool(needs & RowNeeds.PENALTIES) + 5 * bool(needs & MASKED)
            yield make_row(
                "sampling", shape, f"{count}, {name}", us, torch_us, error,
                logits.numel() * size / bounds.bytes_per_s * 1e6,
            )  # fmt: skip
    owner.close()


def _fill_changes(state: RowState, device: torch.device) -> None:
    """A tenth of the tokens came before, half may not be taken, a third can not end the row, ever."""
    counts, in_prompt = state.ensure_penalties()
    counts.copy_(torch.rand(counts.shape, device=device) < 0.1)
    in_prompt.copy_(torch.rand(in_prompt.shape, device=device) < 0.1)
    bias, stops = state.ensure_masks()
    bias.copy_(torch.randn(bias.shape, device=device))
    bias.masked_fill_(torch.rand(bias.shape, device=device) < 0.5, float("-inf"))
    stops.copy_(torch.rand(stops.shape, device=device) < 0.3)
    state.min_length.fill_(1 << 40)


def _skinny(shape: Shape, sizes: Sizes, bounds: Bounds, device: torch.device) -> Iterator[Row]:
    for name, (num_out, inner) in shape.products.items():
        size = num_out * inner * 2
        weights = [
            random_bf16(num_out, inner, device=device) / inner**0.5 for _ in range(-(-sizes.spread_bytes // size))
        ]
        for count in sizes.rows:
            x = random_bf16(count, inner, device=device)
            want = x.float() @ weights[0].float().t()
            candidates = candidates_for(count)
            error = max(error_of(skinny_linear(x, weights[0], config), want) for config in candidates)
            times = {
                config: time_us([lambda w=w, c=config, x=x: skinny_linear(x, w, c) for w in weights])  # type: ignore[misc]
                for config in candidates
            }
            best = min(times, key=times.__getitem__)
            torch_us = time_us([lambda w=w, x=x: F.linear(x, w) for w in weights])  # type: ignore[misc]
            yield make_row(
                "skinny product", shape, f"{name}, {count} rows", times[best], torch_us, error,
                size / bounds.bytes_per_s * 1e6, tb_per_s=size / times[best] / 1e6,
                torch_tb_per_s=size / torch_us / 1e6,
                best=str(best), by_rule_us=times[config_for(num_out, inner)],
                **({"reached": size / times[best] / 1e6 >= VECTOR_GOAL_TB_PER_S} if count == 1 else {}),
            )  # fmt: skip


PARTS: tuple[Part, ...] = (decode, prefill, _between_products, inputs, writes, _sampling, _skinny, layers)
