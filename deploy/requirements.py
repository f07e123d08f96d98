"""Prints what pyproject.toml asks for, one requirement a line, so that dependencies install apart from the project.

    python -P deploy/requirements.py project scheduler      what both packages need, and the extra `scheduler`
    python -P deploy/requirements.py test                   the extra `test` alone

Image layers stay small this way (code changes often, dependencies seldom), and deploy/dev adds an extra and leaves
alone an installation that may be running. Runs before anything is installed: standard library only.
"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def requirements(names: list[str]) -> list[str]:
    """Requirements of the extras `names`; "project" means the dependencies of the server and of its client."""
    server = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    client = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())["project"]
    found: list[str] = []
    for name in names:
        if name == "project":
            found += [line for line in server["dependencies"] if line != client["name"]] + client["dependencies"]
        else:
            found += server["optional-dependencies"][name]
    return found


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
