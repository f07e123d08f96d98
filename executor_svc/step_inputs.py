"""One step's batch on the device, and what comes of it beside tokens."""

from dataclasses import dataclass, field
from typing import Final

import torch

from executor_svc.sampler import GREEDY, SamplePlan

# What OutputSlot's second line says of a row.
FAILED: Final = 0
FINE: Final = 1
PADDING: Final = 2


@dataclass(frozen=True, slots=True)
class Chunk:
    """A prefill row: its place in the batch, its tokens in the step, its first position."""

    at: int
    first: int
    count: int
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class PromptWish:
    """Prompt logprobs of one chunk: hidden states [first, first + count) of the step, the tokens they predict."""

    at: int
    first: int
    targets: torch.Tensor
    num_top: int


@dataclass(slots=True, eq=False)
class StepInputs:
    """One step's batch on the device. B rows, T tokens; int64.

    rows: [B]. Where every row decodes, the rest is None: one token per row. token_at: [T], batch place of each token;
    token_ids, positions: [T], -1: the row's last token. last_at: [B], each row's last token of the step.
    sampling: [S], batch places that sample; None: all. decode_tokens [D], decode_at [D]: places of decoding rows.
    chunk_columns: [4, C], the chunks' fields in their order. raw_tokens: [R], tokens whose logits are wanted. context
    bounds what a decoding row attends to.
    logprobs_at: [L], places among the sampling rows, each with num_top most likely tokens.
    """

    rows: torch.Tensor
    context: int
    sample_plan: SamplePlan = GREEDY
    token_at: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    last_at: torch.Tensor | None = None
    sampling: torch.Tensor | None = None
    samples_any: bool = True
    decode_tokens: torch.Tensor | None = None
    decode_at: torch.Tensor | None = None
    chunks: tuple[Chunk, ...] = ()
    chunk_columns: torch.Tensor | None = None
    raw_tokens: torch.Tensor | None = None
    logprobs_at: torch.Tensor | None = None
    num_top: int = 0
    prompts: tuple[PromptWish, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Nothing is wanted but each sampling row's most likely token."""
        wants_more = self.sample_plan.needs or self.raw_tokens is not None or self.prompts
        return not wants_more and self.logprobs_at is None


@dataclass(slots=True, eq=False)
class StepOutputs:
    """Results that are no part of the output slot, each in memory of its own, alive until the host has its copy."""

    raw_logits: torch.Tensor | None = None
    logprobs: tuple[torch.Tensor, ...] = ()
    prompts: list[tuple[torch.Tensor, ...]] = field(default_factory=list)

    def tensors(self) -> list[torch.Tensor]:
        raw = [] if self.raw_logits is None else [self.raw_logits]
        return [*raw, *self.logprobs, *(tensor for prompt in self.prompts for tensor in prompt)]
