"""A model far larger than the memory: its file is all holes, so that any machine can hold it and none can load it."""

import json
import struct
from pathlib import Path

from common.config import EXIT_CONFIG
from executor_svc.loader.names import parts
from executor_svc.models.config import parse_config
from tests.integration.test_protocol_process import process

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}


def write_hollow_model(directory: Path) -> int:
    """Returns the bytes its tensors would take in bfloat16."""
    (directory / "config.json").write_text(json.dumps(CONFIG))
    entries, end = {}, 0
    for part in parts(parse_config(CONFIG, "config.json")):
        size = 2
        for length in part.shape:
            size *= length
        entries[part.hf_name] = {"dtype": "BF16", "shape": part.shape, "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    return end


def test_a_model_too_large_for_the_memory_ends_the_start_with_its_numbers(tmp_path: Path) -> None:
    model = tmp_path / "hollow-405b"
    model.mkdir()
    num_bytes = write_hollow_model(model)
    assert num_bytes > 800e9
    args = ["--model", str(model), "--listen", f"unix:{tmp_path / 'x.sock'}", "--device", "cpu", "--dtype", "bfloat16"]
    with process("executor_svc", args, tmp_path / "log") as started:
        assert started.wait() == EXIT_CONFIG
        assert "hollow-405b does not fit: its weights take " in started.log
        assert "bytes free" in started.log and "too few" in started.log
        taken = int(started.log.partition("its weights take ")[2].split()[0])
        assert taken >= num_bytes
        assert "Traceback" not in started.log
