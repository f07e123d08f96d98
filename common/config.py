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
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, ClassVar, Final, Generic, Literal, NoReturn, TypeVar, cast, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

from common.errors import ConfigError

PREFIX: Final = "STEPWIRE_"
SERVICES: Final = ("scheduler", "executor")

# A service that ends with this status was told something wrong (configuration, model files, a port that is taken):
# starting it again can not help, and `stepwire up` does not try.
EXIT_CONFIG: Final = 2

# Services share an environment and a file but not their code (the scheduler's process never loads the executor's), so
# each has to know which names are the other's. tests/unit/config compares these with the classes.
COMMON_NAMES: Final = frozenset({"model", "listen", "address_file", "log_level", "otlp_endpoint", "metrics_listen"})
SCHEDULER_NAMES: Final = COMMON_NAMES | {
    "executors", "pipeline_depth", "max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk",
    "enable_prefix_cache", "policy", "max_queued_requests", "max_queued_tokens", "slow_reader_s", "drain_s",
    "tls_cert", "tls_key", "tls_client_ca", "auth_tokens_file", "max_message_bytes", "api_workers",
    "served_model_name", "trace_window_interval_s", "trace_sample_ratio", "slow_step_ms",
}  # fmt: skip
EXECUTOR_NAMES: Final = COMMON_NAMES | {
    "device", "dtype", "numerics", "block_size", "num_blocks", "kv_cache_memory", "max_num_seqs",
    "max_tokens_per_step", "max_context", "attention_backend", "threads", "lease_s", "drain_s",
}  # fmt: skip
ALL_NAMES: Final = SCHEDULER_NAMES | EXECUTOR_NAMES

# Read elsewhere: the command line's own variables.
OTHER_VARIABLES: Final = frozenset({"STEPWIRE_CONFIG", "STEPWIRE_ADDRESS", "STEPWIRE_TOKEN", "STEPWIRE_TRACEBACK"})
# Kubernetes puts these into every container beside a Service named "stepwire".
_KUBERNETES = re.compile(r"_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")

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


def check_target(value: str) -> str:
    """Any gRPC target that names a port or a scheme."""
    if ":" not in value:
        raise ValueError(f"{value!r} is not an address: write host:port or unix:path")
    return value


Size = Annotated[int, BeforeValidator(parse_size)]
Listen = Annotated[str, BeforeValidator(check_listen)]


