"""The paged-attention kernel in several dialects with one signature:

    attend(q, k, v, pool, layer, step) -> out

Stores this step's k, v into their slots of the pool and returns what each query sees: itself and all before it.
q, out [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim]; pool [block, layer, 2, kv_heads, slot, head_dim];
step is a ``minikv.cache.paged.StepTensors``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any


def kernel(name: str, dtype: Any, device: Any) -> Callable[..., Any]:
    """The kernel called ``name`` ("auto" chooses the fastest for this dtype and device).

    ValueError for an unknown name, or when the kernel cannot run with this dtype or on this device.
    """
    import torch

    compiled = device.type == "cpu" and dtype in (torch.float32, torch.float64)
    in_triton = dtype in (torch.float32, torch.bfloat16, torch.float16) and find_spec("triton") is not None
    if name == "auto":
        name = "cpu" if compiled else "gpu" if in_triton and device.type == "cuda" else "reference"
    if name == "reference":
        from minikv.cache.attention.reference import attend
    elif name == "cpu":
        if not compiled:
            raise ValueError(f'attention="cpu" runs on a CPU in float32 or float64, not on {device} in {dtype}; use "auto"')
        from minikv.cache.attention.cpu import attend
    elif name == "gpu":
        if not in_triton:
            missing = f"does not compute in {dtype}" if find_spec("triton") else "needs the package triton (pip install 'minikv[gpu]')"
            raise ValueError(f'attention="gpu" {missing}; use "auto"')
        from minikv.cache.attention import gpu

        if device.type != ("cpu" if gpu.INTERPRETED else "cuda"):
            raise ValueError(
                f'attention="gpu" runs on a CUDA device, or on a CPU in Triton\'s interpreter (set TRITON_INTERPRET=1 before '
                f'Python starts), not on {device}{" in the interpreter" if gpu.INTERPRETED else ""}; use "auto"'
            )
        attend = gpu.attend
    else:
        raise ValueError(f'unknown attention {name!r}; known are "auto", "reference", "cpu" and "gpu"')
    return attend
