"""What the API knows about the model it serves, and the two things it needs a tokenizer for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, runtime_checkable

from common.errors import UnknownModel
from common.messages import U32
from common.model_files.description import ModelDescription, SamplingDefaults
from scheduler_svc.messages import CoreState
from scheduler_svc.text_cursor import Decoder

MIN_REPETITION_PENALTY: Final = 0.01


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model's description. What is empty or 0 is taken from the executor, once one has connected."""

    name: str = ""
    aliases: tuple[str, ...] = ()
    model_hash: str = ""
    vocab_size: int = 0
    max_context: int = 0
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    architecture: str = ""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)

    @classmethod
    def of(cls, description: ModelDescription, name: str = "") -> "ServedModel":
        """`name`: what clients call it, beside its own id. Defaults no caller could ask for are left out."""
        defaults = description.default_sampling
        if defaults.top_p == 0:
            defaults = replace(defaults, top_p=None)
        if defaults.repetition_penalty is not None and defaults.repetition_penalty < MIN_REPETITION_PENALTY:
            defaults = replace(defaults, repetition_penalty=None)
        return cls(
            name=name or description.id,
            aliases=(description.id,) if name else (),
            model_hash=description.hash,
            vocab_size=description.vocab_size,
            max_context=description.max_positions,
            eos_ids=description.eos_ids,
            bos_id=description.bos_id,
            architecture=description.architecture,
            defaults=defaults,
        )

    def resolve(self, state: CoreState) -> "ServedModel":
        """Fills what is missing from the executor's answer. A smaller vocabulary or context of the executor wins."""
        info = state.info
        if info is None:
            return self
        return replace(
            self,
            name=self.name or info.model_id,
            model_hash=self.model_hash or info.model_hash,
            vocab_size=info.vocab_size,
            max_context=state.max_context or info.max_context,
            eos_ids=self.eos_ids or info.eos_ids,
        )

    def check_name(self, asked: str) -> None:
        """Raises UnknownModel when `asked` names another model; empty is whatever is served."""
        if asked and asked != self.name and asked not in self.aliases:
            raise UnknownModel(f"this server serves {self.name!r}, not {asked[:128]!r}", field="model")


class ChatTurn(Protocol):
    """One message of a conversation."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


class TextTokenizer(Protocol):
    """Text to tokens and back. Called from several threads; stateless but for the decoders it makes.

    Methods raise InvalidInput for what the caller got wrong (a template that fails, ids out of range).
    """

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each."""
        ...

    def apply_chat_template(
        self, messages: Sequence[ChatTurn], template: str = "", add_generation_prompt: bool = True
    ) -> str:
        """The conversation as text, special tokens spelled out: encode it with add_special_tokens=False."""
        ...

    def decoder(self, prompt_ids: Sequence[int] | U32 = ()) -> Decoder:
        """For a completion. `prompt_ids`: the whole prompt, which may end in the middle of a character."""
        ...


@runtime_checkable
class ExportableTokenizer(Protocol):
    """A tokenizer that can be handed to a gateway."""

    def files(self) -> Mapping[str, bytes]:
        """Hugging Face's files by name. May take a second: call it off the event loop."""
        ...
