"""Programmatic dependent launch: a kernel is launched, and may prepare, while the one before it in the stream runs.

From capability 9.0 on. A kernel launched so must call `await_previous` before it reads what an earlier kernel wrote and
before it writes at all; that waits until the kernel before it has ended, which had waited for the one before that. A
kernel that is launched plainly waits for everything, as always, so both kinds mix. Source: CUDA programming guide,
"Programmatic Dependent Launch and Synchronization"; PTX, `griddepcontrol`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_is_on = False


def launch_early(on: bool) -> None:
    """For all launches of this process from now on; what a graph holds stays as it was captured."""
    global _is_on
    _is_on = on


def early_options() -> dict[str, bool]:
    """Of each launch: the kernel's EARLY, and what the launcher must know."""
    return {"EARLY": True, "launch_pdl": True} if _is_on else {"EARLY": False}


@triton.jit
def await_previous(EARLY: tl.constexpr):
    """Until what earlier kernels wrote is there. Then the next kernel may be launched too, so that two at most wait."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch_lines(places):
    """Asks for the cache lines of 128 bytes at `places`, pointers, in the device's L2; waits for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
