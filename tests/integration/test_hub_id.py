"""`stepwire up --model owner/name`: from a hub's repository to an answer, in real processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.fakes.hub_server import serving_hub
from tests.unit.models.checkpoints import make_model, save
from tests.unit.tokenizer.vocabularies import SPECIAL, byte_level_vocabulary

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}<|start|>assistant\n"


def make_repository(directory: Path) -> Path:
    """A tiny random Llama as transformers saves it, with a tokenizer and a chat template of its own."""
    tokens, merges = byte_level_vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    save(make_model("llama", vocab_size=len(tokens)), directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "pytorch_model.bin").write_bytes(b"never fetched")
    return directory


def test_up_serves_a_hub_id_and_serves_it_again_without_the_hub(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("STEPWIRE_", "OTEL_", "HF_"))}
    environment |= {"HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-P", "-m", "deploy.cli", "up", "--once", "--listen", "127.0.0.1:0", "--threads", "1"]
    command += ["--max-num-seqs", "4", "--num-blocks", "32", "--model", "tiny/llama"]

    def up(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=environment | more, capture_output=True, text=True, timeout=240)

    with serving_hub() as hub:
        hub.add("tiny/llama", make_repository(tmp_path / "repository"))
        first = up(HF_ENDPOINT=hub.address)
        assert first.returncode == 0, first.stderr
        needed = ["chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
        assert sorted(hub.fetched()) == needed  # once, though three processes ask for the model
    assert "downloading tiny/llama" in first.stderr and "> Why is the sky blue?" in first.stderr
    assert re.search(r"\(\d+ tokens in", first.stderr)
    again = up(HF_HUB_OFFLINE="1")
    assert again.returncode == 0 and again.stdout == first.stdout, again.stderr
