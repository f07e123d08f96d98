"""The default model, end to end, against transformers."""

from functools import cache

import pytest
import torch

from executor_svc.loader.load import load_model
from executor_svc.models.decoder import Decoder
from scheduler_svc.tokenizer import load_tokenizer
from tests.reference import PlainOps, default_files, greedy_differences, logits_of, reference_logits

# Both models are loaded in the first test of a process.
pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

TEXTS = [
    "Gravity is",
    "def fibonacci(n):\n    ",
    "日本の首都は東京です。フランスの首都は",
    "Ein Satz auf Deutsch, mit Umlauten: äöü 🎉👩‍👩‍👧",
]


@cache
def our_model() -> Decoder:
    return load_model(default_files(), dtype=torch.float32, device=torch.device("cpu"), ops=PlainOps())


@pytest.mark.parametrize("text", TEXTS)
def test_logits_are_those_of_transformers(text: str) -> None:
    tokenizer, decoder = load_tokenizer(default_files()), our_model()
    assert tokenizer is not None
    ids = tokenizer.encode(text)
    torch.testing.assert_close(logits_of(decoder, ids), reference_logits(ids), atol=2e-3, rtol=1e-4)
    greedy: list[int] = []
    for _ in range(4):
        greedy.append(int(logits_of(decoder, [*ids, *greedy])[-1].argmax()))
    assert all(difference.is_near_tie for difference in greedy_differences(ids, greedy))
