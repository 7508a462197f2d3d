"""Chapter 3's explorer: does it fit, and how fast can it decode? Bytes answer both.

Above, the GPU's memory as one bar: weights, K and V of all requests, what is free or what is too much. Below, the
GPU's roofline with one point on it: a decode step with all these requests. Everything is computed by ``minikv.shape``;
a step's time is the least that the data sheet allows, and no room is set aside for activations.
"""

from __future__ import annotations

from typing import Any

from minikv.shape.hardware import Hardware, hardware
from minikv.shape.model_shape import ModelShape, preset
from minikv.shape.roofline import StepCost, step_cost
from minikv.shape.size import fitting_requests, kv_bytes
from minikv.show.plots import DARK, LIGHT, MIDDLE
from minikv.show.widgets import Choice, Control, Picture, Slider

MODELS = ("qwen3-0.6b", "qwen3-4b", "qwen3-8b", "mistral-7b", "llama-2-7b", "llama-3.1-8b", "llama-3.1-70b", "qwen2.5-72b")
GPUS = ("l4", "a100-80", "h100", "h200", "b200")
CONTROLS: dict[str, Control] = {
    "model": Choice("model", MODELS, "llama-3.1-8b"),
    "context": Slider("tokens a request", [2**power for power in range(9, 18)], 8192),
    "requests": Slider("requests", [2**power for power in range(10)], 16),
    "dtype": Choice("K and V as", ("bf16", "fp8", "int4"), "bf16"),
    "gpu": Choice("GPU", GPUS, "a100-80"),
}


def draw(model: str, context: int, requests: int, dtype: str, gpu: str) -> Picture:
    """The bar and the point for ``requests`` of ``context`` tokens each. ValueError for a name or a number that cannot be."""
    shape, machine = preset(model), hardware(gpu)
    if context < 1 or requests < 1:
        raise ValueError(f"it takes at least one request of one token, not {requests} of {context}")
    if shape.mla_latent is not None:
        raise ValueError(f"the weights of {model} are not counted here, so nothing can be said of what is left beside them")
    weights = int(shape.parameters * 2)
    stored = kv_bytes(shape, context, requests, kv_dtype=dtype)
    cost = _decode(shape, context, requests, dtype)
    figure = _figure()
    bar, roof = figure.subplots(2, 1, height_ratios=(1, 2.6))
    _memory_bar(bar, machine, weights, stored)
    _roofline(roof, machine, cost, requests, _most_flops_a_byte(shape, context, dtype))
    return Picture(figure, _summary(shape, machine, context, requests, dtype, weights, stored, cost))


def _decode(shape: ModelShape, context: int, requests: int, dtype: str) -> StepCost:
    return step_cost(shape, [(1, context)] * requests, requests, "bf16", dtype)


def _most_flops_a_byte(shape: ModelShape, context: int, dtype: str) -> float:
    """FLOPs for each byte that one more request brings: what a step comes near to with ever more requests."""
    one, two = (_decode(shape, context, requests, dtype) for requests in (1, 2))
    return (two.flops - one.flops) / (two.bytes - one.bytes)


def _roof(machine: Hardware, flops_a_byte: float) -> float:
    return min(machine.flops_per_s, machine.bytes_per_s * flops_a_byte)


def _figure() -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(7.5, 4.8), layout="constrained")


