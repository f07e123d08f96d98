"""What weights will take is known before they are read, and what does not fit is refused with its numbers."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from gguf import GGMLQuantizationType

from common.errors import ModelTooLarge
from common.model_files.catalog import resolve
from executor_svc import weights_fit
from executor_svc.assemble import build_executor
from executor_svc.build import make_ops
from executor_svc.config import ExecutorConfig
from executor_svc.kernels_cpu.decoder import NativeWeights
from executor_svc.kernels_cpu.library import Library
from executor_svc.kernels_cpu.load import load_native
from executor_svc.kernels_cpu.packing import Format
from executor_svc.loader.load import load_model, model_config
from executor_svc.weights_fit import Room, check_weights_fit, loaded_bytes, native_bytes, room_on
from tests.unit.models.checkpoints import CASES, make_model, save, write_gguf

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_torch_holds_is_known_before(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    files = resolve(str(save(make_model(case), tmp_path)))
    model = load_model(files, dtype=dtype, device=CPU, ops=make_ops("fast"))
    assert loaded_bytes(model_config(files), dtype, packed=False) == model.weights.num_bytes


def test_packing_takes_every_matrix_that_is_multiplied_with_again(tmp_path: Path) -> None:
    if not weights_fit_packs():
        pytest.skip("no packed bfloat16 products here")
    for case in ("llama", "llama-tied"):
        files = resolve(str(save(make_model(case), tmp_path / case)))
        ops = make_ops("fast")
        model = load_model(files, dtype=torch.bfloat16, device=CPU, ops=ops)
        matrices = [t for layer in model.weights.layers for t in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        taken = cast(Any, ops).pack([*matrices, model.weights.head])
        config = model_config(files)
        assert loaded_bytes(config, torch.bfloat16, packed=True) == model.weights.num_bytes + taken


def weights_fit_packs() -> bool:
    from executor_svc.numerics import can_pack

    return can_pack()


def held(weights: NativeWeights) -> int:
    layers = [
        norm for layer in weights.layers for norm in (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)
    ]
    tensors = [weights.embedding, weights.final_norm, *(norm for norm in layers if norm is not None)]
    return weights.step_bytes + sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("quantisation", ["F32", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K", "mixed"])
@pytest.mark.parametrize("wanted", [None, Format.DENSE, Format.INT8, Format.INT4])
def test_what_the_kernels_hold_is_known_before(quantisation: str, wanted: Format | None, tmp_path: Path) -> None:
    def kind(name: str) -> GGMLQuantizationType:
        mixed = "Q6_K" if "attn_v" in name else "F16" if "ffn_up" in name else "Q4_K"
        return GGMLQuantizationType[mixed if quantisation == "mixed" else quantisation]

    model = make_model("llama-tied", hidden_size=256, intermediate_size=256)
    files = resolve(str(write_gguf(model, tmp_path / "model.gguf", kind)))
    config = model_config(files)
    none = cast(Library, None)  # no step is computed
    native = load_native(files, config, none, wanted=wanted, threads=1)
    assert native_bytes(files, config, wanted) == held(native.weights)


def test_what_does_not_fit_is_refused_with_names_and_numbers() -> None:
    check_weights_fit("tiny", "bfloat16", 100, Room(100, "the host"))
    with pytest.raises(ModelTooLarge) as error:
        check_weights_fit("big-model", "bfloat16", 101, Room(100, "the control group"))
    for part in ("big-model", "bfloat16", "101 bytes", "the control group", "100 bytes free", "1 too few"):
        assert part in error.value.message
    assert error.value.limit == "100"
    with pytest.raises(ModelTooLarge, match="kv_cache_memory asks for 60 bytes"):
        check_weights_fit("big-model", "bfloat16", 50, Room(100, "the host"), cache_bytes=60)


def test_room_is_the_least_of_host_and_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_fit, "host_memory", lambda: 500)
    for limit, expected in ((None, Room(500, "the host")), (600, Room(500, "the host"))):
        monkeypatch.setattr(weights_fit, "cgroup_available", lambda limit=limit: limit)
        assert room_on(CPU) == expected
    monkeypatch.setattr(weights_fit, "cgroup_available", lambda: 400)
    assert room_on(CPU) == Room(400, "the control group")


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_the_executor_asks_before_it_reads(numerics: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = resolve(str(save(make_model("llama"), tmp_path)))
    monkeypatch.setattr(weights_fit, "host_memory", lambda: 1000)
    config = ExecutorConfig(model=str(tmp_path), device="cpu", numerics=cast(Any, numerics))
    said: list[str] = []

    def say(activity: str, done: int, total: int, detail: str = "") -> None:
        said.append(activity)

    with pytest.raises(ModelTooLarge, match="1000 bytes free"):
        build_executor(config, files, 1, say)
    assert not [what for what in said if what.startswith(("loading", "building"))]
