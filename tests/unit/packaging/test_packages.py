"""pyproject.toml and constraints.txt against what is in the tree."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from deploy.requirements import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = {
    canonicalize_name(name): Version(version)
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
}
REQUIREMENTS = [
    Requirement(line)
    for group in [
        PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"].values(),
        PROJECT["build-system"]["requires"],
    ]
    for line in group
]


def test_every_package_in_the_tree_is_installed_with_the_project() -> None:
    """An editable install finds a forgotten one all the same; an image does not."""
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    listed -= {name for name in listed if name.split(".")[0] == "stepwire"}
    tops = {name.split(".")[0] for name in listed}
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in tops
        for path in (ROOT / top).rglob("__init__.py")
        if "__pycache__" not in path.parts
    }
    assert found == listed


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: str(requirement.name))
def test_constraints_pin_what_is_asked_for(requirement: Requirement) -> None:
    if requirement.name in ("torch", "stepwire-client"):  # the first is chosen by its build, the second is ours
        assert canonicalize_name(requirement.name) not in PINS
        return
    assert PINS[canonicalize_name(requirement.name)] in requirement.specifier


def test_constraints_name_no_local_version_and_no_path() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert lines == sorted(lines, key=str.lower)
