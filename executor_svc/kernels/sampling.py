"""From logits to the next step's inputs with no word to the host: penalties, most likely token, draw, commit.

Three kernels. *best*: each row's vocabulary in parts; its changes, the largest logit, whether all are finite. *draw*,
where a row of the batch may be random, one program a row: top-k and top-p are cut at a least logit, found by narrowing
the range of logits (as integers of the same order) where the sampler sorts; then the cumulative sum is inverted.
*commit*: joins the parts, settles the row's status, makes the token the row's next input.

Penalties, bias, allowed ids and min_tokens are the row's own, on the device: no step needs a word from the host.

The rules, their order and the random numbers are executor_svc/sampler.py's. Sums are float64 there and here, but not in
one order, and exponentials differ in their last bits: where a draw falls that close to a border, the token may differ.
"""

import torch
import triton
import triton.language as tl

from executor_svc.buffers import RowState
from executor_svc.kernels.early import await_previous, early_options

# Logits a program looks at at once.
_BLOCK = 4096
_PROGRAMS = 264
_MAX_PARTS = 64
# Borders a search tries at once.
_WAYS = 4

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX2 = tl.constexpr(0x94D049BB133111EB)
PURPOSE = tl.constexpr(0xD1B54A32D192ED03)

# Columns of RowState.floats and RowState.ints, and the results' status (executor_svc/buffers.py, step_inputs.py).
TEMPERATURE, TOP_P, MIN_P = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
REPETITION, PRESENCE, FREQUENCY = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
FLOATS, SEED, TOP_K, INTS = tl.constexpr(6), tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FAILED, FINE = tl.constexpr(0), tl.constexpr(1)
# Bits of RowState.changes (executor_svc/rows.py).
PENALTIES, BIAS, MIN_TOKENS = tl.constexpr(4), tl.constexpr(8), tl.constexpr(16)


@triton.jit
def changes_of(row, changes, lengths, min_length):
    """What changes the row's logits in this step: bits, 0 for none."""
    bits = tl.load(changes + row)
    is_short = tl.load(lengths + row) < tl.load(min_length + row)
    return tl.where(is_short, bits, bits & (PENALTIES | BIAS))


