"""One name for flag, variable and YAML key; precedence; strictness; the listing."""

import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field, SecretStr, ValidationError

from common.config import ServiceConfig, load_config, masked, parse_size
from common.config_sources import EXECUTOR_NAMES, SCHEDULER_NAMES, from_flags
from common.errors import ConfigError
from executor_svc.config import ExecutorConfig
from scheduler_svc.app import core_config
from scheduler_svc.config import SchedulerConfig


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_each_service_knows_the_others_names() -> None:
    assert set(SchedulerConfig.model_fields) == SCHEDULER_NAMES
    assert set(ExecutorConfig.model_fields) == EXECUTOR_NAMES


def test_every_field_says_what_it_is() -> None:
    for kind in (SchedulerConfig, ExecutorConfig):
        for name, field in kind.model_fields.items():
            assert field.description, f"{kind.service}.{name}"


def test_flag_beats_variable_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", "max_num_seqs: 3\nblock_size: 8\n")
    environ = {"STEPWIRE_CONFIG": file}
    assert load_config(ExecutorConfig, [], {}).config.max_num_seqs == 64
    assert load_config(ExecutorConfig, [], environ).config.max_num_seqs == 3
    environ["STEPWIRE_MAX_NUM_SEQS"] = "4"
    assert load_config(ExecutorConfig, [], environ).config.max_num_seqs == 4
    loaded = load_config(ExecutorConfig, ["--max-num-seqs", "5"], environ)
    assert loaded.config.max_num_seqs == 5
    assert loaded.config.block_size == 8
    assert loaded.sources["max_num_seqs"] == "flag --max-num-seqs"
    assert loaded.sources["block_size"] == f"file {file}: block_size"
    assert loaded.sources["device"] == "default"


def test_one_file_serves_both_services(tmp_path: Path) -> None:
    file = write(
        tmp_path / "c.yaml",
        "model: m\nmax_num_seqs: 8\nscheduler:\n  listen: 127.0.0.1:1\n  executors: [a:1, b:2]\n  max_num_seqs: 4\n"
        "executor:\n  listen: 127.0.0.1:2\n  kv_cache_memory: 2GiB\n",
    )
    scheduler = load_config(SchedulerConfig, ["--config", file], {}).config
    executor = load_config(ExecutorConfig, [f"--config={file}"], {}).config
    assert (scheduler.model, scheduler.listen, scheduler.max_num_seqs) == ("m", "127.0.0.1:1", 4)
    assert scheduler.executors == ("a:1", "b:2")
    assert (executor.model, executor.listen, executor.max_num_seqs) == ("m", "127.0.0.1:2", 8)
    assert executor.kv_cache_memory == 2 * 1024**3


def test_a_service_prefix_means_that_service_alone() -> None:
    environ = {"STEPWIRE_LISTEN": "127.0.0.1:1", "STEPWIRE_EXECUTOR_LISTEN": "127.0.0.1:2"}
    assert load_config(SchedulerConfig, [], environ).config.listen == "127.0.0.1:1"
    assert load_config(ExecutorConfig, [], environ).config.listen == "127.0.0.1:2"


def test_variables_of_the_other_service_are_no_error() -> None:
    environ = {"STEPWIRE_BLOCK_SIZE": "8", "STEPWIRE_POLICY": "priority", "STEPWIRE_EXECUTORS": "a:1"}
    assert load_config(SchedulerConfig, [], environ).config.policy == "priority"
    assert load_config(ExecutorConfig, [], environ).config.block_size == 8


def test_lists_and_truth_values() -> None:
    flags = ["--executors", "a:1", "--executors=b:2,unix:/x", "--no-enable-prefix-cache"]
    config = load_config(SchedulerConfig, flags, {}).config
    assert config.executors == ("a:1", "b:2", "unix:/x")
    assert not config.enable_prefix_cache
    assert load_config(SchedulerConfig, ["--enable-prefix-cache"], {}).config.enable_prefix_cache
    assert not load_config(SchedulerConfig, ["--enable-prefix-cache=false"], {}).config.enable_prefix_cache
    assert not load_config(SchedulerConfig, [], {"STEPWIRE_ENABLE_PREFIX_CACHE": "0"}).config.enable_prefix_cache


def test_the_standard_otlp_variable_is_honoured_and_ours_wins() -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317"}
    loaded = load_config(SchedulerConfig, [], environ)
    assert loaded.config.otlp_endpoint == "http://a:4317"
    assert loaded.sources["otlp_endpoint"] == "environment OTEL_EXPORTER_OTLP_ENDPOINT"
    environ["STEPWIRE_OTLP_ENDPOINT"] = "http://b:4317"
    assert load_config(SchedulerConfig, [], environ).config.otlp_endpoint == "http://b:4317"


