"""Choosing tokens, on the device, within the step, without asking the device anything.

Every operation works on each row by itself, so a token depends on its row's logits and parameters alone. Randomness is
a function of (seed, position, purpose): no generator has a state that company or order could change.
"""

from dataclasses import dataclass
from typing import Final

import torch

from executor_svc.buffers import FREQUENCY, MIN_P, PRESENCE, REPETITION, SEED, TEMPERATURE, TOP_K, TOP_P, RowState
from executor_svc.rows import RowNeeds

# Purposes of random numbers; a further use of randomness takes a further number.
PURPOSE_SAMPLE: Final = 0

# Logits put in order at first, on the CPU, where sorting a whole vocabulary takes milliseconds for each row.
_FEW: Final = 512

# SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014), as signed int64.
_GOLDEN: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX1: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2: Final = 0x94D049BB133111EB - (1 << 64)
_PURPOSE: Final = 0xD1B54A32D192ED03 - (1 << 64)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, purpose: int) -> torch.Tensor:
    """seeds, positions: int64 [N]. Returns float64 [N] in [0, 1), 53 bits."""
    stream = _mix(seeds + _wrap(_PURPOSE * (purpose + 1)))
    bits = _mix(stream + (positions + 1) * _GOLDEN)
    return _shift(bits, 11).to(torch.float64) * (1.0 / (1 << 53))


def _mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift(z, 30)) * _MIX1
    z = (z ^ _shift(z, 27)) * _MIX2
    return z ^ _shift(z, 31)


