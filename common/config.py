"""Configuration of both services: one set of names, three places to say them.

`max_num_seqs` is the flag `--max-num-seqs`, the variable `STEPWIRE_MAX_NUM_SEQS` and the YAML key `max_num_seqs`.
Precedence: flag, environment, file, default. One file (`--config` or STEPWIRE_CONFIG) serves both services: keys at its
top go to whichever service has them, keys below `scheduler:` and `executor:` to that service alone, which wins; in the
same way STEPWIRE_EXECUTOR_LISTEN means one service where STEPWIRE_LISTEN would mean both.

Everything is read once and strictly: an unknown flag, variable or key is a ConfigError that names it and the closest
known one. All three places hold text, so a value means the same wherever it stands.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final, Generic, Literal, NoReturn, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

from common.config_sources import PREFIX, flag_of, from_environment, from_file, from_flags, from_standards
from common.errors import ConfigError

# A service that ends with this status was told something wrong (configuration, model files, a port that is taken):
# starting it again can not help, and `stepwire up` does not try.
EXIT_CONFIG: Final = 2

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_size(value: object) -> object:
    """Bytes from "2GiB", "512MiB", "1.5GB" (1000s) or a plain number. Other kinds of value are left to pydantic."""
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value.strip())
    if found is None or (found[3] and not found[2]):
        raise ValueError("not a size: write 2GiB, 512MiB, 1.5GB or a number of bytes")
    power = " kmgt".index(found[2].lower() or " ")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def split_list(value: object) -> object:
    """A list from text with commas."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def check_listen(value: str) -> str:
    """An address a server can bind: host:port (port 0: any free one), [v6]:port, or unix:path."""
    if value.startswith("unix:"):
        path = value.removeprefix("unix:").removeprefix("//")
        if not path:
            raise ValueError("unix: needs a path")
        if len(os.fsencode(path)) > 107:
            raise ValueError("a unix socket's path may have at most 107 bytes")
        return value
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535 or (":" in host and host[0] != "["):
        raise ValueError("not an address: write host:port, [v6]:port or unix:path")
    return value


def check_http(value: str) -> str:
    """An address an HTTP server can bind, or nothing."""
    if value.startswith("unix:"):
        raise ValueError("write host:port or [v6]:port")
    return check_listen(value) if value else value


def check_target(value: str) -> str:
    """Any gRPC target that names a port or a scheme."""
    if ":" not in value:
        raise ValueError(f"{value!r} is not an address: write host:port or unix:path")
    return value


def is_text(value: str) -> bool:
    """Whether it is Unicode text. Arguments and variables may hold other bytes, which only file names can have."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


Size = Annotated[int, BeforeValidator(parse_size)]
Listen = Annotated[str, BeforeValidator(check_listen)]


class ServiceConfig(BaseModel):
    """What both services have. Frozen; made by `load_config`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, protected_namespaces=()
    )
    service: ClassVar[str]

    model: str = Field(default="", description="directory, GGUF file or hub id; empty: the built-in default model")
    load_format: Literal["auto", "dummy"] = Field(
        default="auto", description="dummy: no weight files are read; weights are random, in the shapes of config.json"
    )
    listen: Listen
    address_file: Path | None = Field(
        default=None, description="the bound address is written here once the server listens"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least level logged")
    metrics_listen: Annotated[str, BeforeValidator(check_http)] = Field(
        default="", description="where Prometheus finds metrics (/metrics): host:port; empty: nowhere"
    )
    otlp_endpoint: str = Field(
        default="",
        description="where traces go (OTLP/gRPC); empty: OTEL_EXPORTER_OTLP_ENDPOINT, else nothing is exported",
    )


C = TypeVar("C", bound=ServiceConfig)


@dataclass(frozen=True)
class Loaded(Generic[C]):
    """A configuration and, for each of its names, where the value came from ("default" included)."""

    config: C
    sources: Mapping[str, str]

    def listing(self) -> str:
        """One line per name, for the start of the log. Secrets are masked."""
        shown = {name: masked(getattr(self.config, name)) for name in type(self.config).model_fields}
        wide, value_wide = max(map(len, shown)), min(40, max(map(len, shown.values())))
        lines = [f"  {name:<{wide}}  {text:<{value_wide}}  {self.sources[name]}" for name, text in shown.items()]
        return "\n".join([f"{self.config.service} configuration", *lines])


def masked(value: object) -> str:
    """A value as it may be logged: secrets hidden, also those inside a URL."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, SecretStr):
        return "***"
    if isinstance(value, tuple):
        return ",".join(masked(v) for v in value)
    return re.sub(r"(?<=://)[^/@]*@", "***@", str(value))


def load_config(kind: type[C], argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Loaded[C]:
    """Reads flags, environment and file into a `kind`. `--help` prints the names and leaves with SystemExit(0).

    Raises ConfigError naming what is wrong, where it stands and, for unknown names, the closest known one.
    """
    environ = os.environ if environ is None else environ
    fields = kind.model_fields
    if {"-h", "--help"} & set(argv):
        sys.stdout.write(help_text(kind))
        raise SystemExit(0)
    flags, file = from_flags(fields, argv)
    variables = from_environment(kind.service, fields, environ)
    file = file or environ.get(PREFIX + "CONFIG", "")
    given = from_file(kind.service, fields, file) if file else {}
    layers = (flags, variables, given, from_standards(fields, environ))
    values: dict[str, str] = {}
    sources = dict.fromkeys(fields, "default")
    for layer in reversed(layers):
        for name, (text, source) in layer.items():
            values[name], sources[name] = text, source
    for name, text in values.items():
        if name != "model" and fields[name].annotation != Path | None and not is_text(text):
            raise ConfigError(f"{name} {text!a} ({sources[name]}): not UTF-8 text", field=name)
    try:
        return Loaded(kind.model_validate(values), sources)
    except ValidationError as error:
        _reject(error, sources)


def _reject(error: ValidationError, sources: Mapping[str, str]) -> NoReturn:
    """The first thing pydantic found, as one line."""
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    message = first["msg"].removeprefix("Value error, ")
    if not name:
        raise ConfigError(message) from None
    given = "" if first["type"] == "missing" else f" {first['input']!r}"
    raise ConfigError(f"{name}{given} ({sources.get(name, 'default')}): {message}", field=name) from None


def help_text(kind: type[ServiceConfig]) -> str:
    """What --help prints: every flag with its default and meaning."""
    lines = [
        f"usage: python -P -m {kind.service}_svc [--config FILE] [--flag VALUE ...]",
        "",
        f"Each flag --some-name is also the variable {PREFIX}SOME_NAME ({PREFIX}{kind.service.upper()}_SOME_NAME for "
        "this service alone)",
        f"and the key some_name of the YAML file (at its top, or below {kind.service}:). Flags win over variables,",
        "variables over the file.",
        "",
    ]
    for name, field in kind.model_fields.items():
        default = "none" if field.default is None else masked(field.default)
        lines.append(f"  {flag_of(name):<26} {field.description or ''} (default: {default})")
    return "\n".join(lines) + "\n"
