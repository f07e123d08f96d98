"""What a plan changes of the row state and of the cache before its step, and the scatter that does it."""

from dataclasses import dataclass

import torch

from executor_svc.buffers import RowState
from executor_svc.kv_cache import KvCache


@dataclass(slots=True, eq=False)
class RowChanges:
    """Staged changes of row state, applied in the order of the fields. None: nothing of the kind. All on the device.

    Rows whose tables are emptied; then places, int64 [m], in RowState.words with what goes there, int32 [m]. Places by
    row and token are row * vocab + token, int64. Penalties: rows to clear, places of prompt tokens, of output tokens
    with their counts, int32. Masks: rows to clear, rows confined to the allowed places, places with a bias, float32;
    rows to clear of stops, places of stops.
    """

    admit_rows: torch.Tensor | None = None
    places: torch.Tensor | None = None
    words: torch.Tensor | None = None
    penalty_rows: torch.Tensor | None = None
    prompt_places: torch.Tensor | None = None
    output_places: torch.Tensor | None = None
    output_counts: torch.Tensor | None = None
    bias_rows: torch.Tensor | None = None
    confined_rows: torch.Tensor | None = None
    allowed_places: torch.Tensor | None = None
    bias_places: torch.Tensor | None = None
    bias_values: torch.Tensor | None = None
    stop_rows: torch.Tensor | None = None
    stop_places: torch.Tensor | None = None
    clean_blocks: torch.Tensor | None = None
    clean_slots: torch.Tensor | None = None
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()


def apply_changes(changes: RowChanges, state: RowState, cache: KvCache) -> None:
    """At the head of the step, on COMPUTE."""
    if changes.admit_rows is not None:
        state.block_tables.index_fill_(0, changes.admit_rows, cache.null_block)
    if changes.places is not None and changes.words is not None:
        state.words.index_copy_(0, changes.places, changes.words)
    _apply_penalties(changes, state)
    _apply_masks(changes, state)
    if changes.clean_blocks is not None:
        cache.data.index_fill_(2, changes.clean_blocks, 0.0)
    for sources, targets in changes.copies:
        cache.copy_blocks(sources, targets)
    if changes.clean_slots is not None:
        cache.clean_slots(changes.clean_slots)


def _apply_penalties(changes: RowChanges, state: RowState) -> None:
    if changes.penalty_rows is None and changes.prompt_places is None and changes.output_places is None:
        return
    counts, in_prompt = state.ensure_penalties()
    if changes.penalty_rows is not None:
        counts.index_fill_(0, changes.penalty_rows, 0)
        in_prompt.index_fill_(0, changes.penalty_rows, False)
    if changes.prompt_places is not None:
        in_prompt.view(-1).index_fill_(0, changes.prompt_places, True)
    if changes.output_places is not None and changes.output_counts is not None:
        counts.view(-1).index_add_(0, changes.output_places, changes.output_counts)


def _apply_masks(changes: RowChanges, state: RowState) -> None:
    if changes.bias_rows is None and changes.stop_rows is None:
        return
    bias, stops = state.ensure_masks()
    if changes.bias_rows is not None:
        bias.index_fill_(0, changes.bias_rows, 0.0)
    if changes.confined_rows is not None and changes.allowed_places is not None:
        bias.index_fill_(0, changes.confined_rows, float("-inf"))
        bias.view(-1).index_fill_(0, changes.allowed_places, 0.0)
    if changes.bias_places is not None and changes.bias_values is not None:
        bias.view(-1).index_add_(0, changes.bias_places, changes.bias_values)
    if changes.stop_rows is not None:
        stops.index_fill_(0, changes.stop_rows, False)
    if changes.stop_places is not None:
        stops.view(-1).index_fill_(0, changes.stop_places, True)
