"""The processes that `bench.streaming` measures: the real services around an executor that computes nothing.

python -P -m bench.streaming_service executor MAX_NUM_SEQS STEP_NS ADDRESS_FILE
python -P -m bench.streaming_service scheduler FLAGS...
python -P -m bench.streaming_service worker FD
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from bench.streaming_executor import VOCAB, ClockExecutor
from common.config import load_config
from common.messages import U32
from executor_svc.app import ServeOptions
from executor_svc.app import serve as serve_executor
from scheduler_svc.api.served_model import ChatTurn, ServedModel
from scheduler_svc.app import Parts, serve
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.detokenizer import DecodeRules, IncrementalDecoder, PieceTable, byte_alphabet
from scheduler_svc.huge_heap import exec_with_huge_heap
from scheduler_svc.workers.process import run_worker


class BenchTokenizer:
    """Text for each id of the clock's vocabulary, decoded as a byte-level BPE model's is; no way back."""

    has_chat_template = False

    def __init__(self) -> None:
        space = next(c for c, byte in byte_alphabet().items() if byte == ord(" "))
        rules = DecodeRules(byte_level=True)
        self._table = PieceTable(lambda i: f"{space}w{i % 997}", VOCAB, frozenset({0}), frozenset(), rules)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return IncrementalDecoder(self._table).push(token_ids)

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        return [self.decode([i]) for i in token_ids]

    def apply_chat_template(
        self, messages: Sequence[ChatTurn], template: str = "", add_generation_prompt: bool = True
    ) -> str:
        return "".join(message.content for message in messages)

    def decoder(self, prompt_ids: Sequence[int] | U32 = ()) -> IncrementalDecoder:
        return IncrementalDecoder(self._table, prompt_ids=prompt_ids)


def make_parts(config: SchedulerConfig) -> Parts:
    return Parts(ServedModel(), BenchTokenizer())


def main(argv: list[str]) -> int:
    kind, *rest = argv
    if kind == "executor":
        max_num_seqs, step_ns, file = rest
        options = ServeOptions("127.0.0.1:0", address_file=Path(file))
        return uvloop.run(serve_executor(options, lambda: ClockExecutor(int(max_num_seqs), int(step_ns))))
    if kind == "worker":
        return run_worker(int(rest[0]), make_parts)
    config = load_config(SchedulerConfig, rest).config
    worker = [sys.executable, "-P", "-m", "bench.streaming_service", "worker"]
    return uvloop.run(serve(config, make_parts(config), worker))


if __name__ == "__main__":
    exec_with_huge_heap()  # as the service does
    sys.exit(main(sys.argv[1:]))
