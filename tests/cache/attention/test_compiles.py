"""The Triton kernels through Triton's own compiler, down to machine code, for cards that this machine does not have.

The interpreter runs almost any Python; the compiler does not. Without a driver nothing can be launched, so a stand-in says which
card to compile for, and every launch stops after compiling. What a program takes of a multiprocessor's shared memory is
known then, and must be there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("triton")

CODE = """
    import sys, torch, triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    capability = int(sys.argv[1])

    class Driver:
        get_current_target = lambda self: GPUTarget("cuda", capability, 32)
        get_current_device = get_current_stream = lambda self, *device: 0

    driver.set_active(Driver())
    run, names = triton.JITFunction.run, []

    def compile_only(self, *args, warmup, **kwargs):
        kernel = run(self, *args, warmup=True, **kwargs)
        names.append(self.__name__)
        print(self.__name__, kernel.metadata.shared, len(kernel.asm["cubin"]) > 1000)
        return kernel

    triton.JITFunction.run = compile_only

    from minikv.cache.attention import gpu
    from minikv.cache.blocks import BlockTable
    from minikv.cache.paged import Paged
    from minikv.cache.step import Piece
    from minikv.shape.model_shape import ModelShape

    torch.cuda.get_device_capability = lambda device: divmod(capability, 10)
    sizes = gpu._sizes_for(torch.bfloat16, torch.device("cuda"), 128)  # as on the card; the tensors lie on the CPU
    gpu._sizes_for = lambda *_: sizes
    shape = ModelShape(layers=2, hidden=8, heads=16, kv_heads=8, head_dim=128, vocab=8, ffn=8)
    paged = Paged(shape, 300, 16, torch.bfloat16, attention="reference")
    paged.attention = gpu.attend
    qkv = torch.zeros(72, 32, 128, dtype=torch.bfloat16)
    for spans in ([(2000, 1), (30, 70), (9, 1)], [(5, 1)] * 72):  # a split context and a chunk; many short decodes
        pieces = []
        for i, (start, count) in enumerate(spans):
            table = BlockTable(16)
            table.blocks.extend(range(-(-(start + count) // 16)))
            pieces.append(Piece(i, [1] * count, start, table))
        paged.begin(pieces)
        paged.attend(1, *qkv.split((16, 8, 8), 1))
    assert names == ["_store", "_prefill", "_decode", "_join", "_store", "_decode"], names
"""


@pytest.mark.parametrize(("capability", "shared_kib"), [(80, 163), (89, 99), (90, 227)], ids=["A100", "L4", "H100"])
def test_the_kernels_compile_and_fit(capability: int, shared_kib: int, tmp_path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CODE), str(capability)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert len(kernels) == 6
    assert all(int(shared) <= shared_kib * 1024 and binary == "True" for _, shared, binary in kernels), kernels