@triton.jit(do_not_specialize=["num_parts"])
def best_kernel(
    logits, rows, floats, lengths, changes, min_length, counts, in_prompt, bias, stops,
    changed, best, best_at, finite, num_parts, share,
    VOCAB: tl.constexpr, HAS_PENALTIES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One part of one row's vocabulary. Writes its largest logit, where that is, and whether all are finite."""
    await_previous(EARLY)
    at, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + at)
    if HAS_PENALTIES:
        bits = changes_of(row, changes, lengths, min_length)
        repetition = tl.load(floats + row * FLOATS + REPETITION)
        frequency = tl.load(floats + row * FLOATS + FREQUENCY)
        presence = tl.load(floats + row * FLOATS + PRESENCE)
    top = tl.full([], float("-inf"), tl.float32)
    top_at = part * share
    is_finite = tl.full([], 1, tl.int32)
    for start in tl.range(part * share, (part + 1) * share, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        is_there = ids < VOCAB
        value = tl.load(logits + at * VOCAB + ids, mask=is_there, other=0.0).to(tl.float32)
        is_finite = tl.minimum(is_finite, tl.min((tl.abs(value) < float("inf")).to(tl.int32), 0))
        if HAS_PENALTIES:
            # Nothing is read of what a row does not have.
            has = is_there & ((bits & PENALTIES) != 0)
            place = row * VOCAB + ids
            count = tl.load(counts + place, mask=has, other=0).to(tl.float32)
            seen = tl.load(in_prompt + place, mask=has, other=0).to(tl.int1) | (count > 0)
            repeated = tl.where(value > 0, tl.div_rn(value, repetition + tl.zeros_like(value)), value * repetition)
            value = tl.where(seen, repeated, value)
            value = value - count * frequency
            value = value - tl.where(count > 0, presence, 0.0)
            value += tl.load(bias + place, mask=is_there & ((bits & BIAS) != 0), other=0.0)
            is_stop = tl.load(stops + place, mask=is_there & ((bits & MIN_TOKENS) != 0), other=0).to(tl.int1)
            value = tl.where(is_stop, float("-inf"), value)
            tl.store(changed + at * VOCAB + ids, value, mask=is_there & (bits != 0))
        value = tl.where(is_there, value, float("-inf"))
        highest, place = tl.max(value, 0, return_indices=True)
        top_at = tl.where(highest > top, start + place, top_at)
        top = tl.maximum(top, highest)
    tl.store(best + at * num_parts + part, top)
    tl.store(best_at + at * num_parts + part, top_at)
    tl.store(finite + at * num_parts + part, is_finite)


@triton.jit
def mixed(z):
    z = (z ^ (z >> 30)) * MIX1
    z = (z ^ (z >> 27)) * MIX2
    return z ^ (z >> 31)


@triton.jit
def uniform(seed, position):
    """float64 in [0, 1): 53 bits of (seed, position) for the purpose of sampling."""
    stream = mixed(seed.to(tl.uint64, bitcast=True) + PURPOSE)
    bits = mixed(stream + (position + 1).to(tl.uint64, bitcast=True) * GOLDEN)
    return (bits >> 11).to(tl.int64).to(tl.float64) * (1.0 / (1 << 53))


@triton.jit
def key_of(value):
    """int64, in the order of the float32 values; both zeros are one."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def value_of(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def scaled_block(logits, changed, is_changed, first, start, temperature, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Logits [start, start + BLOCK) of the row that begins at `first`, by temperature; -inf behind the vocabulary."""
    ids = start + tl.arange(0, BLOCK)
    value = tl.load(logits + first + ids, mask=(ids < VOCAB) & (is_changed == 0), other=float("-inf")).to(tl.float32)
    own = tl.load(changed + first + ids, mask=(ids < VOCAB) & (is_changed != 0), other=float("-inf"))
    value = tl.maximum(value, own)
    return tl.div_rn(value, temperature + tl.zeros_like(value))


@triton.jit
def count_above(
    logits, changed, is_changed, first, bounds, temperature,
    VOCAB: tl.constexpr, WAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many logits lie above each of the bounds, which are keys, int64 [WAYS]. Returns int64 [WAYS].

    Counted element by element, and across them only at the end; so are the weights of weight_above.
    """
    count = tl.zeros([WAYS, BLOCK], tl.int32)
    for start in tl.range(0, VOCAB, BLOCK):
        value = scaled_block(logits, changed, is_changed, first, start, temperature, VOCAB, BLOCK)
        count += (key_of(value)[None, :] > bounds[:, None]).to(tl.int32)
    return tl.sum(count, 1).to(tl.int64)


@triton.jit
def weight_above(
    logits, changed, is_changed, first, bounds, temperature, top,
    VOCAB: tl.constexpr, WAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of the weights of the logits above each of the bounds, float64 [WAYS]."""
    weight = tl.zeros([WAYS, BLOCK], tl.float32)
    for start in tl.range(0, VOCAB, BLOCK):
        value = scaled_block(logits, changed, is_changed, first, start, temperature, VOCAB, BLOCK)
        is_above = key_of(value)[None, :] > bounds[:, None]
        weight += tl.where(is_above, tl.exp(value - top)[None, :], 0.0)
    return tl.sum(weight.to(tl.float64), 1)


@triton.jit(do_not_specialize=["num_parts"])
def draw_kernel(
    logits, changed, rows, lengths, floats, ints, changes, min_length, best, finite, drawn, num_parts,
    VOCAB: tl.constexpr, MAX_PARTS: tl.constexpr, WAYS: tl.constexpr, HAS_PENALTIES: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row: writes the token drawn, or -1 for a row that takes the most likely one. BLOCKS: at least of VOCAB."""
    await_previous(EARLY)
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at)
    parts = tl.arange(0, MAX_PARTS)
    highest = tl.max(tl.load(best + at * num_parts + parts, mask=parts < num_parts, other=float("-inf")), 0)
    is_finite = tl.min(tl.load(finite + at * num_parts + parts, mask=parts < num_parts, other=1), 0) > 0
    temperature = tl.load(floats + row * FLOATS + TEMPERATURE)
    token = tl.full([], -1, tl.int64)
    if (temperature > 0) & is_finite:
        is_changed = row < 0
        if HAS_PENALTIES:
            is_changed = changes_of(row, changes, lengths, min_length) != 0
        first = at * VOCAB
        top = tl.div_rn(highest, temperature)
        top_k = tl.load(ints + row * INTS + TOP_K)
        top_p = tl.load(floats + row * FLOATS + TOP_P)
        min_p = tl.load(floats + row * FLOATS + MIN_P)
        highest_key = key_of(top)
        lowest_key = tl.full([], -(1 << 31), tl.int64)
        ways = tl.arange(0, WAYS).to(tl.int64)
        least = lowest_key
        if top_k > 0:
            # The largest key that at least k logits reach, among WAYS of them at a time.
            wanted = tl.minimum(top_k, VOCAB)
            low, high = lowest_key, highest_key
            while low < high:
                tried = tl.minimum(low + (high - low + WAYS - 1) // WAYS * (ways + 1), high)
                count = count_above(logits, changed, is_changed, first, tried - 1, temperature, VOCAB, WAYS, BLOCK)
                low, high = (
                    tl.max(tl.where(count >= wanted, tried, low), 0),
                    tl.min(tl.where(count >= wanted, high, tried - 1), 0),
                )
            least = low
        if top_p < 1:
            bounds = tl.where(ways == 0, tl.where(top_k > 0, least, lowest_key - 1), highest_key)
            weight = weight_above(logits, changed, is_changed, first, bounds, temperature, top, VOCAB, WAYS, BLOCK)
            whole = tl.max(weight, 0)
            if top_k > 0:
                # Of those equal to the last one kept, as many as make k.
                count = count_above(logits, changed, is_changed, first, bounds, temperature, VOCAB, WAYS, BLOCK)
                equal = (tl.minimum(top_k, VOCAB) - tl.max(count, 0)).to(tl.float64)
                whole += equal * tl.exp(value_of(least) - top).to(tl.float64)
            # The smallest key above which less than top_p lies: a token stays until those before it have reached it.
            target = top_p.to(tl.float64) * whole
            low, high = lowest_key, highest_key
            while low < high:
                tried = tl.minimum(low + (high - low + WAYS - 1) // WAYS * (ways + 1), high) - 1
                weight = weight_above(logits, changed, is_changed, first, tried, temperature, top, VOCAB, WAYS, BLOCK)
                low, high = (
                    tl.max(tl.where(weight < target, low, tried + 1), 0),
                    tl.min(tl.where(weight < target, tried, high), 0),
                )
            least = tl.maximum(least, low)
        # The sum of each block; then the one in which the cumulative sum passes the draw.
        numbers = tl.arange(0, BLOCKS)
        sums = tl.zeros([BLOCKS], tl.float64)
        for start in tl.range(0, VOCAB, BLOCK):
            value = scaled_block(logits, changed, is_changed, first, start, temperature, VOCAB, BLOCK)
            weight = tl.exp(value - top)
            kept = tl.where((key_of(value) >= least) & (weight >= min_p), weight, 0.0).to(tl.float64)
            sums = tl.where(numbers == start // BLOCK, tl.sum(kept, 0), sums)
        target = uniform(tl.load(ints + row * INTS + SEED), tl.load(lengths + row)) * tl.sum(sums, 0)
        # Rounding may leave the sum just short of the target: then the last token with weight.
        last_block = tl.max(tl.where(sums > 0, numbers, 0), 0)
        block = tl.minimum(tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0), last_block)
        before = tl.sum(tl.where(numbers < block, sums, 0.0), 0)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        value = scaled_block(logits, changed, is_changed, first, block * BLOCK, temperature, VOCAB, BLOCK)
        weight = tl.exp(value - top)
        is_kept = (key_of(value) >= least) & (weight >= min_p) & (weight > 0)
        kept = tl.where(is_kept, weight, 0.0).to(tl.float64)
        passes = is_kept & (before + tl.cumsum(kept, 0) > target)
        last = tl.max(tl.where(is_kept, ids, 0), 0)
        token = tl.minimum(tl.min(tl.where(passes, ids, VOCAB), 0), last).to(tl.int64)
    tl.store(drawn + at, token)


# Where nothing goes `out`, its sizes are those of the rows, which vary.
@triton.jit(do_not_specialize=["out_stride", "out_rows", "num_parts", "pad_row"])
def commit_kernel(
    rows, status, best, best_at, finite, drawn, tokens, out_status, last_token, lengths, dead, changes, counts,
    out, place, out_stride, out_rows, pad_row, num_parts,
    VOCAB: tl.constexpr, IS_RANDOM: tl.constexpr, HAS_PENALTIES: tl.constexpr, HAS_OUT: tl.constexpr,
    MAX_PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row: the token, its status, and the row's state for the next step; padding keeps its own."""
    await_previous(EARLY)
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at)
    parts = tl.arange(0, MAX_PARTS)
    is_part = parts < num_parts
    tops = tl.load(best + at * num_parts + parts, mask=is_part, other=float("-inf"))
    # Of equal logits the first counts: parts lie in order, and a part names its first.
    part = tl.argmax(tops, 0)
    token = tl.load(best_at + at * num_parts + part).to(tl.int64)
    if IS_RANDOM:
        chosen = tl.load(drawn + at)
        token = tl.where(chosen >= 0, chosen, token)
    is_finite = tl.min(tl.load(finite + at * num_parts + parts, mask=is_part, other=1), 0) > 0
    own = tl.load(status + at)
    own = tl.where((own == FINE) & (is_finite == 0), FAILED, own)
    tl.store(tokens + at, token)
    tl.store(out_status + at, own)
    if HAS_OUT:
        slot = out + tl.load(place) * out_stride + at
        tl.store(slot, token)
        tl.store(slot + out_rows, own)
    is_real = row != pad_row
    tl.store(dead + row, (own == FAILED).to(tl.int32), mask=is_real)
    tl.store(last_token + row, token, mask=is_real)
    tl.store(lengths + row, tl.load(lengths + row) + 1, mask=is_real)
    if HAS_PENALTIES:
        counted = counts + row * VOCAB + token
        is_counted = is_real & ((tl.load(changes + row) & PENALTIES) != 0)
        tl.store(counted, tl.load(counted, mask=is_counted, other=0) + 1, mask=is_counted)


def sample_step(
    logits: torch.Tensor,
    rows: torch.Tensor,
    status: torch.Tensor,
    state: RowState,
    *,
    is_random: bool,
    has_penalties: bool,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses each row's token and makes it the row's next input. Returns tokens and final status, new, int64 [N].

    logits: [N, vocab], contiguous, left as they are. rows: int64 [N], effective, distinct but for state.pad_row, whose
    state stays. status: int64 [N], of the hidden states. Rows whose logits are not finite fail; their token is
    arbitrary. has_penalties: whether a row may have penalties, bias or tokens it may not take. out: int64
    [slots, 2, >= N], contiguous, and int64 [1], which slot: tokens and status go there too. Writes state.last_token,
    length, dead and, with penalties, output_counts of the rows.
    Launch: (N, parts) programs; N, where a row may be random; N.
    """
    count, vocab = logits.shape
    device = logits.device
    blocks = -(-vocab // _BLOCK)
    parts = 1
    while parts < _MAX_PARTS and 2 * parts * count <= _PROGRAMS and 2 * parts <= blocks:
        parts *= 2
    share = -(-blocks // parts) * _BLOCK
    best = torch.empty(count, parts, dtype=torch.float32, device=device)
    best_at = torch.empty(count, parts, dtype=torch.int32, device=device)
    finite = torch.empty(count, parts, dtype=torch.int32, device=device)
    # Each in memory of its own: a kernel is compiled anew for addresses that are no multiple of 16.
    tokens, out_status, drawn = (torch.empty(count, dtype=torch.int64, device=device) for _ in range(3))
    counts = in_prompt = bias = stops = rows
    changed = state.floats
    if has_penalties:
        counts, in_prompt = state.ensure_penalties()
        bias, stops = state.ensure_masks()
        changed = torch.empty(count, vocab, dtype=torch.float32, device=device)
    best_kernel[(count, parts)](
        logits, rows, state.floats, state.length, state.changes, state.min_length, counts, in_prompt, bias, stops,
        changed, best, best_at, finite, parts, share,
        VOCAB=vocab, HAS_PENALTIES=has_penalties, BLOCK=_BLOCK, num_warps=8, **early_options(),
    )  # fmt: skip
    if is_random:
        draw_kernel[(count,)](
            logits, changed, rows, state.length, state.floats, state.ints,
            state.changes, state.min_length, best, finite, drawn, parts,
            VOCAB=vocab, MAX_PARTS=_MAX_PARTS, WAYS=_WAYS, HAS_PENALTIES=has_penalties,
            BLOCKS=triton.next_power_of_2(blocks), BLOCK=_BLOCK, num_warps=16, **early_options(),
        )  # fmt: skip
    values, place = (rows, rows) if out is None else out
    commit_kernel[(count,)](
        rows, status, best, best_at, finite, drawn, tokens, out_status,
        state.last_token, state.length, state.dead, state.changes, counts,
        values, place, values.stride(0), values.shape[-1], state.pad_row, parts,
        VOCAB=vocab, IS_RANDOM=is_random, HAS_PENALTIES=has_penalties, HAS_OUT=out is not None, MAX_PARTS=_MAX_PARTS,
        num_warps=1, **early_options(),
    )  # fmt: skip
    return tokens, out_status
