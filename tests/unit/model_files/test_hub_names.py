"""What a hub id means, and which of a repository's files a model needs."""

import pytest

from common.errors import ModelError
from common.model_files.hub_names import HubName, needed_files, parse_hub_name

DESCRIBED = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
CLUTTER = [
    "README.md", ".gitattributes", "modeling.py", "vocab.json", "params.json", "pytorch_model.bin", "tokenizer.model",
    "original/params.json", "original/consolidated.00.pth", "onnx/model.onnx", "extra/model.safetensors",
]  # fmt: skip
QUANTISED = ["x-Q4_K_S.gguf", "x-Q4_K_M.gguf", "x-UD-Q4_K_M.gguf", "x.Q8_0.gguf", "bf16/x-BF16.gguf", "mmproj-F16.gguf"]

SPLIT = [
    *(f"x-Q4_K_M-{i:05d}-of-00003.gguf" for i in (1, 2, 3)),
    "x-Q4_K_M.gguf",
    *(f"f/x-Q8_0-{i:05d}-of-00002.gguf" for i in (1, 2)),
    *(f"IQ2_M/part-{i:05d}-of-00002.gguf" for i in (1, 2)),
]


def named(reference: str) -> HubName:
    name = parse_hub_name(reference)
    assert name is not None
    return name


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("o/n", ("o/n", None, "")),
        ("o/n.1-B@v1", ("o/n.1-B", "v1", "")),
        ("o/n@refs/pr/3", ("o/n", "refs/pr/3", "")),
        ("o/n:Q8_0", ("o/n", None, "Q8_0")),
        ("o/n@main:sub/x-Q8_0.gguf", ("o/n", "main", "sub/x-Q8_0.gguf")),
    ],
)
def test_a_hub_id_has_a_repository_a_revision_and_a_part(reference: str, parts: tuple[str, str | None, str]) -> None:
    name = named(reference)
    assert (name.repository, name.revision, name.part) == parts and name.reference == reference


@pytest.mark.parametrize(
    "reference", ["", "n", "/o/n", "./n", "../n", "o/n/m", "~/n", "o/", "o/n@", "o/n:", "o/n m", "ö/n"]
)
def test_what_is_no_hub_id(reference: str) -> None:
    assert parse_hub_name(reference) is None


def test_only_what_a_service_reads_is_needed() -> None:
    assert needed_files(named("o/n"), [*CLUTTER, "model.safetensors", *DESCRIBED]) == (*DESCRIBED, "model.safetensors")


def test_of_shards_all_are_needed_and_of_weights_that_stand_twice_one_set() -> None:
    index = "model.safetensors.index.json"
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    twice = ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors"]
    assert needed_files(named("o/n"), [*twice, *reversed(shards), index, "config.json"]) == (
        "config.json",
        index,
        *shards,
    )
    single = [*twice, "model.safetensors", "model.fp16.safetensors", "config.json"]
    assert needed_files(named("o/n"), single) == ("config.json", "model.safetensors")


@pytest.mark.parametrize(
    ("part", "file"),
    [
        ("Q8_0", "x.Q8_0.gguf"),
        ("q4_k_m", "x-Q4_K_M.gguf"),
        ("UD-Q4_K_M", "x-UD-Q4_K_M.gguf"),
        ("BF16", "bf16/x-BF16.gguf"),
        ("x-Q4_K_S.gguf", "x-Q4_K_S.gguf"),
        ("x-bf16.gguf", "bf16/x-BF16.gguf"),
        ("bf16/x-BF16.gguf", "bf16/x-BF16.gguf"),
        ("", "x-Q4_K_M.gguf"),
    ],
)
def test_a_gguf_file_is_chosen_by_name_or_quantisation(part: str, file: str) -> None:
    assert needed_files(named(f"o/n:{part}" if part else "o/n"), [*QUANTISED, "README.md"]) == (file,)


def test_one_gguf_file_needs_no_choice_and_safetensors_come_first() -> None:
    assert needed_files(named("o/n"), ["any.gguf", "mmproj-any.gguf", "config.json"]) == ("any.gguf",)
    both = ["any.gguf", "config.json", "model.safetensors"]
    assert needed_files(named("o/n"), both) == ("config.json", "model.safetensors")
    assert needed_files(named("o/n:any.gguf"), both) == ("any.gguf",)


@pytest.mark.parametrize(
    ("part", "first"),
    [
        ("Q4_K_M", "x-Q4_K_M.gguf"),  # whole and split: the whole one
        ("x-Q4_K_M-00002-of-00003.gguf", "x-Q4_K_M-00001-of-00003.gguf"),
        ("q8_0", "f/x-Q8_0-00001-of-00002.gguf"),
        ("IQ2_M", "IQ2_M/part-00001-of-00002.gguf"),
    ],
)
def test_of_a_split_gguf_file_all_parts_are_needed(part: str, first: str) -> None:
    stem = first.rsplit("-0", 2)[0]
    parts = tuple(path for path in sorted(SPLIT) if path.startswith(stem + "-0")) if "-of-" in first else (first,)
    assert needed_files(named(f"o/n:{part}"), SPLIT) == parts and parts[0] == first


def test_one_split_gguf_file_needs_no_choice_either() -> None:
    alone = [path for path in SPLIT if path.startswith("f/")]
    assert needed_files(named("o/n"), [*reversed(alone), "README.md"]) == tuple(alone)


@pytest.mark.parametrize(
    ("reference", "present", "says"),
    [
        ("o/n:Q5_K_M", QUANTISED, r"o/n:Q5_K_M: .*no GGUF file Q5_K_M; it has .*x-Q4_K_M\.gguf"),
        ("o/n:Q4_K", QUANTISED, "no GGUF file Q4_K;"),
        ("o/n:Q8_0", ["config.json", "model.safetensors"], "no GGUF file Q8_0; it has none"),
        ("o/n", ["x-Q2_K.gguf", "x-Q8_0.gguf"], r"2 GGUF files, none of them Q4_K_M.*o/n:FILE.*x-Q2_K\.gguf"),
        ("o/n", [SPLIT[0], "README.md"], r"x-Q4_K_M-00001-of-00003\.gguf is a part.*lacks x-Q4_K_M-00002-of-00003"),
        (
            "o/n:Q2_K",
            SPLIT,
            r"no GGUF file Q2_K; it has IQ2_M/part-00001-of-00002.gguf, f/x-Q8_0-00001.*, x-Q4_K_M.gguf$",
        ),
        ("o/n", ["config.json", "pytorch_model.bin"], r"no \*\.safetensors.*pytorch_model\.bin .*never"),
        ("o/n", ["adapter_model.safetensors"], r"no config\.json"),
        ("o/n", [], "no \\*"),
    ],
)
def test_what_can_not_be_served_is_said_before_anything_is_fetched(
    reference: str, present: list[str], says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        needed_files(named(reference), present)
