"""What a hub id means, and which files of a repository a model needs. Pure: the caller lists the files."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import PurePosixPath

from common.errors import ModelError
from common.model_files.gguf_parts import is_model, one_a_model, parse_part

_HUB_ID = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?(:(?P<part>[\w./-]+))?", re.ASCII
)
# All that either service reads beside the weights.
_DESCRIPTION = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)
# What a repository's owner most often recommends, and what llama.cpp and Ollama take where nothing is said.
DEFAULT_QUANTISATION = "Q4_K_M"
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class HubName:
    """`owner/name[@revision][:part]`. `revision`: branch, tag or commit; None: the default branch. `part`: a GGUF file
    of the repository, or of a split one any part, or a quantisation (Q8_0); "": the repository's safetensors, else its
    one or usual GGUF file."""

    reference: str
    repository: str
    revision: str | None
    part: str


def parse_hub_name(reference: str) -> HubName | None:
    """None: `reference` does not have the form of a hub id."""
    match = _HUB_ID.fullmatch(reference)
    if match is None:
        return None
    return HubName(reference, match["repository"], match["revision"], match["part"] or "")


def needed_files(name: HubName, present: Collection[str]) -> tuple[str, ...]:
    """The files to fetch of those `present` (paths in the repository): one GGUF file or all parts of one, or config,
    tokenizer and safetensors. Never pickled weights, never code. Raises ModelError saying what there is instead."""
    ggufs = sorted(path for path in present if is_model(path))
    if name.part:
        return _named_gguf(name, ggufs)
    # Mistral's repositories hold all weights a second time, under names of their own that no loader here reads.
    weights = [p for p in present if re.fullmatch(r"(?!consolidated)[^/]+\.safetensors", p)]
    if "config.json" in present and weights:
        if "model.safetensors" in weights and "model.safetensors.index.json" not in present:
            weights = ["model.safetensors"]
        return (*(path for path in _DESCRIPTION if path in present), *sorted(weights))
    if ggufs:
        return _usual_gguf(name, ggufs)
    lacks = "no *.safetensors and no GGUF file" if not weights else "no config.json"
    pickled = sorted(path for path in present if path.endswith((".bin", ".pt", ".pth")))
    hint = f" ({_some(pickled)} would have to be unpickled, which Stepwire never does)" if pickled else ""
    raise ModelError(f"{name.reference}: the repository holds {lacks}{hint}")


def _named_gguf(name: HubName, ggufs: list[str]) -> tuple[str, ...]:
    wanted = name.part.lower()
    if wanted.endswith(".gguf"):
        found = [path for path in ggufs if path.lower() == wanted]
        found = found or [path for path in ggufs if PurePosixPath(path).name.lower() == wanted]
    else:
        found = _of_quantisation(name.part, ggufs)
    if not found:
        there = f"it has {_some(ggufs)}" if ggufs else "it has none"
        raise ModelError(f"{name.reference}: the repository has no GGUF file {name.part}; {there}")
    return _whole(name, found[0], ggufs)


def _usual_gguf(name: HubName, ggufs: list[str]) -> tuple[str, ...]:
    models = one_a_model(ggufs)
    found = models if len(models) == 1 else _of_quantisation(DEFAULT_QUANTISATION, ggufs)
    if not found:
        raise ModelError(
            f"{name.reference}: the repository holds {len(models)} GGUF files, none of them {DEFAULT_QUANTISATION}; "
            f"name one, as {name.repository}:FILE or {name.repository}:QUANTISATION: {_some(ggufs)}"
        )
    return _whole(name, found[0], ggufs)


def _of_quantisation(quantisation: str, ggufs: list[str]) -> list[str]:
    """Best first: x-Q4_K_M.gguf before x-UD-Q4_K_M.gguf and before folders of variants."""
    pattern = re.compile(rf"(?:^|[-._/]){re.escape(quantisation)}(?=[-./])", re.IGNORECASE)
    return sorted((path for path in ggufs if pattern.search(path)), key=lambda path: (path.count("/"), len(path), path))


def _whole(name: HubName, path: str, ggufs: list[str]) -> tuple[str, ...]:
    """The file, or all parts of the split one that it belongs to."""
    part = parse_part(path)
    if part is None:
        return (path,)
    missing = sorted({*part.names()} - {*ggufs})
    if missing:
        raise ModelError(f"{name.reference}: {path} is a part of a GGUF file; the repository lacks {_some(missing)}")
    return part.names()


def _some(paths: list[str]) -> str:
    """Of a split file the first part stands for all."""
    paths = one_a_model(paths)
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
