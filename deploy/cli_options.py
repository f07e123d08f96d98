"""Options that several commands of `stepwire` share, as groups a command takes whole."""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from stepwire_client import AsyncClient, Client, GenerateOptions, Tls

DEFAULT_ADDRESS = "127.0.0.1:50051"


@dataclass(frozen=True, slots=True)
class Connection:
    """Which scheduler, and how to be let in."""

    address: Annotated[str, typer.Option(envvar="STEPWIRE_ADDRESS", help="the scheduler's API")] = DEFAULT_ADDRESS
    token: Annotated[str, typer.Option(envvar="STEPWIRE_TOKEN", help="bearer token", show_default=False)] = ""
    tls_ca: Annotated[Path | None, typer.Option(help="PEM authorities to trust; turns TLS on")] = None
    tls_cert: Annotated[Path | None, typer.Option(help="PEM client certificate")] = None
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of the client certificate")] = None

    def __post_init__(self) -> None:
        """Before the command loads gRPC: that would write each failed handshake on standard error, told anyway."""
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

    def client(self) -> "Client":
        from stepwire_client import Client

        return Client(self.address, token=self.token or None, tls=self._tls())

    def async_client(self) -> "AsyncClient":
        """Without a second attempt of its own: for who counts its attempts itself."""
        from stepwire_client import AsyncClient, Retry

        return AsyncClient(self.address, token=self.token or None, tls=self._tls(), retry=Retry(attempts=1))

    def _tls(self) -> "Tls | None":
        from stepwire_client import Tls

        given = self.tls_ca or self.tls_cert or self.tls_key
        return Tls(self.tls_ca, self.tls_cert, self.tls_key) if given else None


@dataclass(frozen=True, slots=True)
class Generating:
    """What to generate, at most and how. What is not given is left to the server."""

    model: Annotated[str, typer.Option(help="refuse to be answered by another model")] = ""
    max_tokens: Annotated[int | None, typer.Option(min=1, help="tokens to generate, at most")] = None
    temperature: Annotated[float | None, typer.Option(help="0: always the most likely token")] = None
    top_k: Annotated[int | None, typer.Option(help="sample from the k most likely; 0: all")] = None
    top_p: Annotated[float | None, typer.Option(help="sample from the smallest set with this probability")] = None
    min_p: Annotated[float | None, typer.Option(help="drop tokens less likely than this share of the best")] = None
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same answer")] = None
    stop: Annotated[list[str] | None, typer.Option(help="end at this text; may repeat")] = None
    deadline: Annotated[float | None, typer.Option(help="seconds for the whole call")] = None

    def options(self) -> "GenerateOptions":
        """For a client's call; `deadline` is no part of them."""
        given: dict[str, Any] = {
            "model": self.model or None, "max_tokens": self.max_tokens, "temperature": self.temperature,
            "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p, "seed": self.seed,
            "stop_strings": self.stop or None,
        }  # fmt: skip
        options: GenerateOptions = {}
        chosen = {name: value for name, value in given.items() if value is not None}
        options.update(chosen)  # type: ignore[typeddict-item]
        return options


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer: a parameter whose type is a dataclass becomes the options that are its fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    shown: list[inspect.Parameter] = []

    def show(name: str, default: object, hint: object) -> None:
        shown.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint))

    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            groups[parameter.name] = kind
            options = get_type_hints(kind, include_extras=True)
            for field in fields(kind):
                show(field.name, field.default, options[field.name])
        else:
            show(parameter.name, parameter.default, kind)

    @wraps(command)
    def flat(**values: Any) -> None:
        made = {name: kind(**{f.name: values.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        command(**values, **made)

    flat.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return flat