def test_an_empty_variable_is_no_value() -> None:
    assert load_config(ExecutorConfig, [], {"STEPWIRE_BLOCK_SIZE": ""}).config.block_size == 16


@pytest.mark.parametrize(
    ("flags", "environ", "yaml", "said"),
    [
        (["--max-num-seq", "1"], {}, "", ["--max-num-seq;", "--max-num-seqs?"]),
        (["--nothing-like-it"], {}, "", ["unknown flag --nothing-like-it"]),
        (["stray"], {}, "", ["stray"]),
        (["--listen"], {}, "", ["--listen needs a value"]),
        (["--no-policy"], {}, "", ["--no-policy"]),
        ([], {"STEPWIRE_MAX_NUM_SEQ": "1"}, "", ["STEPWIRE_MAX_NUM_SEQ;", "STEPWIRE_MAX_NUM_SEQS?"]),
        ([], {"STEPWIRE_SCHEDULER_BLOCK_SIZE": "1"}, "", ["STEPWIRE_SCHEDULER_BLOCK_SIZE"]),
        ([], {}, "max_num_seq: 1", ["max_num_seq;", "max_num_seqs?"]),
        ([], {}, "scheduler:\n  block_size: 8", ["scheduler.block_size"]),
        ([], {}, "schedular:\n  policy: fcfs", ["schedular", "scheduler?"]),
        ([], {}, "scheduler: 3", ["scheduler: must hold keys"]),
        ([], {}, "[1, 2]", ["must hold keys"]),
        ([], {}, "policy: {a: {b: 1}}", ["policy: must be a plain value"]),
        ([], {}, "policy: fcfs\npolicy: priority", [":2: key policy stands twice"]),
        ([], {}, "a: [", ["not YAML"]),
        (["--pipeline-depth", "9"], {}, "", ["pipeline_depth '9' (flag --pipeline-depth)"]),
        ([], {"STEPWIRE_DRAIN_S": "nan"}, "", ["drain_s", "environment STEPWIRE_DRAIN_S"]),
        ([], {}, "pipeline_depth: true", ["pipeline_depth 'true'", "c.yaml: pipeline_depth"]),
        (["--policy", "lifo"], {}, "", ["policy 'lifo'", "fcfs"]),
        (["--tenant-weights", "a"], {}, "", ["'a': write tenant=weight"]),
        (["--tenant-weights", "a=0"], {}, "", ["'a=0'", "above 0"]),
        (["--tenant-weights", "a=nan"], {}, "", ["'a=nan'"]),
        ([], {"STEPWIRE_TENANT_WEIGHTS": "a=1,a=2"}, "", ["'a' is named twice"]),
        (["--max-long-partial-prefills", "1"], {}, "", ["needs long_prefill_token_threshold"]),
        (["--priority-aging-ms", "9000000"], {}, "", ["priority_aging_ms", "4194304"]),
        (["--listen", "nowhere"], {}, "", ["listen 'nowhere'", "host:port"]),
        (["--listen", "127.0.0.1:70000"], {}, "", ["listen"]),
        (["--listen", "\udcff:1"], {}, "", [r"listen '\udcff:1' (flag --listen): not UTF-8 text"]),
        ([], {"STEPWIRE_SERVED_MODEL_NAME": "\udcff"}, "", ["environment STEPWIRE_SERVED_MODEL_NAME): not UTF-8"]),
        (["--listen", "unix:"], {}, "", ["needs a path"]),
        (["--listen", "unix:/" + "x" * 107], {}, "", ["107 bytes"]),
        (["--executors", "here"], {}, "", ["'here' is not an address"]),
        (["--executors", ""], {}, "", ["executors"]),
        (["--executors", "a:1,a:1"], {}, "", ["named twice"]),
        (["--api-workers", "-1"], {}, "", ["api_workers"]),
        (["--worker-listen", "unix:/a"], {}, "", ["worker_listen", "host:port"]),
        (["--tls-cert", "c.pem"], {}, "", ["tls_cert and tls_key"]),
        (["--tls-client-ca", "c.pem"], {}, "", ["tls_client_ca needs"]),
        (["--max-message-bytes", "16 MegaStuff"], {}, "", ["not a size"]),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, flags: list[str], environ: dict[str, str], yaml: str, said: list[str]
) -> None:
    if yaml:
        environ = environ | {"STEPWIRE_CONFIG": write(tmp_path / "c.yaml", yaml)}
    with pytest.raises(ConfigError) as caught:
        load_config(SchedulerConfig, flags, environ)
    for part in said:
        assert part in caught.value.message, caught.value.message
    assert "\n" not in caught.value.message


def test_a_file_may_have_any_name() -> None:
    flags = ["--model", "\udcff.gguf", "--auth-tokens-file", "\udcff"]
    config = load_config(SchedulerConfig, flags, {}).config
    assert (config.model, config.auth_tokens_file) == ("\udcff.gguf", Path("\udcff"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load_config(SchedulerConfig, ["--config", str(tmp_path / "none.yaml")], {})
    assert load_config(SchedulerConfig, ["--config", write(tmp_path / "empty.yaml", "")], {}).config.policy == "fcfs"


def test_kubernetes_service_variables_are_no_configuration() -> None:
    environ = {
        "STEPWIRE_PORT": "tcp://10.0.0.1:50051", "STEPWIRE_SERVICE_HOST": "10.0.0.1", "STEPWIRE_SERVICE_PORT": "50051",
        "STEPWIRE_SERVICE_PORT_GRPC": "50051", "STEPWIRE_PORT_50051_TCP_ADDR": "10.0.0.1",
        "STEPWIRE_PORT_50051_TCP": "tcp://10.0.0.1:50051", "STEPWIRE_PORT_50051_TCP_PROTO": "tcp",
        "STEPWIRE_PORT_50051_TCP_PORT": "50051", "STEPWIRE_EXECUTOR_SERVICE_HOST": "fd00::1",
        "STEPWIRE_EXECUTOR_PORT": "tcp://[fd00::1]:50052",
    }  # fmt: skip
    assert load_config(SchedulerConfig, [], environ) == load_config(SchedulerConfig, [], {})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("STEPWIRE_PORT", "50051"),
        ("STEPWIRE_METRIC_PORT", "9464"),
        ("STEPWIRE_LISTEN_PORT", ""),
        ("STEPWIRE_SERVICE_HOST", "here"),
        ("STEPWIRE_SERVICE_PORT", "127.0.0.1:5"),
        ("STEPWIRE_PORT_50051_TCP_ADDRESS", "10.0.0.1"),
    ],
)
def test_what_only_looks_like_kubernetes_is_refused(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown environment variable {variable}"):
        load_config(SchedulerConfig, [], {variable: value})


def test_configuration_is_frozen() -> None:
    config = load_config(SchedulerConfig, [], {}).config
    with pytest.raises(ValidationError):
        config.policy = "priority"


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1024", 1024), ("2GiB", 2 << 30), ("512MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("3 kib", 3072)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "GiB", "2XiB", "1e9", "2 i"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


class Secretive(ServiceConfig):
    service: ClassVar[str] = "scheduler"
    listen: str = "127.0.0.1:0"
    password: SecretStr = Field(default=SecretStr(""), description="a secret")


def test_the_listing_shows_sources_and_no_secrets() -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://user:hunter2@host:4317"}
    listing = load_config(Secretive, ["--password", "hunter3", "--model", "m"], environ).listing()
    assert listing.splitlines()[0] == "scheduler configuration"
    assert "hunter" not in listing
    assert "http://***@host:4317" in listing
    assert [line.split() for line in listing.splitlines() if " model " in line] == [["model", "m", "flag", "--model"]]
    assert masked(("a", "b")) == "a,b"


def test_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        load_config(ExecutorConfig, ["--help"], {})
    assert left.value.code == 0
    shown = capsys.readouterr().out
    for name in ExecutorConfig.model_fields:
        assert "--" + name.replace("_", "-") in shown


def test_the_last_of_a_repeated_flag_counts() -> None:
    layer, file = from_flags(ExecutorConfig.model_fields, ["--device", "cpu", "--config=a", "--device=cuda"])
    assert layer["device"][0] == "cuda" and file == "a"


@pytest.mark.parametrize("module", ["common.config", "scheduler_svc.config", "executor_svc.config"])
def test_configuration_loads_no_engine(module: str) -> None:
    other = "executor_svc" if module.startswith("scheduler") else "scheduler_svc"
    code = f"import {module}, sys; sys.exit(str({{'torch', 'grpc', {other!r}}} & set(sys.modules) or '') or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("flags", "yaml"),
    [
        (["--tenant-weights", "a=2,b c=0.5,d=e=3"], ""),
        ([], "tenant_weights: {a: 2, b c: 0.5, d=e: 3}"),
        ([], "scheduler:\n  tenant_weights: [a=2, b c=0.5, d=e=3]"),
    ],
)
def test_weights_of_tenants(tmp_path: Path, flags: list[str], yaml: str) -> None:
    environ = {"STEPWIRE_CONFIG": write(tmp_path / "c.yaml", yaml)} if yaml else {}
    config = load_config(SchedulerConfig, flags, environ).config
    assert core_config(config).tenant_weights == {"a": 2.0, "b c": 0.5, "d=e": 3.0}
