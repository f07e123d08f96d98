"""Generates the gRPC code that is committed beside the .proto files.

    python -P protos/generate.py            write
    python -P protos/generate.py --check    exit 1 when what is committed differs

The server imports `stepwire.v1` and `stepwire.executor.v1` (this folder). `stepwire-client` carries its own copy of the
public part under `stepwire_client._gen`, so that it installs alone.
"""

import argparse
import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
PUBLIC = ("stepwire/v1/inference.proto", "stepwire/v1/admin.proto")
PRIVATE = ("stepwire/executor/v1/executor.proto",)
CLIENT_GEN = PROTOS.parent / "client" / "stepwire_client" / "_gen"


def run_protoc(files: tuple[str, ...], out: Path) -> None:
    """Writes code and type stubs for `files` below `out`."""
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    plugins = Path(sys.executable).parent
    args = [
        "protoc",
        f"-I{PROTOS}",
        f"-I{well_known}",
        f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out={out}",
        f"--mypy_grpc_out={out}",
        *files,
    ]
    if protoc.main(args) != 0:
        raise SystemExit("protoc failed")
    for folder in {p.parent for p in out.rglob("*_pb2.py")}:
        while folder != out:
            (folder / "__init__.py").touch()
            folder = folder.parent


def generate(server: Path, client: Path) -> None:
    """Writes the server's code below `server` and the client's copy below `client`."""
    run_protoc(PUBLIC + PRIVATE, server)
    run_protoc(PUBLIC, client)
    (client / "__init__.py").touch()
    for path in (*client.rglob("*.py"), *client.rglob("*.pyi")):
        text = path.read_text()
        for old, new in (
            ("from stepwire.v1 import", "from stepwire_client._gen.stepwire.v1 import"),
            ("import stepwire.v1.", "import stepwire_client._gen.stepwire.v1."),
        ):
            text = text.replace(old, new)
        path.write_text(text)


def generated(root: Path) -> set[Path]:
    """Paths of generated files below `root`, relative to it."""
    kinds = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi", "__init__.py")
    return {p.relative_to(root) for kind in kinds for p in root.rglob(kind)}


def differences(old: Path, new: Path) -> list[str]:
    """Files that differ between two generated trees, or stand in one alone."""
    a, b = generated(old), generated(new)
    found = [f"{old / p}: not generated any more" for p in a - b] + [f"{old / p}: missing" for p in b - a]
    found += [f"{old / p}: differs" for p in a & b if not filecmp.cmp(old / p, new / p, shallow=False)]
    return sorted(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on a difference")
    check: bool = parser.parse_args().check
    with tempfile.TemporaryDirectory() as tmp:
        server, client = Path(tmp, "server"), Path(tmp, "client")
        server.mkdir()
        client.mkdir()
        generate(server, client)
        if check:
            found = differences(PROTOS, server) + differences(CLIENT_GEN, client)
            print("\n".join(found) if found else "generated code is up to date")
            return 1 if found else 0
        for source, target in ((server, PROTOS), (client, CLIENT_GEN)):
            for path in generated(source):
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / path, target / path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
