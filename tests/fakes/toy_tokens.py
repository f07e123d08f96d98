"""What the toy executor computes: tokens, logits and logprobs as pure functions of the sequence. Also the oracle."""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

from common.messages import F32, U32, Logprobs, Sampling, Timings, f32, u32

CHOSEN_LOGIT = 4.0


def _digest(tokens: U32, seed: int, position: int) -> int:
    data = struct.pack("<QQ", seed, position) + tokens.astype("<u4").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=16).digest(), "little")


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature == 0 or sampling.top_k == 1


def choose_token(
    tokens: U32, prompt_len: int, sampling: Sampling, vocab_size: int, eos_ids: tuple[int, ...], eos_chance: float
) -> int:
    """The token at position len(tokens), from the sequence before it, the seed (unless greedy) and the position.

    EOS comes up only at `eos_chance`. min_tokens, stop_ids, ignore_eos and allowed_ids are obeyed; filters and
    penalties change nothing.
    """
    position = len(tokens)
    draw = _digest(tokens, 0 if is_greedy(sampling) else sampling.seed, position)
    masked: set[int] = set()
    if position - prompt_len < sampling.min_tokens:
        masked.update(sampling.stop_ids)
        if not sampling.ignore_eos:
            masked.update(eos_ids)
    if sampling.allowed_ids:
        free = [t for t in sampling.allowed_ids if t not in masked] or list(sampling.allowed_ids)
        return free[draw % len(free)]
    if eos_ids and eos_ids[0] not in masked and (draw >> 64) % 1_000_000 < eos_chance * 1_000_000:
        return eos_ids[0]
    token = draw % vocab_size
    for _ in range(vocab_size):
        if token not in masked and token not in eos_ids:
            break
        token = (token + 1) % vocab_size
    return token


def toy_logits(tokens: U32, vocab_size: int, eos_ids: tuple[int, ...]) -> F32:
    """[vocab_size] float32 logits for position len(tokens); the largest is the greedy token's (without EOS chance)."""
    seed = _digest(tokens, 1, len(tokens))
    logits: F32 = np.random.default_rng(seed).random(vocab_size, dtype=np.float32)
    greedy = choose_token(tokens, len(tokens), Sampling(0, 1, temperature=0.0), vocab_size, eos_ids, 0.0)
    logits[greedy] = CHOSEN_LOGIT
    return logits


def log_softmax(logits: F32) -> F32:
    shifted = logits.astype(np.float64) - float(logits.max())
    result: F32 = (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)
    return result


def best(logprobs: F32, count: int) -> U32:
    """The `count` most likely ids, most likely first; ties by id."""
    order: U32 = np.argsort(-logprobs, kind="stable")[:count].astype(np.uint32)
    return order


def expected_tokens(
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    vocab_size: int,
    eos_ids: tuple[int, ...] = (),
    eos_chance: float = 0.0,
    max_context: int = 1 << 30,
) -> list[int]:
    """The generated tokens of an undisturbed run: the ending EOS or stop token is the last one."""
    tokens = np.empty(len(prompt) + 64, dtype=np.uint32)
    tokens[: len(prompt)] = prompt
    length = len(prompt)
    limit = min(sampling.max_tokens or max_context, max_context - len(prompt))
    generated: list[int] = []
    while len(generated) < limit:
        token = choose_token(tokens[:length], len(prompt), sampling, vocab_size, eos_ids, eos_chance)
        generated.append(token)
        if len(generated) > sampling.min_tokens or not sampling.min_tokens:
            ends = token in sampling.stop_ids or (token in eos_ids and not sampling.ignore_eos)
            if ends:
                break
        if length == len(tokens):
            tokens = np.concatenate([tokens, np.empty(length, dtype=np.uint32)])
        tokens[length] = token
        length += 1
    return generated


def prompt_record(before: U32, token: int, count: int, vocab_size: int, eos_ids: tuple[int, ...]) -> bytes:
    """The PROMPT_LOGPROBS record of `token` behind the tokens `before`, with `count` - 1 most likely ones."""
    logprobs = log_softmax(toy_logits(before, vocab_size, eos_ids))
    top = best(logprobs, count - 1)
    chosen = np.array([logprobs[token]], dtype="<f4").tobytes()
    return chosen + top.astype("<u4").tobytes() + logprobs[top].astype("<f4").tobytes()


def logprob_columns(entries: list[tuple[int, float, U32, F32]]) -> Logprobs:
    return Logprobs(
        rows=u32(row for row, _, _, _ in entries),
        chosen=f32(chosen for _, chosen, _, _ in entries),
        top_counts=u32(len(ids) for _, _, ids, _ in entries),
        top_ids=u32(int(i) for _, _, ids, _ in entries for i in ids),
        top_logprobs=f32(float(v) for _, _, _, values in entries for v in values),
    )


def made_up_timings(received_ns: int) -> Timings:
    """Made up, but in order."""
    start = received_ns + 1_000
    return Timings(
        received_ns=received_ns,
        prepare_start_ns=start,
        prepare_end_ns=start + 1_000,
        copy_in_start_ns=start + 1_000,
        copy_in_end_ns=start + 2_000,
        launched_ns=start + 2_000,
        device_start_ns=start + 2_000,
        device_end_ns=start + 10_000,
        copy_out_end_ns=start + 11_000,
    )
