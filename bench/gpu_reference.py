"""transformers' Llama with a decoder's own weights: what bench.gpu holds tokens and logprobs against."""

import importlib
from collections.abc import Sequence
from typing import Any, Final

import torch

from bench.plans import Request
from executor_svc.loader.names import EMBEDDING, FINAL_NORM, HEAD, parts
from executor_svc.models.decoder import Decoder

# Where the reference's two best logits are closer than this, either token is right.
NEAR_TIE: Final = 1e-3


class Judge:
    """transformers' Llama with a decoder's weights, in float32."""

    def __init__(self, model: Decoder, values: dict[str, Any]) -> None:
        transformers: Any = importlib.import_module("transformers")  # only now: a service has none

        own = {
            k: v for k, v in values.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype", "architectures")
        }
        rope = {"rope_type": "default", "rope_theta": values["rope_theta"], **values.get("rope_scaling", {})}
        config = transformers.LlamaConfig(**own, rope_parameters=rope)
        with torch.device(model.device):
            self._model = transformers.LlamaForCausalLM(config).eval().float()
        missing, unknown = self._model.load_state_dict(_named(model), strict=False)
        if unknown or [name for name in missing if name != "lm_head.weight"]:
            raise RuntimeError(f"transformers' model lacks {unknown}, ours {missing}")
        self._model.tie_weights()

    def to_bfloat16(self) -> None:
        """The rotation's frequencies stay as they are, as when transformers loads a bfloat16 model."""
        rotary = self._model.model.rotary_emb
        frequencies = rotary.inv_freq.clone()
        self._model.to(torch.bfloat16)
        rotary.inv_freq = frequencies

    def logprobs(
        self, requests: Sequence[Request], tokens: Sequence[Sequence[int]], ids: Sequence[Sequence[tuple[int, ...]]]
    ) -> torch.Tensor:
        """float32 [all tokens, ids of each], on the host: of `ids` in the place of each token."""
        found = []
        for request, own, wanted in zip(requests, tokens, ids, strict=True):
            logprobs = self._logits(request, own).log_softmax(-1).cpu()
            found.append(logprobs.gather(1, torch.tensor(wanted)))
        return torch.cat(found)

    def differences(self, requests: Sequence[Request], tokens: Sequence[Sequence[int]]) -> int:
        """Tokens that are not the most likely, near-ties aside."""
        wrong = 0
        for request, own in zip(requests, tokens, strict=True):
            logits = self._logits(request, own).cpu()
            chosen = logits.gather(1, torch.tensor(own)[:, None])[:, 0]
            wrong += int((logits.max(-1).values - chosen >= NEAR_TIE).sum())
        return wrong

    def _logits(self, request: Request, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [len(tokens), vocab]: before each token."""
        ids = [*request[0], *tokens]
        logits: torch.Tensor = self._model(torch.tensor([ids[:-1]], device=self._model.device)).logits[0]
        return logits[len(request[0]) - 1 :].float()


def _named(model: Decoder) -> dict[str, torch.Tensor]:
    weights = model.weights
    whole = {EMBEDDING: weights.embedding, FINAL_NORM: weights.final_norm, HEAD: weights.head}
    found = {}
    for part in parts(model.config):
        field = whole[part.field] if part.layer < 0 else getattr(weights.layers[part.layer], part.field)
        found[part.hf_name] = field[part.start : part.start + part.shape[0]]
    return found
