"""From the caller's input to prompt token ids. Long texts are tokenised on a few threads, never on the event loop."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from common.errors import InvalidInput, NotSupported, Overloaded, TooLarge
from common.messages import U32, u32
from scheduler_svc.api.served_model import TextTokenizer
from scheduler_svc.api.validation import Limits, check_token_ids
from stepwire.v1 import inference_pb2 as pb

INLINE_BYTES: Final = 1024
MAX_CHAT_MESSAGES: Final = 4096
MESSAGE_BYTES: Final = 16  # what a template writes around a message, at least
MAX_TEMPLATE_BYTES: Final = 64 * 1024

Result = TypeVar("Result")


class TextWorkers:
    """Runs tokenizer work. Short work runs at once on the event loop: a thread hop would cost more than it."""

    def __init__(self, workers: int = 2, max_pending: int = 256) -> None:
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")
        self._max_pending = max_pending
        self._pending = 0

    async def run(self, work: Callable[[], Result], num_bytes: int) -> Result:
        """Raises Overloaded when `max_pending` pieces of work wait already, and whatever `work` raises."""
        if num_bytes <= INLINE_BYTES:
            return work()
        if self._pending >= self._max_pending:
            raise Overloaded("too many texts wait for the tokenizer", limit=str(self._max_pending), retry_after_ms=200)
        self._pending += 1
        future = self._pool.submit(work)
        future.add_done_callback(self._done_from(asyncio.get_running_loop()))
        return await asyncio.wrap_future(future)

    def _done_from(self, loop: asyncio.AbstractEventLoop) -> Callable[[object], None]:
        """A cancelled caller's work still occupies its thread: it counts until the thread is done with it."""

        def done(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._count_down)

        return done

    def _count_down(self) -> None:
        self._pending -= 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class PromptReader:
    """Reads the `input` of a request. `tokenizer` None: only token ids are taken. Owned by the event loop."""

    def __init__(
        self,
        tokenizer: TextTokenizer | None,
        workers: TextWorkers,
        max_prompt_bytes: int,
        allow_templates: bool = False,
    ) -> None:
        """`allow_templates`: callers may send chat templates of their own."""
        self._allow_templates = allow_templates
        self._tokenizer = tokenizer
        self._workers = workers
        self._max_prompt_bytes = max_prompt_bytes

    @property
    def tokenizer(self) -> TextTokenizer:
        """Raises NotSupported when there is none."""
        if self._tokenizer is None:
            raise NotSupported("this server has no tokenizer; send token ids")
        return self._tokenizer

    async def read(self, request: pb.GenerateRequest, limits: Limits) -> U32:
        """The prompt's token ids. Raises InvalidInput, TooLarge, NotSupported, Overloaded."""
        match request.WhichOneof("input"):
            case "text":
                field = "text"
                ids = await self.encode(request.text, True, field) if request.text else []
            case "chat":
                field = "chat"
                _, ids = await self.read_chat(request.chat)
            case "token_ids":
                field = "token_ids.ids"
                _check_length(len(request.token_ids.ids), field, limits)  # before anything is copied
                ids = list(request.token_ids.ids)
            case _:
                raise InvalidInput("exactly one of text, chat and token_ids must be given", field="input")
        _check_length(len(ids), field, limits)
        prompt = u32(ids)
        check_token_ids(prompt, field, limits.vocab_size)
        return prompt

    async def tokenize(self, text: str, add_special_tokens: bool) -> tuple[list[int], list[str]]:
        """Ids, and the vocabulary's own spelling of each."""
        tokenizer = self.tokenizer

        def work() -> tuple[list[int], list[str]]:
            ids = tokenizer.encode(text, add_special_tokens)
            return ids, tokenizer.tokens(ids)

        return await self._workers.run(work, self._check_bytes(text, "text"))

    async def encode(self, text: str, add_special_tokens: bool, field: str) -> list[int]:
        tokenizer = self.tokenizer
        size = self._check_bytes(text, field)
        return await self._workers.run(lambda: tokenizer.encode(text, add_special_tokens), size)

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        tokenizer = self.tokenizer
        return await self._workers.run(lambda: tokenizer.decode(ids, skip_special_tokens), 4 * len(ids))

    async def read_chat(self, chat: pb.ChatInput, field: str = "chat") -> tuple[str, list[int]]:
        """The conversation as the template writes it, and its token ids."""
        tokenizer = self.tokenizer
        size = self._check_chat(chat, tokenizer, field)
        add_prompt = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True

        def work() -> tuple[str, list[int]]:
            text = tokenizer.apply_chat_template(chat.messages, chat.template, add_prompt)
            self._check_bytes(text, field)
            return text, tokenizer.encode(text, False)

        # A template of the caller's own may take any time.
        return await self._workers.run(work, INLINE_BYTES + 1 if chat.template else size)

    def _check_chat(self, chat: pb.ChatInput, tokenizer: TextTokenizer, field: str) -> int:
        if not chat.messages:
            raise InvalidInput(f"{field}.messages is empty", field=f"{field}.messages")
        if len(chat.messages) > MAX_CHAT_MESSAGES:
            raise TooLarge(
                f"{field}.messages has {len(chat.messages)} messages",
                field=f"{field}.messages",
                limit=str(MAX_CHAT_MESSAGES),
            )
        if len(chat.template.encode()) > MAX_TEMPLATE_BYTES:
            raise TooLarge(f"{field}.template is too long", field=f"{field}.template", limit=str(MAX_TEMPLATE_BYTES))
        if chat.template and not self._allow_templates:
            raise NotSupported(
                "this server takes no chat templates from callers (its setting allow_request_templates)",
                field=f"{field}.template",
            )
        if not chat.template and not tokenizer.has_chat_template:
            raise NotSupported("the model has no chat template; send one, or send text", field=f"{field}.template")
        size = 0
        for index, message in enumerate(chat.messages):
            if not message.role:
                raise InvalidInput(f"{field}.messages[{index}].role is empty", field=f"{field}.messages[{index}].role")
            size += MESSAGE_BYTES + self._check_bytes(message.role, f"{field}.messages[{index}].role")
            size += self._check_bytes(message.content, f"{field}.messages[{index}].content")
        if size > self._max_prompt_bytes:
            raise self._too_long(size, f"{field}.messages")
        return size

    def _check_bytes(self, text: str, field: str) -> int:
        size = len(text.encode())
        if size > self._max_prompt_bytes:
            raise self._too_long(size, field)
        return size

    def _too_long(self, size: int, field: str) -> TooLarge:
        return TooLarge(
            f"{field} has {size} bytes, at most {self._max_prompt_bytes} are taken",
            field=field,
            limit=str(self._max_prompt_bytes),
        )


def _check_length(length: int, field: str, limits: Limits) -> None:
    if length == 0:
        raise InvalidInput("the prompt is empty", field=field)
    if length > limits.max_prompt_tokens:
        raise TooLarge(
            f"the prompt has {length} tokens, at most {limits.max_prompt_tokens} are taken",
            field=field,
            limit=str(limits.max_prompt_tokens),
        )
