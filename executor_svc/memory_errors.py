"""Whether an error means that memory has run out."""

from typing import Final

import torch

# Only torch's allocator of device memory has a type of its own. Everyone else says it in words: torch for what the
# runtime answers (a graph's launch, pinned memory, a context), Triton for the driver, cuBLAS, torch's allocator of the
# host. None of these leaves the device unfit for use.
_SAID: Final = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


def lacks_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _SAID)