class ServiceConfig(BaseModel):
    """What both services have. Frozen; made by `load_config`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, protected_namespaces=()
    )
    service: ClassVar[str]

    model: str = Field("", description="directory, GGUF file or hub id; empty: the built-in default model")
    listen: Listen
    address_file: Path | None = Field(None, description="the bound address is written here once the server listens")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level logged")
    otlp_endpoint: str = Field(
        "", description="where traces go (OTLP/gRPC); empty: OTEL_EXPORTER_OTLP_ENDPOINT, else nothing is exported"
    )
    metrics_listen: Annotated[str, BeforeValidator(lambda v: check_listen(v) if v else v)] = Field(
        "", description="host:port of the Prometheus page; empty: none"
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


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def load_config(kind: type[C], argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Loaded[C]:
    """Reads flags, environment and file into a `kind`. `--help` prints the names and leaves with SystemExit(0).

    Raises ConfigError naming what is wrong, where it stands and, for unknown names, the closest known one.
    """
    environ = os.environ if environ is None else environ
    flags, file = _from_flags(kind, argv)
    variables = _from_environment(kind, environ)
    file = file or environ.get(PREFIX + "CONFIG", "")
    layers = (flags, variables, _from_file(kind, file) if file else {})
    values: dict[str, str] = {}
    sources = dict.fromkeys(kind.model_fields, "default")
    for layer in reversed(layers):
        for name, (text, source) in layer.items():
            values[name], sources[name] = text, source
    try:
        return Loaded(kind.model_validate(values), sources)
    except ValidationError as error:
        _reject(error, sources)


Layer = dict[str, tuple[str, str]]  # name -> (text, where it stands)


def _reject(error: ValidationError, sources: Mapping[str, str]) -> NoReturn:
    """The first thing pydantic found, as one line."""
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    message = first["msg"].removeprefix("Value error, ")
    if not name:
        raise ConfigError(message) from None
    given = "" if first["type"] == "missing" else f" {first['input']!r}"
    raise ConfigError(f"{name}{given} ({sources.get(name, 'default')}): {message}", field=name) from None


def closest(given: str, known: Sequence[str]) -> str:
    """A hint at the known name most like `given`, ready to follow a complaint; empty when none is like it."""
    close = get_close_matches(given, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _unknown(what: str, given: str, known: Sequence[str]) -> ConfigError:
    return ConfigError(f"unknown {what} {given}{closest(given, known)}", field=given)


def _is_bool(kind: type[ServiceConfig], name: str) -> bool:
    return kind.model_fields[name].annotation is bool


def _is_list(kind: type[ServiceConfig], name: str) -> bool:
    return get_origin(kind.model_fields[name].annotation) is tuple


def _from_flags(kind: type[ServiceConfig], argv: Sequence[str]) -> tuple[Layer, str]:
    """Flags and the value of --config. `--x v`, `--x=v`; `--x` and `--no-x` for truth values; lists may repeat."""
    found: Layer = {}
    file = ""
    known = {flag_of(name): name for name in kind.model_fields}
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        flag, equals, value = argument.partition("=")
        if flag in ("-h", "--help"):
            sys.stdout.write(help_text(kind))
            raise SystemExit(0)
        positive = flag.replace("--no-", "--", 1)
        if flag not in known and positive in known and _is_bool(kind, known[positive]) and not equals:
            found[known[positive]] = ("false", f"flag {flag}")
            continue
        if flag not in known and flag != "--config":
            if not flag.startswith("-"):
                raise ConfigError(f"unexpected argument {argument!r}", field=argument)
            raise _unknown("flag", flag, [*known, "--config"])
        if not equals:
            if flag in known and _is_bool(kind, known[flag]):
                value = "true"
            elif not rest:
                raise ConfigError(f"{flag} needs a value", field=flag)
            else:
                value = rest.pop(0)
        if flag == "--config":
            file = value
            continue
        name = known[flag]
        if _is_list(kind, name) and name in found:
            value = f"{found[name][0]},{value}"
        found[name] = (value, f"flag {flag}")
    return found, file


def _from_environment(kind: type[ServiceConfig], environ: Mapping[str, str]) -> Layer:
    """Variables of this service. An empty one is as good as none (compose files write `X: ${X:-}`)."""
    mine = f"{PREFIX}{kind.service.upper()}_"
    others = tuple(f"{PREFIX}{service.upper()}_" for service in SERVICES if service != kind.service)
    found: Layer = {}
    specific: Layer = {}
    for variable, value in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or _KUBERNETES.search(variable):
            continue
        if variable.startswith(others):
            continue  # that service checks its own
        name = variable.removeprefix(mine).removeprefix(PREFIX).lower()
        if name not in (kind.model_fields if variable.startswith(mine) else ALL_NAMES):
            known = [PREFIX + n.upper() for n in sorted(ALL_NAMES)] + [mine + n.upper() for n in kind.model_fields]
            raise _unknown("environment variable", variable, [*known, *sorted(OTHER_VARIABLES)])
        if name in kind.model_fields and value:
            (specific if variable.startswith(mine) else found)[name] = (value, f"environment {variable}")
    standard = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    if standard and "otlp_endpoint" in kind.model_fields:
        found.setdefault("otlp_endpoint", (standard, "environment OTEL_EXPORTER_OTLP_ENDPOINT"))
    return found | specific


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice; PyYAML alone would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"{key_node.start_mark.name}:{line}: key {key} stands twice", field=str(key))
            seen.add(key)
        return cast("dict[object, object]", super().construct_mapping(node, deep=deep))


def _from_file(kind: type[ServiceConfig], path: str) -> Layer:
    try:
        with Path(path).open(encoding="utf-8") as stream:
            content = yaml.load(stream, Loader=_StrictLoader)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", field="config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}", field="config") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold keys and values", field="config")
    sections = {service: content.pop(service, None) or {} for service in SERVICES}
    own = sections[kind.service]
    for service, section in sections.items():
        if not isinstance(section, dict):
            raise ConfigError(f"{path}: {service}: must hold keys and values", field=service)
    shared = _texts(path, "", content, ALL_NAMES)
    special = _texts(path, f"{kind.service}.", own, kind.model_fields)
    return {name: entry for name, entry in shared.items() if name in kind.model_fields} | special


def _texts(path: str, where: str, section: Mapping[object, object], known: Sequence[str] | object) -> Layer:
    """Entries of one part of the file as text, an empty one left out."""
    names = sorted(cast("frozenset[str]", known))
    found: Layer = {}
    for key, value in section.items():
        if key not in names:
            problem = _unknown("key", f"{where}{key}", [*(where + name for name in names), *SERVICES])
            raise ConfigError(f"{path}: {problem.message}", field=f"{where}{key}")
        if value is None:
            continue
        if isinstance(value, list) and all(isinstance(v, str | int | float) for v in value):
            text = ",".join(str(v) for v in value)
        elif isinstance(value, bool):
            text = str(value).lower()
        elif isinstance(value, str | int | float):
            text = str(value)
        else:
            raise ConfigError(f"{path}: {where}{key}: must be a plain value", field=f"{where}{key}")
        found[str(key)] = (text, f"file {path}: {where}{key}")
    return found


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
