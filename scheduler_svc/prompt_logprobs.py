"""Reading prompt logprobs, which come as bulk output."""

import numpy as np

from common.errors import SequenceFailed
from common.messages import Output
from scheduler_svc.messages import TopTokens


def parse_prompt_logprobs(output: Output, num: int) -> list[TopTokens]:
    """The records of a PROMPT_LOGPROBS output, as in OutputChunk of executor.proto. Raises SequenceFailed."""
    words = 1 + 2 * (num - 1)
    if len(output.data) != output.count * words * 4:
        raise SequenceFailed(f"prompt logprobs of {output.count} positions have {len(output.data)} bytes")
    raw = np.frombuffer(output.data, dtype="<u4").reshape(output.count, words)
    floats = raw.view("<f4")
    return [
        TopTokens(chosen, tuple(ids), tuple(logprobs))
        for chosen, ids, logprobs in zip(
            floats[:, 0].tolist(), raw[:, 1:num].tolist(), floats[:, num:].tolist(), strict=True
        )
    ]
