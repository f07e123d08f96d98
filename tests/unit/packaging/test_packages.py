"""pyproject.toml and constraints.txt against what is in the tree."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from deploy.requirements import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins(file: str) -> dict[str, Version]:
    found = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / file).read_text(), re.MULTILINE)
    return {canonicalize_name(name): Version(version) for name, version in found}


PINS, CPU_PINS = pins("constraints.txt"), pins("constraints-cpu.txt")
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
    assert (PINS | CPU_PINS)[canonicalize_name(requirement.name)] in requirement.specifier


# What releases of torch ask for, as their metadata on the package index says.
TORCH_NEEDS = {
    "2.11.0": ["setuptools<82", "sympy>=1.13.3", "networkx>=2.5.1", "fsspec>=0.8.5", "triton==3.6.0"],
    "2.12.0": ["setuptools<82", "sympy>=1.13.3", "networkx>=2.5.1", "fsspec>=0.8.5", "triton==3.7.0"],
    "2.13.0": ["setuptools>=77.0.3", "sympy>=1.13.3", "networkx>=2.5.1", "fsspec>=0.8.5", "triton==3.7.1"],
    "2.14.1": ["setuptools>=77.0.3", "sympy>=1.13.3", "networkx>=2.5.1", "fsspec>=0.8.5", "triton~=3.8.0"],
}


@pytest.mark.parametrize("release", TORCH_NEEDS)
def test_constraints_leave_every_supported_release_of_torch_its_way(release: str) -> None:
    """A CUDA build names one version of triton, each release another: no pin may stand in its way."""
    for requirement in map(Requirement, TORCH_NEEDS[release]):
        pinned = PINS.get(canonicalize_name(requirement.name))
        if requirement.name == "triton":
            assert pinned is None and CPU_PINS.keys() == {"triton"}
        else:
            assert pinned is not None and pinned in requirement.specifier


def test_constraints_name_no_local_version_and_no_path() -> None:
    files = [ROOT / name for name in ("constraints.txt", "constraints-cpu.txt")]
    lines = [line for file in files for line in file.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert lines[:-1] == sorted(lines[:-1], key=str.lower)
