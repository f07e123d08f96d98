"""The seam between a model and whatever computes its attention over the paged cache."""

from typing import Protocol, runtime_checkable

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


@runtime_checkable
class FusedAttend(Protocol):
    """An Attend that also does what comes before it."""

    def attend_projected(
        self,
        layer: int,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
    ) -> torch.Tensor:
        """qkv: [num_tokens, num_heads + 2 num_kv_heads, head_dim], as projected; positions: int64 [num_tokens]; table:
        the model's rotary table; norms: RMS norm weights of the heads of queries and keys. Else as Attend."""
        ...
