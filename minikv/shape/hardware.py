"""What a GPU can do: how much it holds, how fast it moves bytes, how fast it multiplies.

Three numbers of a data sheet (memory, bandwidth, dense bf16 operations) say most of what one needs to know about
serving a model on it: memory decides how many conversations fit, bandwidth how fast one decodes, operations how fast a
prompt is taken in. Data-sheet operations are a ceiling; where a measured rate is known it stands beside it.
Plain arithmetic, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 10**9


@dataclass(frozen=True)
class Hardware:
    """A machine by its ceilings: ``memory_bytes``, ``bytes_per_s``, ``flops_per_s``; and the fixed cost of a step.

    ``flops_per_s`` is the rate that prefill is counted with: the effective one where one was measured, otherwise the
    data sheet's (``peak_flops_per_s``). ``step_overhead_s`` is what a step costs besides moving and computing
    (scheduling, kernel launches, sampling). ValueError for a number that is not above 0 (overhead: not below).
    """

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops_per_s: float
    peak_flops_per_s: float | None = None
    step_overhead_s: float = 0.0

    def __post_init__(self) -> None:
        for field in ("memory_bytes", "bytes_per_s", "flops_per_s"):
            if not 0 < getattr(self, field) < float("inf"):
                raise ValueError(f"{self.name}: {field} must be above 0, not {getattr(self, field)}")
        if not 0 <= self.step_overhead_s < 1e6:
            raise ValueError(f"{self.name}: step_overhead_s must be at least 0 and less than a million, not {self.step_overhead_s}")

    @property
    def flops_per_byte(self) -> float:
        """Operations that the data sheet allows for each byte moved: below it memory is the bound, above it compute."""
        return (self.peak_flops_per_s or self.flops_per_s) / self.bytes_per_s


def _gpu(name: str, memory_gb: float, gb_per_s: float, tflops: float, effective_tflops: float | None = None) -> Hardware:
    return Hardware(name, memory_gb * GB, gb_per_s * GB, (effective_tflops or tflops) * 1e12, tflops * 1e12)


# Data sheets (dense bf16). The L4's effective rate is derived from a published benchmark: 12k tokens of prefill of a 7B
# model in 3.3 s, counting the operations of its weights alone. With attention counted it would be about 60 TFLOP/s.
HARDWARE: dict[str, Hardware] = {
    gpu.name: gpu
    for gpu in (
        _gpu("l4", 24, 300, 121, effective_tflops=51),
        _gpu("a100-80", 80, 2_039, 312),
        _gpu("h100", 80, 3_350, 989),
        _gpu("h200", 141, 4_800, 989),
        _gpu("b200", 192, 8_000, 2_250),
    )
}


def hardware(name: str) -> Hardware:
    """A preset by its lower-case name. ValueError that lists the known names."""
    try:
        return HARDWARE[name.lower()]
    except KeyError:
        raise ValueError(f"unknown hardware {name!r}; known are {', '.join(HARDWARE)}") from None
