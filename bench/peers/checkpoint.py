"""A GGUF model in bf16 as a directory of transformers' kind, for peers that read no GGUF. Made once, then kept.

python -m bench.peers.checkpoint FILE.gguf DIRECTORY
"""

import sys
from pathlib import Path

from bench.peers.base import output_of, python
from common.model_files.cache import cache_dir, exclusive


def checkpoint(model: Path) -> Path:
    """With configuration, weights and tokenizer. `model`: a GGUF file of Llama's architecture. Raises RuntimeError."""
    path = cache_dir() / "bench" / f"{model.stem}.widened-bf16"
    if not path.is_dir():
        with exclusive(path.parent) as work:
            made = work / "model"
            # A process of its own: the load client loads no transformers.
            said = output_of([*python(), "-m", "bench.peers.checkpoint", str(model), str(made)])
            if not (made / "tokenizer.json").is_file():
                raise RuntimeError(f"no checkpoint could be made: {said[-1000:]}")
            made.rename(path)
    return path


def main(model: Path, directory: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, LlamaConfig

    from common.model_files.catalog import resolve
    from executor_svc.loader.load import model_config
    from executor_svc.loader.names import parts
    from executor_svc.loader.sources import open_source

    files = resolve(str(model))
    LlamaConfig(**files.config, dtype="bfloat16").save_pretrained(directory)
    with open_source(files) as source:
        weights = {part.hf_name: source.read(part).to(torch.bfloat16) for part in parts(model_config(files))}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(str(files.path.parent), gguf_file=files.path.name).save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
