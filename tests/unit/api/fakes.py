"""A core that does exactly what the test says, and a tokenizer whose tokens are bytes."""

import asyncio
import codecs
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from common.errors import DuplicateRequest, RequestAborted
from common.messages import U32, ExecutorInfo, u32
from scheduler_svc.api.served_model import ChatTurn, ServedModel
from scheduler_svc.api.worker import ApiWorker
from scheduler_svc.core.forks import choices
from scheduler_svc.messages import (
    Abort,
    AbortAnswer,
    Accepted,
    Cancel,
    CoreState,
    Drain,
    DrainAnswer,
    Ended,
    Extras,
    Finish,
    FinishReason,
    FromCore,
    GetStats,
    Refused,
    ResetAnswer,
    ResetPrefixCache,
    Stats,
    StatsAnswer,
    Submit,
    ToCore,
    TokenBatch,
    makes_room,
)

EOS = 256
BOS = 257
VOCAB = 258

INFO = ExecutorInfo(
    model_id="bytes",
    model_hash="hash",
    vocab_size=VOCAB,
    eos_ids=(EOS,),
    num_rows=72,
    max_num_seqs=8,
    max_blocks_per_row=64,
    block_size=16,
    num_blocks=1024,
    max_tokens_per_step=256,
    max_context=1024,
    features=("logprobs", "raw_logits", "prompt_logprobs"),
)
READY = CoreState(ready=True, draining=False, info=INFO, max_context=1024, max_prompt_tokens=1000)
MODEL = ServedModel(name="bytes", eos_ids=(EOS,), bos_id=BOS)


class ByteDecoder:
    """Bytes to text; incomplete UTF-8 is held back. EOS and BOS have no text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(i for i in token_ids if i < 256))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    has_chat_template = True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([BOS] if add_special_tokens else []) + list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in token_ids if i < 256).decode("utf-8", "replace")

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        return [f"<{i}>" for i in token_ids]

    def apply_chat_template(
        self, messages: Sequence[ChatTurn], template: str = "", add_generation_prompt: bool = True
    ) -> str:
        return "".join(f"{m.role}:{m.content}\n" for m in messages) + ("assistant:" if add_generation_prompt else "")

    def decoder(self, prompt_ids: Sequence[int] | U32 = ()) -> ByteDecoder:
        return ByteDecoder()


Script = Callable[[Submit], Sequence[tuple[Sequence[int], int]]]


class FakeCore:
    """Records what the worker sends and answers in the order asked, one event loop turn later.

    `script` gives, for each accepted request, the (tokens, reason) entries to deliver, one loop turn each.
    """

    def __init__(self, worker: ApiWorker, state: CoreState = READY, script: Script | None = None) -> None:
        self.worker = worker
        self.sent: list[ToCore] = []
        self.live: dict[int, Submit] = {}
        self.stats = Stats()
        self.mute = False  # answers nothing, as if stuck
        self.full: Exception | None = None  # raised on what is more work
        self._script = script
        self._tasks: set[asyncio.Task[None]] = set()
        worker.connect(self)
        worker.deliver(state)

    def of(self, kind: type) -> list[ToCore]:
        return [message for message in self.sent if isinstance(message, kind)]

    def send(self, message: ToCore) -> None:
        if self.full is not None and not makes_room(message):
            raise self.full
        self.sent.append(message)
        if self.mute:
            return
        match message:
            case Submit():
                self._submit(message)
            case Cancel() | Finish():
                self.live.pop(message.key, None)
            case Abort():
                keys = [key for key, request in self.live.items() if request.request_id == message.request_id]
                for key in keys:
                    del self.live[key]
                    self._later(Ended(key, RequestAborted("aborted")))
                self._later(AbortAnswer(message.call, bool(keys)))
            case ResetPrefixCache():
                self._later(ResetAnswer(message.call, dropped=5, forgotten=2))
            case GetStats():
                self._later(StatsAnswer(message.call, replace(self.stats, running=len(self.live))))
            case Drain():
                self.worker.deliver(replace(self.worker.state, ready=False, draining=True))
                self._later(DrainAnswer(message.call, len(self.live)))

    def tell(self, message: FromCore) -> None:
        self.worker.deliver(message)

    def emit(self, key: int, tokens: Sequence[int], reason: int = 0, extras: Extras | None = None) -> None:
        """One step that brought this to one request."""
        self.worker.deliver(batch([(key, tokens, reason)], {} if extras is None else {0: extras}))
        if reason:
            self.live.pop(key, None)

    def _submit(self, request: Submit) -> None:
        if any(other.request_id == request.request_id for other in self.live.values()):
            self._later(Refused(request.key, DuplicateRequest(f"{request.request_id!r} is live", field="request_id")))
            return
        self._later(Accepted(request.key))
        for choice in choices(request):
            self.live[choice.key] = choice
            if self._script is not None:
                task = asyncio.get_running_loop().create_task(self._run(choice, self._script(choice)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _run(self, request: Submit, entries: Sequence[tuple[Sequence[int], int]]) -> None:
        for tokens, reason in entries:
            await asyncio.sleep(0)
            if request.key not in self.live:
                return
            self.emit(request.key, tokens, reason)

    def _later(self, message: FromCore) -> None:
        asyncio.get_running_loop().call_soon(self.worker.deliver, message)


def batch(entries: Sequence[tuple[int, Sequence[int], int]], extras: dict[int, Extras] | None = None) -> TokenBatch:
    """(key, tokens, reason) entries as the columns a step brings."""
    return TokenBatch(
        keys=np.array([key for key, _, _ in entries], np.uint64),
        counts=u32([len(tokens) for _, tokens, _ in entries]),
        tokens=u32([token for _, tokens, _ in entries for token in tokens]),
        reasons=np.array([reason for _, _, reason in entries], np.uint8),
        cached=u32([0] * len(entries)),
        extras=extras or {},
    )


def say(text: str, reason: FinishReason = FinishReason.EOS) -> Script:
    """A model that answers `text`, one byte a step."""

    def script(request: Submit) -> list[tuple[list[int], int]]:
        steps: list[tuple[list[int], int]] = [([byte], 0) for byte in text.encode()]
        return [*steps, ([EOS], int(reason))]

    return script


def forever(request: Submit) -> list[tuple[list[int], int]]:
    return [([ord("a")], 0)] * 1_000_000
