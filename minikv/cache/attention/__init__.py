"""The paged-attention kernel in several dialects with one signature:

    attend(q, k, v, pool, layer, step) -> out

Stores this step's k, v into their slots of the pool and returns what each query sees: itself and all before it.
q, out [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim]; pool [block, layer, 2, kv_heads, slot, head_dim];
step is a ``minikv.cache.paged.StepTensors``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def kernel(name: str, dtype: Any, device: Any) -> Callable[..., Any]:
    """The kernel called ``name`` ("auto" chooses the fastest for this dtype and device).

    ValueError for an unknown name, or when the kernel cannot run with this dtype or on this device.
    """
    import torch

    compiled = device.type == "cpu" and dtype in (torch.float32, torch.float64)
    if name == "auto":
        name = "cpu" if compiled else "reference"
    if name == "reference":
        from minikv.cache.attention.reference import attend
    elif name == "cpu":
        if not compiled:
            raise ValueError(f'attention="cpu" runs on a CPU in float32 or float64, not on {device} in {dtype}; use "auto"')
        from minikv.cache.attention.cpu import attend
    else:
        raise ValueError(f'unknown attention {name!r}; known are "auto", "reference" and "cpu"')
    return attend
