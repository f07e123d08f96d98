"""The default model, end to end, against transformers."""

import pytest
import torch

from executor_svc.loader.load import load_model
from scheduler_svc.tokenizer import load_tokenizer
from tests.reference import PlainOps, default_files, greedy_differences, logits_of, reference_logits

pytestmark = [pytest.mark.model, pytest.mark.slow]

TEXTS = [
    "Gravity is",
    "def fibonacci(n):\n    ",
    "日本の首都は東京です。フランスの首都は",
    "Ein Satz auf Deutsch, mit Umlauten: äöü 🎉👩‍👩‍👧",
]


@pytest.mark.parametrize("text", TEXTS)
def test_logits_are_those_of_transformers(text: str) -> None:
    files = default_files()
    tokenizer = load_tokenizer(files)
    assert tokenizer is not None
    decoder = load_model(files, dtype=torch.float32, device=torch.device("cpu"), ops=PlainOps())
    ids = tokenizer.encode(text)
    torch.testing.assert_close(logits_of(decoder, ids), reference_logits(ids), atol=2e-3, rtol=1e-4)
    greedy: list[int] = []
    for _ in range(4):
        greedy.append(int(logits_of(decoder, [*ids, *greedy])[-1].argmax()))
    assert all(difference.is_near_tie for difference in greedy_differences(ids, greedy))
