"""The seam between a model and whatever computes its attention over the paged cache."""

from typing import Protocol

import torch


class Attend(Protocol):
    """Attention of one step, given to the model's forward pass. One instance serves all layers of one step."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Writes k and v of this step's tokens into the paged cache of `layer`, then attends causally.

        q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim], rotary applied, in the model's
        dtype and on its device. Tokens are in batch order: rows ascending, positions ascending within a row. Padding
        tokens write nowhere and their output is arbitrary but finite. Returns [num_tokens, num_heads, head_dim].
        """
        ...
