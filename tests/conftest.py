"""Before any test module is imported: what exact numerics need must stand in the environment before torch is loaded,
and whether Triton interprets its kernels is decided when triton is. It does where there is no GPU to run them on.

One thread per operation: tests share the machine with the services they start, and threads that wait for each other on
busy cores are slower than one.
"""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

from executor_svc.environment import prepare_environment

prepare_environment("exact")
