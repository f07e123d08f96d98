"""Where configuration stands: flags, environment and YAML file, each read into text by name.

Strict: what no service knows is a ConfigError naming it and the closest known name. See common/config.py.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Final, cast, get_origin

import yaml
from pydantic.fields import FieldInfo

from common.errors import ConfigError

PREFIX: Final = "STEPWIRE_"
SERVICES: Final = ("scheduler", "executor")

# Services share an environment and a file but not their code (the scheduler's process never loads the executor's), so
# each has to know which names are the other's. tests/unit/config compares these with the classes.
COMMON_NAMES: Final = frozenset(
    {"model", "load_format", "listen", "address_file", "log_level", "metrics_listen", "otlp_endpoint"}
)
SCHEDULER_NAMES: Final = COMMON_NAMES | {
    "executors", "pipeline_depth", "max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk",
    "enable_prefix_cache", "policy", "max_queued_requests", "max_queued_tokens", "slow_reader_s", "drain_s",
    "tls_cert", "tls_key", "tls_client_ca", "auth_tokens_file", "max_message_bytes", "api_workers",
    "max_unread_bytes", "worker_listen", "stream_interval_ms", "max_queue_time_ms", "long_prefill_token_threshold",
    "max_partial_prefills", "max_long_partial_prefills", "target_itl_ms", "priority_aging_ms", "tenant_weights",
    "prefill_share", "isolate_tenants", "input_token_weight", "output_token_weight", "max_preemptions",
    "allow_request_templates", "served_model_name", "trace_window_interval_s",
    "trace_sample_ratio", "slow_step_ms",
}  # fmt: skip
EXECUTOR_NAMES: Final = COMMON_NAMES | {
    "device", "dtype", "numerics", "block_size", "num_blocks", "kv_cache_memory", "max_num_seqs",
    "weight_dtype", "max_tokens_per_step", "max_context", "attention_backend", "early_launch", "threads", "progress",
    "lease_s", "drain_s",
}  # fmt: skip
ALL_NAMES: Final = SCHEDULER_NAMES | EXECUTOR_NAMES

# Read elsewhere: the command line's own variables.
OTHER_VARIABLES: Final = frozenset({"STEPWIRE_CONFIG", "STEPWIRE_ADDRESS", "STEPWIRE_TOKEN", "STEPWIRE_TRACEBACK"})
# Kubernetes puts these into every container beside a Service named "stepwire": a name's end and what stands there. By
# the name alone a setting that is misspelt or meant for another program would be swallowed.
_KUBERNETES = [
    (re.compile(name), re.compile(value))
    for name, value in (
        (r"_SERVICE_HOST$", r"[0-9a-fA-F.:]+"),
        (r"_SERVICE_PORT(_\w+)?$", r"\d+"),
        (r"_PORT(_\d+_(TCP|UDP|SCTP))?$", r"(tcp|udp|sctp)://\S+"),
        (r"_PORT_\d+_(TCP|UDP|SCTP)_PROTO$", r"tcp|udp|sctp"),
        (r"_PORT_\d+_(TCP|UDP|SCTP)_PORT$", r"\d+"),
        (r"_PORT_\d+_(TCP|UDP|SCTP)_ADDR$", r"[0-9a-fA-F.:]+"),
    )
]

Layer = dict[str, tuple[str, str]]  # name -> (text, where it stands)
Fields = Mapping[str, FieldInfo]


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def closest(given: str, known: Sequence[str]) -> str:
    """A hint at the known name most like `given`, ready to follow a complaint; empty when none is like it."""
    close = get_close_matches(given, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _unknown(what: str, given: str, known: Sequence[str]) -> ConfigError:
    return ConfigError(f"unknown {what} {given}{closest(given, known)}", field=given)


def _is_of_kubernetes(variable: str, value: str) -> bool:
    return any(name.search(variable) and shape.fullmatch(value) for name, shape in _KUBERNETES)


def _is_bool(fields: Fields, name: str) -> bool:
    return fields[name].annotation is bool


def _is_list(fields: Fields, name: str) -> bool:
    return get_origin(fields[name].annotation) is tuple


def from_flags(fields: Fields, argv: Sequence[str]) -> tuple[Layer, str]:
    """Flags and the value of --config. `--x v`, `--x=v`; `--x` and `--no-x` for truth values; lists may repeat."""
    found: Layer = {}
    file = ""
    known = {flag_of(name): name for name in fields}
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        flag, equals, value = argument.partition("=")
        positive = flag.replace("--no-", "--", 1)
        if flag not in known and positive in known and _is_bool(fields, known[positive]) and not equals:
            found[known[positive]] = ("false", f"flag {flag}")
            continue
        if flag not in known and flag != "--config":
            if not flag.startswith("-"):
                raise ConfigError(f"unexpected argument {argument!r}", field=argument)
            raise _unknown("flag", flag, [*known, "--config"])
        if not equals:
            if flag in known and _is_bool(fields, known[flag]):
                value = "true"
            elif not rest:
                raise ConfigError(f"{flag} needs a value", field=flag)
            else:
                value = rest.pop(0)
        if flag == "--config":
            file = value
            continue
        name = known[flag]
        if _is_list(fields, name) and name in found:
            value = f"{found[name][0]},{value}"
        found[name] = (value, f"flag {flag}")
    return found, file


def from_environment(service: str, fields: Fields, environ: Mapping[str, str]) -> Layer:
    """Variables of this service. An empty one is as good as none (compose files write `X: ${X:-}`)."""
    mine = f"{PREFIX}{service.upper()}_"
    others = tuple(f"{PREFIX}{other.upper()}_" for other in SERVICES if other != service)
    found: Layer = {}
    specific: Layer = {}
    for variable, value in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or _is_of_kubernetes(variable, value):
            continue
        if variable.startswith(others):
            continue  # that service checks its own
        name = variable.removeprefix(mine).removeprefix(PREFIX).lower()
        if name not in (fields if variable.startswith(mine) else ALL_NAMES):
            known = [PREFIX + n.upper() for n in sorted(ALL_NAMES)] + [mine + n.upper() for n in fields]
            raise _unknown("environment variable", variable, [*known, *sorted(OTHER_VARIABLES)])
        if name in fields and value:
            (specific if variable.startswith(mine) else found)[name] = (value, f"environment {variable}")
    return found | specific


def from_standards(fields: Fields, environ: Mapping[str, str]) -> Layer:
    """Variables that are not ours; they count where none of our names was given."""
    endpoint = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    if not endpoint or "otlp_endpoint" not in fields:
        return {}
    return {"otlp_endpoint": (endpoint, "environment OTEL_EXPORTER_OTLP_ENDPOINT")}


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


def from_file(service: str, fields: Fields, path: str) -> Layer:
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
    sections = {name: content.pop(name, None) or {} for name in SERVICES}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise ConfigError(f"{path}: {name}: must hold keys and values", field=name)
    shared = _texts(path, "", content, ALL_NAMES)
    special = _texts(path, f"{service}.", sections[service], fields.keys())
    return {name: entry for name, entry in shared.items() if name in fields} | special


def _texts(path: str, where: str, section: Mapping[object, object], known: Collection[str]) -> Layer:
    """Entries of one part of the file as text, an empty one left out."""
    names = sorted(known)
    found: Layer = {}
    for key, value in section.items():
        if key not in names:
            problem = _unknown("key", f"{where}{key}", [*(where + name for name in names), *SERVICES])
            raise ConfigError(f"{path}: {problem.message}", field=f"{where}{key}")
        if value is None:
            continue
        if isinstance(value, dict) and all(isinstance(v, str | int | float) for v in value.values()):
            value = [f"{name}={part}" for name, part in value.items()]
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