def _shift(z: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift to the right; torch's is arithmetic."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _wrap(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def seed_to_int64(seed: int) -> int:
    """A uint64 seed as the int64 with the same bits."""
    return _wrap(seed)


@dataclass(frozen=True, slots=True, eq=False)
class SamplePlan:
    """What this step's sampling must do, known to the host. `needs`: of all rows together.

    Where kernels sample, that is all. For torch's operators also, int64 on the device, places of the sampling rows
    with top-k, top-p or min-p (`filtered`), and of those with bias, allowed ids or min_tokens (`masked`); None: none.
    """

    needs: RowNeeds
    filtered: torch.Tensor | None = None
    masked: torch.Tensor | None = None


GREEDY: Final = SamplePlan(RowNeeds.NONE)


def sample(logits: torch.Tensor, rows: torch.Tensor, state: RowState, plan: SamplePlan) -> torch.Tensor:
    """Chooses a token for each row. Leaves `logits` as they are.

    logits: [N, vocab], of the model; rows: int64 [N], effective. Returns int64 [N]. Rows whose logits are not finite
    get an arbitrary token.
    """
    needs = plan.needs
    logits = logits.float()
    if needs & RowNeeds.PENALTIES:
        logits = _penalise(logits, rows, state)
    if plan.masked is not None:
        logits = _mask(logits, rows, state, plan.masked)
    greedy = logits.argmax(-1)
    if not needs & RowNeeds.RANDOM:
        return greedy
    floats = state.floats.index_select(0, rows)
    ints = state.ints.index_select(0, rows)
    temperature = floats[:, TEMPERATURE]
    is_random = temperature > 0
    scaled = logits / torch.where(is_random, temperature, 1.0)[:, None]
    draw = uniform(ints[:, SEED], state.length.index_select(0, rows), PURPOSE_SAMPLE)
    weights = scaled.softmax(-1)
    if plan.filtered is not None:
        # Apart, so that a row without filters has the very weights it has when no row filters.
        at = plan.filtered
        own = _filter(scaled.index_select(0, at), weights.index_select(0, at), ints.index_select(0, at)[:, TOP_K],
                      floats.index_select(0, at))  # fmt: skip
        weights.index_copy_(0, at, own)
    chosen = _draw(weights, draw)
    return torch.where(is_random, chosen, greedy)


def _draw(weights: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
    """Inverts the cumulative sum: the first index at which it passes draw * total."""
    total = weights.cumsum(-1, dtype=torch.float64)
    # Scaled by the sum itself, so that rounding can not lead past the last index with weight.
    target = draw[:, None] * total[:, -1:]
    return torch.searchsorted(total, target, right=True).clamp_(max=weights.shape[-1] - 1)[:, 0]


def _filter(scaled: torch.Tensor, weights: torch.Tensor, top_k: torch.Tensor, floats: torch.Tensor) -> torch.Tensor:
    """top-k, then top-p within it, then min-p. Returns the weights, 0 for what is not kept; not normalised anew.

    What is kept is told by a least logit, so tokens with equal logits stay or go together, and it does not matter how
    many of the best were put in order to find it.
    """
    top_p, min_p = floats[:, TOP_P], floats[:, MIN_P]
    size = scaled.shape[-1]
    few = min(size, _FEW)
    if few < size and scaled.device.type == "cpu":
        ordered, ids = scaled.topk(few, dim=-1)
        found, least = _least_kept(ordered, weights.gather(-1, ids), top_k, top_p)
        if not bool(found.all()):
            ordered, ids = scaled.sort(dim=-1, descending=True)
            _, least = _least_kept(ordered, weights.gather(-1, ids), top_k, top_p)
    else:
        ordered, ids = scaled.sort(dim=-1, descending=True)
        _, least = _least_kept(ordered, weights.gather(-1, ids), top_k, top_p)
    dropped = scaled < least[:, None]
    dropped |= weights < min_p[:, None] * weights.amax(-1, keepdim=True)
    return weights.masked_fill(dropped, 0.0)


def _least_kept(
    ordered: torch.Tensor, weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """ordered: the best logits, falling [N, m]; weights: theirs. Returns whether m was enough, and the least logit
    kept, both [N]."""
    count = ordered.shape[-1]
    sums = weights.cumsum(-1, dtype=torch.float64)
    limited = top_k > 0
    last_k = torch.where(limited, top_k, count).clamp(1, count) - 1
    total = torch.where(limited, sums.gather(-1, last_k[:, None])[:, 0], 1.0)
    # A token stays as long as those before it have not reached top_p; the first always does.
    last_p = ((sums - weights) < (top_p * total)[:, None]).sum(-1).clamp(1, count) - 1
    last = torch.where(top_p < 1, torch.minimum(last_k, last_p), last_k)
    # Without top-k, one token behind the last kept shows that no later one is kept.
    is_enough = torch.where(limited, top_k <= count, (top_p >= 1) | (last_p < count - 1))
    least = ordered.gather(-1, last[:, None])[:, 0]
    return is_enough, torch.where(limited | (top_p < 1), least, float("-inf"))


def _penalise(logits: torch.Tensor, rows: torch.Tensor, state: RowState) -> torch.Tensor:
    """Repetition over prompt and output; presence and frequency over output."""
    counts, in_prompt = state.ensure_penalties()
    floats = state.floats.index_select(0, rows)
    count = counts.index_select(0, rows)
    seen = (count > 0) | in_prompt.index_select(0, rows)
    repetition = floats[:, REPETITION, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    return logits - count * floats[:, FREQUENCY, None] - (count > 0) * floats[:, PRESENCE, None]


def _mask(logits: torch.Tensor, rows: torch.Tensor, state: RowState, places: torch.Tensor) -> torch.Tensor:
    """Bias, allowed ids and min_tokens of the rows at `places`."""
    bias, stops = state.ensure_masks()
    rows = rows.index_select(0, places)
    own = logits.index_select(0, places)
    changes = state.changes.index_select(0, rows)
    has_bias = (changes & int(RowNeeds.BIAS)) != 0
    own = torch.where(has_bias[:, None], own + bias.index_select(0, rows), own)
    is_short = state.length.index_select(0, rows) < state.min_length.index_select(0, rows)
    is_held = ((changes & int(RowNeeds.MIN_TOKENS)) != 0) & is_short
    own = own.masked_fill(is_held[:, None] & stops.index_select(0, rows), float("-inf"))
    return logits.index_copy(0, places, own)


def commit(tokens: torch.Tensor, rows: torch.Tensor, state: RowState, plan: SamplePlan) -> None:
    """Makes the tokens the next step's inputs. tokens, rows: int64 [N]; padding stays as it is."""
    is_pad = rows == state.pad_row
    length = state.length.index_select(0, rows)
    state.last_token.index_copy_(0, rows, torch.where(is_pad, 0, tokens))
    state.length.index_copy_(0, rows, torch.where(is_pad, length, length + 1))
    if plan.needs & RowNeeds.PENALTIES and state.output_counts is not None:
        flat = state.output_counts.view(-1)
        places = rows * state.output_counts.shape[1] + tokens
        flat.index_add_(0, places, torch.ones_like(places, dtype=torch.int32))


def top_logprobs(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    """logits: [N, vocab], of the model; chosen: int64 [N].

    Returns log-softmax of the chosen [N], ids [N, num_top] int64 and values [N, num_top], most likely first.
    """
    logprobs = logits.float().log_softmax(-1)
    picked = logprobs.gather(-1, chosen[:, None])[:, 0]
    if num_top == 0:
        none = logprobs.new_zeros(logits.shape[0], 0)
        return picked, none.to(torch.int64), none
    values, ids = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return picked, ids, values
