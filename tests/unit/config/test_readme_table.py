"""README.md's configuration tables say what the classes say."""

from pathlib import Path

import pytest

from common.config import ServiceConfig, masked
from executor_svc.config import ExecutorConfig
from scheduler_svc.config import SchedulerConfig

README = Path(__file__).parents[3] / "README.md"


def expected(kind: type[ServiceConfig]) -> list[str]:
    rows = []
    for name, field in kind.model_fields.items():
        shown = masked(field.default)
        default = "" if shown == "-" else f"`{shown}`"
        rows.append(f"| `{name}` | {default} | {field.description} |")
    return rows


@pytest.mark.parametrize("kind", [SchedulerConfig, ExecutorConfig])
def test_table(kind: type[ServiceConfig]) -> None:
    section = README.read_text(encoding="utf-8").partition(f"**{kind.service.capitalize()}**")[2]
    rows: list[str] = []
    for line in section.splitlines()[1:]:
        if line.startswith("|"):
            rows.append(line)
        elif rows:
            break
    assert rows[2:] == expected(kind), "\n".join(expected(kind))
