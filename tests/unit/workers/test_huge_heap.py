"""Who gets a heap in huge pages, and that asking for it starts the same program over."""

import subprocess
import sys

import pytest

from scheduler_svc.huge_heap import huge_heap

MADVISE, NEVER = "always [madvise] never\n", "always madvise [never]\n"


@pytest.mark.parametrize(
    ("environ", "libc", "mode"),
    [
        ({"PYTHONMALLOC": "pymalloc"}, "glibc 2.36", MADVISE),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "glibc 2.36", MADVISE),
        ({}, "glibc 2.31", MADVISE),
        ({}, "", MADVISE),
        ({}, "glibc 2.36", NEVER),
        ({}, "glibc 2.36", ""),
    ],
)
def test_a_choice_of_the_operator_stands_and_an_old_system_is_left_alone(
    environ: dict[str, str], libc: str, mode: str
) -> None:
    assert huge_heap(environ, libc, mode) == {}


def test_other_tunables_stay() -> None:
    assert huge_heap({"GLIBC_TUNABLES": "a.b=1"}, "glibc 2.35", MADVISE) == {
        "PYTHONMALLOC": "malloc",
        "GLIBC_TUNABLES": "a.b=1:glibc.malloc.hugetlb=1",
    }
    added = huge_heap({"HOME": "/"}, "glibc 2.36", MADVISE)
    assert added and huge_heap(added, "glibc 2.36", MADVISE) == {}, "once"


@pytest.mark.skipif(sys.platform != "linux", reason="exec keeps a process on Linux")
def test_the_program_goes_on_as_the_same_process_with_the_same_arguments() -> None:
    program = "import os, sys\nprint(os.getpid(), *sys.argv[1:])\nsys.stdout.flush()\n"
    program += "from scheduler_svc.huge_heap import exec_with_huge_heap\nexec_with_huge_heap()\nprint('on')\n"
    child = subprocess.run(
        [sys.executable, "-c", program, "a b", "--c"], capture_output=True, text=True, timeout=60, check=True
    )
    lines = child.stdout.splitlines()
    assert lines[-1] == "on" and len(lines) in (2, 3), "twice where it was started over, else once"
    assert set(lines[:-1]) == {f"{lines[0].split()[0]} a b --c"}
