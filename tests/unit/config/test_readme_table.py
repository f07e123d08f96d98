"""The configuration tables of the README are made from the classes; this test says when they are behind."""

from pathlib import Path

import pytest

from common.config import ServiceConfig, masked
from executor_svc.config import ExecutorConfig
from scheduler_svc.config import SchedulerConfig

README = Path(__file__).parents[3] / "README.md"


def row(name: str, kind: type[ServiceConfig]) -> str:
    """The README's line for one setting."""
    field = kind.model_fields[name]
    default = "" if field.default in (None, "") else f"`{masked(field.default)}`"
    return f"| `{name}` | {default} | {field.description} |"


@pytest.mark.parametrize("kind", [SchedulerConfig, ExecutorConfig])
def test_readme_lists_every_setting(kind: type[ServiceConfig]) -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    missing = [line for name in kind.model_fields if (line := row(name, kind)) not in lines]
    assert not missing, "README.md lacks, or has differently:\n" + "\n".join(missing)