def _memory_bar(axis: Any, machine: Hardware, weights: int, stored: int) -> None:
    """Weights, KV and what is left of ``machine.memory_bytes``, end to end; what is too much sticks out behind a line."""
    gb, left, parts = machine.memory_bytes / 1e9, 0.0, [("weights", weights / 1e9, MIDDLE, ""), ("KV", stored / 1e9, "white", "////")]
    free = gb - (weights + stored) / 1e9
    if free > 0:
        parts.append(("free", free, "white", ""))
    whole = sum(size for _, size, _, _ in parts)
    for name, size, color, hatch in parts:
        axis.barh([0], [size], left=[left], color=color, edgecolor=DARK, hatch=hatch, height=0.6)
        if size > 0.12 * whole:
            axis.text(
                left + size / 2, 0, f"{name}\n{size:,.1f} GB", ha="center", va="center", fontsize=9,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
            )  # fmt: skip
        left += size
    if free < 0:
        axis.axvline(gb, color=DARK, linewidth=2.5)
        axis.set_title(f"{-free:,.1f} GB too much: behind the thick line at {gb:,.0f} GB", loc="right", fontsize=9)
    axis.set_title(f"Memory of the {machine.name}", loc="left", fontsize=10)
    axis.set_xlim(0, whole * 1.01)
    axis.set_yticks([])
    axis.set_xlabel("GB (10⁹ bytes)", fontsize=9)
    axis.tick_params(labelsize=9)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _roofline(axis: Any, machine: Hardware, cost: StepCost, requests: int, most: float) -> None:
    """The roof of ``machine``, the decode step on it, and the FLOPs a byte beyond which more requests do not lead."""
    ridge = machine.flops_per_s / machine.bytes_per_s
    places = (0.25, ridge, 4000)
    axis.loglog(places, [_roof(machine, x) / 1e12 for x in places], color=DARK, linestyle="-", marker="", linewidth=1.5)
    here = cost.flops / cost.bytes
    axis.plot([here], [_roof(machine, here) / 1e12], "o", color=DARK, linestyle="none", markersize=11)
    axis.annotate(
        f"decode, {requests:,} request{'s' if requests > 1 else ''}", (here, _roof(machine, here) / 1e12),
        xytext=(12, -14), textcoords="offset points", fontsize=9,
    )  # fmt: skip
    axis.axvline(most, color=MIDDLE, linestyle="--", linewidth=1.2)
    bottom = _roof(machine, places[0]) / 1e12
    axis.annotate(
        "ever more\nrequests", (most, bottom), xytext=(5, 4), textcoords="offset points", fontsize=8, color=DARK, va="bottom",
    )  # fmt: skip
    rate = f"compute: {machine.flops_per_s / 1e12:,.0f} TFLOP/s"
    if machine.peak_flops_per_s not in (None, machine.flops_per_s):
        rate += f" (measured; data sheet {(machine.peak_flops_per_s or 0) / 1e12:,.0f})"
    axis.text(places[0] * 1.15, machine.flops_per_s / 1e12 * 1.25, rate, fontsize=8, va="bottom")
    axis.annotate(
        f"memory:\n{machine.bytes_per_s / 1e9:,.0f} GB/s", (1, _roof(machine, 1) / 1e12), xytext=(-8, 8), textcoords="offset points",
        fontsize=8, ha="right",
    )  # fmt: skip
    axis.set_xlim(places[0], places[-1])
    axis.set_ylim(bottom * 0.7, machine.flops_per_s / 1e12 * 2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_xlabel("FLOPs for each byte that the step moves", fontsize=9)
    axis.set_ylabel("TFLOP/s", fontsize=9)
    axis.tick_params(labelsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color=LIGHT, linewidth=0.6)


def _summary(
    shape: ModelShape, machine: Hardware, context: int, requests: int, dtype: str, weights: int, stored: int, cost: StepCost
) -> str:
    memory = machine.memory_bytes
    left = int(memory) - weights
    fit = fitting_requests(shape, left, context, kv_dtype=dtype)
    sums = (
        f"{shape.name} on the {machine.name}: {weights / 1e9:,.1f} GB of weights (bf16) and {stored / 1e9:,.1f} GB of K and V ({dtype}, "
        f"{shape.kv_bytes_per_token(dtype):,} bytes a token)"
    )
    some = f"{fit:,} requests of {context:,} tokens"
    if left <= 0:
        verdict = f"the weights alone are more than its {memory / 1e9:,.0f} GB."
    elif weights + stored > memory:
        verdict = f"{(weights + stored - memory) / 1e9:,.1f} GB more than its {memory / 1e9:,.0f}; {some} fit."
    else:
        verdict = f"that fits into its {memory / 1e9:,.0f} GB, and so would {some}."
    seconds, most = cost.seconds(machine.bytes_per_s, machine.flops_per_s), _most_flops_a_byte(shape, context, dtype)
    bound = "memory" if cost.bytes / machine.bytes_per_s >= cost.flops / machine.flops_per_s else "compute"
    speed = (
        f"A decode step {'would take' if weights + stored > memory else 'takes'} at least {1000 * seconds:,.1f} ms, {bound}-bound: "
        f"{requests / seconds:,.0f} tokens/s in all, {1 / seconds:,.0f} for each request. It has "
        f"{cost.flops / cost.bytes:,.1f} FLOPs a byte; ever more requests would bring it to {most:,.0f}, "
        f"and this GPU needs {machine.flops_per_s / machine.bytes_per_s:,.0f} to be compute-bound."
    )
    return f"{sums}: {verdict}\n{speed}"
