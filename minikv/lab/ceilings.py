"""What this machine can do at best: the roof under which every other figure stands.

A benchmark without the machine's own limits says little: 900 tokens a second may be close to all that is possible or a
tenth of it. Three rates bound an engine on a CPU, and each is measured here in the plainest way, the best of several
tries, because whatever disturbs a measurement only makes it slower:

    read    sum a long run of float32, all threads at once: bytes read a second
    copy    copy a long run of float32 into another: bytes read and bytes written a second
    GEMM    float32 matrix products, large square ones and those of the model: operations a second

The read rate is measured over more than any processor cache and over as many bytes as the model's weights have, which
may partly stay in the cache from step to step; the larger one counts, so that the limit is never set too low.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from minikv.shape.model_shape import ModelShape

LARGE_BYTES = 256 * 2**20
SQUARES = (1024, 2048)


@dataclass(frozen=True)
class Ceilings:
    """Rates in 10^9 a second. ``gemm`` holds the GFLOP/s by size of product, rows x inputs x outputs."""

    read_gb_s: float
    read_weights_gb_s: float
    copy_gb_s: float
    gemm: dict[str, float]
    threads: int

    @property
    def gemm_gflop_s(self) -> float:
        """The best product's rate."""
        return max(self.gemm.values())

    @property
    def bytes_per_s(self) -> float:
        """The best rate at which weights and KV could be read."""
        return 1e9 * max(self.read_gb_s, self.read_weights_gb_s)

    @property
    def flops_per_s(self) -> float:
        return 1e9 * self.gemm_gflop_s


def measure(shape: ModelShape, seconds: float = 6.0) -> Ceilings:
    """Measure all ceilings in about ``seconds``."""
    share = seconds / 8
    with torch.inference_mode():
        large, other = torch.ones(LARGE_BYTES // 4), torch.zeros(LARGE_BYTES // 4)
        weights = torch.ones(shape.parameters)
        sizes = [(n, n, n) for n in SQUARES] + [(rows, shape.hidden, 2 * shape.ffn) for rows in (32, 512)]
        return Ceilings(
            read_gb_s=_best_read(large, share),
            read_weights_gb_s=_best_read(weights, share),
            copy_gb_s=2 * large.nbytes / best_seconds(lambda: other.copy_(large), share) / 1e9,
            gemm={f"{m}x{k}x{n}": _gemm_gflop_s(m, k, n, share) for m, k, n in sizes},
            threads=torch.get_num_threads(),
        )


def best_seconds(function: Callable[[], object], seconds: float) -> float:
    """The fastest of as many calls as fit into ``seconds`` (at least three), after one to warm up."""
    function()
    best, until, tries = float("inf"), perf_counter() + seconds, 0
    while tries < 3 or perf_counter() < until:
        start = perf_counter()
        function()
        best, tries = min(best, perf_counter() - start), tries + 1
    return best


def _best_read(data: torch.Tensor, seconds: float) -> float:
    """GB/s of the faster of two ways to read ``data`` once: its sum, and its product with a short vector."""
    rows = data[: data.numel() // 1024 * 1024].view(-1, 1024)
    vector = torch.ones(1024)
    ways: Sequence[Callable[[], object]] = (data.sum, lambda: torch.mv(rows, vector))
    return max(data.nbytes / best_seconds(way, seconds / 2) / 1e9 for way in ways)


def _gemm_gflop_s(m: int, k: int, n: int, seconds: float) -> float:
    """The faster of the two orders in which BLAS can be asked for X W^T: X [m, k], W [n, k]."""
    x, weight = torch.randn(m, k), torch.randn(n, k)
    ways: Sequence[Callable[[], object]] = (lambda: x @ weight.T, lambda: weight @ x.T)
    return max(2 * m * k * n / best_seconds(way, seconds / 2) / 1e9 for way in ways)
