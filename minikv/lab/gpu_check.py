"""Everything about a GPU that can be checked and measured in one call, in a few minutes.

    machine   what the card is, and its own ceilings: a copy on the device, large matrix products
    parity    kernels, model and engine against attention and passes computed on the CPU in float64
    memory    what weights and KV take, against the arithmetic of ``minikv.shape``
    kernel    how fast the paged kernel reads K and V, against the copy; a chunk's operations, against the products
    steps     decode and prefill steps of a model, with and without CUDA graphs, against the roofline
    serving   256 requests of 100 to 1,024 tokens in and out: a published workload
    cliff     sessions against time to first token, around a pool that is kept small on purpose
    sizes     which tile sizes the attention kernel would be faster with

A section that fails is reported with its error, and the others go on. Only parity decides whether the check has passed:
the other figures are measured, not judged. Sizes come with a ``Scale``: FULL is meant to take five minutes on an H200, QUICK one or two,
and TINY takes the same ways through the code on a CPU, in Triton's interpreter.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.cache.attention.reference import attend_one
from minikv.cache.blocks import BlockTable, blocks_for
from minikv.cache.no_cache import logits as uncached_logits
from minikv.cache.paged import Paged
from minikv.cache.step import Piece
from minikv.engine import graph
from minikv.engine.engine import Engine
from minikv.engine.graph import Captured
from minikv.engine.runner import TorchRunner
from minikv.engine.scheduler import Plan
from minikv.lab.cliff import measure_row
from minikv.lab.workload import Workload
from minikv.model.sampling import Draw, Sampling
from minikv.model.weights import Model, _tensors, default_dtype, random_weights
from minikv.shape.model_shape import ModelShape, preset
from minikv.shape.roofline import attention_flops, step_cost

# GeeeekExplorer/nano-vllm, README, read 2026-11-29: 133,966 tokens, RTX 4070 Laptop (8 GB), Qwen3-0.6B, temperature 0.6.
PUBLISHED = (
    {"engine": "nano-vllm", "tokens_per_s": 1434.13, "machine": "RTX 4070 Laptop"},
    {"engine": "vLLM", "tokens_per_s": 1361.84, "machine": "RTX 4070 Laptop"},
)

BLOCK = 16
# Largest difference from float64 that rounding explains, by dtype: of attention (values of size 1), and of logits
# (relative to their norm) after a model of a few layers.
ATTENTION_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LOGIT_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
MEMORY_TOLERANCE = 0.05


@dataclass(frozen=True)
class Scale:
    """How much of everything. A pair is (sequences, context) or (new tokens, context)."""

    shape: ModelShape
    heads: tuple[tuple[int, int, int, int], ...]  # of the kernel's parity: heads, KV heads, head_dim, block size
    spans: tuple[tuple[int, int], ...]  # of the kernel's parity: cached tokens, new tokens
    copy_bytes: int
    products: tuple[int, ...]  # sides of square matrix products
    kv_bytes: int  # the most that the sections' pools may take
    reads: tuple[tuple[int, int], ...]
    chunks: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    context: int
    prompts: tuple[int, ...]
    requests: int
    lengths: tuple[int, int]
    batch_tokens: int
    workload: Workload
    fits: int
    sessions: tuple[int, ...]
    repeats: int
    seconds: float  # after which no section begins


FULL = Scale(
    shape=replace(preset("qwen3-0.6b"), max_context=32_768),
    heads=((16, 8, 128, 16), (4, 4, 64, 16), (9, 3, 64, 4), (8, 2, 128, 1), (6, 2, 80, 32)),
    spans=((0, 1), (15, 1), (16, 1), (17, 1), (1000, 1), (8000, 1), (0, 300), (16, 17), (777, 130), (0, 2)),
    copy_bytes=2**31, products=(4096, 8192), kv_bytes=40 * 10**9,
    reads=((1, 2_048), (1, 32_768), (8, 8_192), (64, 1_024), (64, 2_048), (256, 512)),
    chunks=((512, 512), (4_096, 4_096), (2_048, 16_384)),
    batches=(1, 8, 32, 128, 256), context=1_024, prompts=(512, 2_048, 8_192),
    requests=256, lengths=(100, 1_024), batch_tokens=16_384,
    workload=Workload(system_tokens=4_096, turns=10, turn_tokens=1_500, output_tokens=36), fits=8, sessions=(6, 8, 9, 10, 12),
    repeats=10, seconds=270,
)  # fmt: skip

QUICK = replace(
    FULL, heads=FULL.heads[:2], copy_bytes=2**29, products=(4096,), kv_bytes=16 * 10**9,
    reads=((1, 8_192), (64, 1_024)), chunks=((4_096, 4_096),), batches=(1, 32, 128), prompts=(2_048,), requests=64, lengths=(100, 300),
    workload=replace(FULL.workload, turns=5), sessions=(8, 10), repeats=5, seconds=90,
)  # fmt: skip

TINY = Scale(
    shape=ModelShape(layers=1, hidden=16, heads=2, kv_heads=1, head_dim=16, vocab=64, ffn=32, max_context=256, qk_norm=True, name="tiny"),
    heads=((2, 1, 16, 4),), spans=((0, 1), (37, 1), (3, 6)), copy_bytes=2**20, products=(64,), kv_bytes=10**6,
    reads=((1, 64), (3, 20)), chunks=((8, 24),), batches=(1, 3), context=18, prompts=(8,), requests=3, lengths=(2, 4), batch_tokens=16,
    workload=Workload(system_tokens=16, turns=2, turn_tokens=14, output_tokens=2), fits=1, sessions=(1, 2), repeats=1, seconds=600,
)  # fmt: skip


@dataclass
class Bench:
    """The device under test, and what earlier sections measured on it (bytes and operations a second)."""

    scale: Scale
    device: torch.device
    dtype: torch.dtype
    bytes_per_s: float | None = None
    flops_per_s: float | None = None
    started: float = 0.0

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def ceilings(self) -> tuple[float, float]:
        """Measured now if the section that should have done it failed or was left out."""
        if self.bytes_per_s is None or self.flops_per_s is None:
            machine(self)
        assert self.bytes_per_s is not None
        assert self.flops_per_s is not None
        return self.bytes_per_s, self.flops_per_s

    def seconds(self, function: Callable[[], object], repeats: int | None = None) -> float:
        """Median time of ``function`` on the device, after one call to warm up."""
        function()
        times = []
        for _ in range(repeats or self.scale.repeats):
            if self.on_gpu:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                function()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) / 1e3)
            else:
                before = perf_counter()
                function()
                times.append(perf_counter() - before)
        return median(times)

    def room(self) -> int:
        """Bytes that a section's pool may take: what the scale says, but at most half of what is free."""
        if not self.on_gpu:
            return self.scale.kv_bytes
        return min(self.scale.kv_bytes, torch.cuda.mem_get_info(self.device)[0] // 2)


# ---------------------------------------------------------------- making things


class WeightsOnDevice(Mapping[str, Tensor]):
    """Random weights of ``shape`` that are drawn where they are needed, one at a time: no second copy, no transfer."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes = {name: (size, scale) for name, size, scale in _tensors(shape)}
        self.dtype, self.generator = dtype, torch.Generator(device).manual_seed(0)

    def __getitem__(self, name: str) -> Tensor:
        size, scale = self.sizes[name]
        if name.endswith("norm.weight"):
            return torch.ones(size, device=self.generator.device)
        return torch.randn(size, generator=self.generator, dtype=self.dtype, device=self.generator.device) * scale

    def __iter__(self) -> Iterator[str]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)


def build(bench: Bench) -> Model:
    """The scale's model with random weights; its fingerprint, which reads them all once, is known afterwards."""
    model = Model(bench.scale.shape, WeightsOnDevice(bench.scale.shape, bench.dtype, bench.device), bench.dtype, bench.device)
    model._fingerprint = "random"  # what nobody else caches need not be read over and hashed
    return model


def spread(spans: Sequence[tuple[int, int]], num_blocks: int, block_size: int) -> list[Piece]:
    """A piece for each (cached tokens, new tokens), its blocks all over the pool, from its last block on."""
    order = list(range(num_blocks))
    random.Random(0).shuffle(order)
    order.remove(num_blocks - 1)
    order.append(num_blocks - 1)
    pieces = []
    for i, (start, count) in enumerate(spans):
        table = BlockTable(block_size)
        table.blocks.extend(order.pop() for _ in range(blocks_for(start + count, block_size)))
        pieces.append(Piece(i, [1 + i % 7] * count, start, table))
    return pieces


def blocks_of(spans: Sequence[tuple[int, int]], block_size: int) -> int:
    return sum(blocks_for(start + count, block_size) for start, count in spans)


def _block_bytes(bench: Bench) -> int:
    return BLOCK * bench.scale.shape.kv_numbers_per_token * bench.dtype.itemsize


def free(bench: Bench) -> None:
    """Give back what a section held."""
    gc.collect()
    if bench.on_gpu:
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- the sections


def machine(bench: Bench) -> dict[str, Any]:
    """The card and its ceilings: bytes read and written by a copy, operations of matrix products, a second."""
    scale, device = bench.scale, bench.device
    pair = torch.ones(2, scale.copy_bytes // 4, device=device)
    bench.bytes_per_s = pair.nbytes / bench.seconds(lambda: pair[1].copy_(pair[0]))
    rates = {}
    for side in scale.products:
        a, b = (torch.randn(side, side, dtype=bench.dtype, device=device) for _ in "ab")
        rates[side] = 2 * side**3 / bench.seconds(partial(torch.matmul, a, b))
    bench.flops_per_s = max(rates.values())
    about: dict[str, Any] = {"name": "CPU", "torch": torch.__version__, "dtype": str(bench.dtype).removeprefix("torch.")}
    if bench.on_gpu:
        properties = torch.cuda.get_device_properties(device)
        about |= {
            "name": properties.name, "memory_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count,
            "capability": ".".join(map(str, torch.cuda.get_device_capability(device))), "cuda": torch.version.cuda,
        }  # fmt: skip
    try:
        import triton

        about["triton"] = triton.__version__
    except ImportError:
        about["triton"] = None
    return about | {"copy_gb_s": bench.bytes_per_s / 1e9, "gemm_tflop_s": {str(side): rate / 1e12 for side, rate in rates.items()}}


def parity(bench: Bench) -> dict[str, Any]:
    """Kernels, model and engine against the CPU. ``passed`` is whether all of them agree; a check that raises has not passed."""
    checks: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    for heads, kv_heads, head_dim, block_size in bench.scale.heads:
        for dtype in ATTENTION_TOLERANCE:
            name = f"kernel, {heads} heads, {kv_heads} KV heads of {head_dim}, blocks of {block_size}, {_name(dtype)}"
            checks.append((name, partial(kernel_parity, bench, heads, kv_heads, head_dim, block_size, dtype)))
    if bench.on_gpu and bench.room() > 6 * 10**9:
        far = 2**31 // (2 * 8 * 16 * 128) + 700  # its last blocks begin beyond 2**31 numbers
        checks.append(("kernel, a pool of more than 2**31 numbers", partial(kernel_parity, bench, 16, 8, 128, 16, torch.bfloat16, far)))
    checks += [(f"model, {_name(dtype)}", partial(model_parity, bench, dtype)) for dtype in (torch.float32, bench.dtype)]
    checks.append(("engine, float32: chunks, hits, preemptions, graphs", partial(engine_parity, bench)))
    rows = []
    for name, check in checks:
        try:
            row = check()
        except Exception as wrong:
            row = {"passed": False, "error": _said(wrong)}
            if not alive(bench):
                raise
        rows.append({"check": name, **row})
    return {"passed": all(row["passed"] for row in rows), "rows": rows}


def kernel_parity(
    bench: Bench, heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, num_blocks: int = 0
) -> dict[str, Any]:
    """Decodes, chunks and padding of one step against dense attention in float64, and what was written to the pool."""
    spans = bench.scale.spans
    shape = ModelShape(layers=1, hidden=8, heads=heads, kv_heads=kv_heads, head_dim=head_dim, vocab=8, ffn=8)
    num_blocks = num_blocks or blocks_of(spans, block_size) + 3
    paged = Paged(shape, num_blocks, block_size, dtype, bench.device, "gpu", bucket=lambda tokens: tokens + 2)
    pieces = spread(spans, num_blocks, block_size)
    step = paged.begin(pieces)
    generator = torch.Generator().manual_seed(0)
    new = torch.randn(len(step.slots), heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    new = new.to(bench.device)
    q, k, v = new.split((heads, kv_heads, kv_heads), 1)
    past = torch.randn(2, max(start for start, _ in spans), kv_heads, head_dim, generator=generator).to(dtype)  # the same for all
    for piece in pieces:
        if piece.start:
            place = torch.arange(piece.start)
            block = torch.tensor(piece.table.blocks)[place // block_size]  # type: ignore[union-attr]
            for half in (0, 1):
                # one index for blocks and slots: [tokens, kv_heads, head_dim]
                paged.pool[block.to(bench.device), 0, half, :, (place % block_size).to(bench.device)] = past[half, : piece.start].to(
                    bench.device
                )
    before = [paged.pool[torch.tensor(piece.table.blocks, device=bench.device)].cpu() for piece in pieces]  # type: ignore[union-attr]
    out = paged.attend(0, q, k, v).double().cpu()
    error, first = 0.0, 0
    for i, piece in enumerate(pieces):
        rows = slice(first, first + len(piece.tokens))
        keys, values = (torch.cat((past[j, : piece.start], t[rows].cpu())).double().transpose(0, 1) for j, t in enumerate((k, v)))
        want = attend_one(q[rows].double().cpu(), keys, values)
        error = max(error, float((out[rows] - want).abs().max()))
        after = paged.pool[torch.tensor(piece.table.blocks, device=bench.device)].cpu()  # type: ignore[union-attr]
        for j, t in enumerate((keys, values)):
            stored = after[:, 0, j].transpose(0, 1).flatten(1, 2)  # [kv_heads, slots, head_dim]
            if not torch.equal(stored[:, : piece.end].double(), t):
                return {"passed": False, "error": f"piece {i}: what lies in the pool is not what was stored"}
            rest = before[i][:, 0, j].transpose(0, 1).flatten(1, 2)[:, piece.end :]
            if not torch.equal(stored[:, piece.end :], rest):
                return {"passed": False, "error": f"piece {i}: wrote beyond its tokens"}
        first = rows.stop
    return {"passed": error <= ATTENTION_TOLERANCE[dtype], "error_at_most": error, "tolerance": ATTENTION_TOLERANCE[dtype]}


def parity_shape(bench: Bench) -> ModelShape:
    """A model that a CPU computes in float64 in a moment, built like the scale's."""
    if not bench.on_gpu:
        return bench.scale.shape
    return replace(bench.scale.shape, layers=4, hidden=256, heads=8, kv_heads=4, head_dim=64, vocab=2048, ffn=512, max_context=2048)


def model_parity(bench: Bench, dtype: torch.dtype) -> dict[str, Any]:
    """Logits of a prompt that comes in two chunks and then token by token, against one uncached pass in float64 on the CPU."""
    shape = parity_shape(bench)
    weights = random_weights(shape, 0)
    model, oracle = Model(shape, weights, dtype, bench.device), Model(shape, weights, torch.float64)
    long = 100 if bench.on_gpu else 14
    tokens = random.Random(1).choices(range(shape.vocab), k=long + 3)
    want = uncached_logits(oracle, tokens)
    runner = TorchRunner(model, blocks_for(len(tokens), BLOCK) + 1, BLOCK, "gpu", True)
    table = BlockTable(BLOCK)
    table.blocks.extend(range(blocks_for(len(tokens), BLOCK)))
    got = []
    for begin, end in ((0, long // 3), (long // 3, long), *((at, at + 1) for at in range(long, long + 3))):
        plan = Plan(pieces=[Piece(0, tokens[begin:end], begin, table, "last" if end - begin == 1 else "all")])
        got.append(runner._logits(plan)[0].double().cpu())
    error = float((torch.cat(got) - want).norm() / want.norm())
    return {"passed": error <= LOGIT_TOLERANCE[dtype], "error_at_most": error, "tolerance": LOGIT_TOLERANCE[dtype]}


def engine_parity(bench: Bench) -> dict[str, Any]:
    """Greedy tokens in float32 from a pool that is too small, against uncached passes in float64 where these are clear."""
    shape = parity_shape(bench)
    weights = random_weights(shape, 0)
    model, oracle = Model(shape, weights, torch.float32, bench.device), Model(shape, weights, torch.float64)
    draw = random.Random(2)
    count, own, new = (12, 60, 24) if bench.on_gpu else (2, 5, 5)
    shared = draw.choices(range(shape.vocab), k=40 if bench.on_gpu else 8)
    prompts = [shared + draw.choices(range(shape.vocab), k=draw.randrange(own // 2, own)) for _ in range(count)]
    block = BLOCK if bench.on_gpu else 4
    most = max(blocks_for(len(prompt) + new, block) for prompt in prompts)
    runner = TorchRunner(model, most + most // 2 + 1 if bench.on_gpu else most, block, "gpu", True)
    engine = Engine(runner=runner, max_batch_tokens=48 if bench.on_gpu else 8)
    outs = engine.generate(prompts, Sampling(max_new_tokens=new, ignore_eos=True))
    engine.check_integrity()
    stats, compared = engine.stats(), 0
    for number, (prompt, out) in enumerate(zip(prompts, outs, strict=True)):
        logits = uncached_logits(oracle, prompt + out.tokens[:-1])[len(prompt) - 1 :]
        best = logits.topk(2)
        for i, token in enumerate(out.tokens):
            if best.values[i, 0] - best.values[i, 1] > 1e-3:
                compared += 1
                if token != int(best.indices[i, 0]):
                    return {"passed": False, "error": f"prompt {number}: token {i} is {token}, the oracle's {int(best.indices[i, 0])}"}
    return {
        "passed": compared > 0, "tokens_compared": compared, "hit_tokens": stats.hit_tokens, "preemptions": stats.preemptions,
        "recorded_sizes": len(runner.graphs.steps) if runner.graphs else 0,
    }  # fmt: skip


def memory(bench: Bench) -> dict[str, Any]:
    """Bytes that a model, its pool and some steps take at their peak, against parameters and blocks times their sizes."""
    shape, device = bench.scale.shape, bench.device
    before = 0
    if bench.on_gpu:
        before = torch.cuda.memory_allocated(device)
    model = build(bench)
    num_blocks = bench.room() // _block_bytes(bench)
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    runner = TorchRunner(model, num_blocks, BLOCK, "gpu", True)
    engine = Engine(runner=runner, max_batch_tokens=min(2048, bench.scale.batch_tokens))
    length = min(bench.scale.prompts)
    engine.generate([[1] * length, [2] * length], Sampling(max_new_tokens=3, ignore_eos=True))
    weights = sum(weight.nbytes for _, weight in model.named_weights())
    computed_weights = shape.parameters * bench.dtype.itemsize
    computed_kv = (num_blocks + 1) * _block_bytes(bench)
    found = torch.cuda.max_memory_allocated(device) - before if bench.on_gpu else weights + runner.kv.pool.nbytes
    off = found / (computed_weights + computed_kv) - 1
    return {
        "weight_bytes": weights, "computed_weight_bytes": computed_weights,
        "kv_bytes": runner.kv.pool.nbytes, "computed_kv_bytes": computed_kv,
        "peak_bytes": found, "off": off, "within_tolerance": abs(off) <= MEMORY_TOLERANCE, "tolerance": MEMORY_TOLERANCE,
    }  # fmt: skip


def attention_kernels(bench: Bench) -> dict[str, Any]:
    """The paged kernel alone, over all layers: GB/s of K and V in decode steps, TFLOP/s of chunks."""
    bytes_per_s, flops_per_s = bench.ceilings()
    reads, chunks = [], []
    for sequences, context in bench.scale.reads:
        seconds, sequences, context = kernel_seconds(bench, [(context - 1, 1)] * sequences)
        if seconds:
            rate = sequences * context * bench.scale.shape.kv_numbers_per_token * bench.dtype.itemsize / seconds
            reads.append(
                {"sequences": sequences, "context": context, "gb_s": rate / 1e9, "of_copy": rate / bytes_per_s, "seconds": seconds}
            )
    for new, context in bench.scale.chunks:
        seconds, _, _ = kernel_seconds(bench, [(context - new, new)])
        if seconds:
            rate = attention_flops(bench.scale.shape, new, context) / seconds
            row = {"new_tokens": new, "context": context, "tflop_s": rate / 1e12, "of_gemm": rate / flops_per_s, "seconds": seconds}
            if new == context:
                row["torch_sdpa_tflop_s"] = attention_flops(bench.scale.shape, new, context) / sdpa_seconds(bench, new) / 1e12
            chunks.append(row)
    return {"reads": reads, "chunks": chunks}


def kernel_seconds(bench: Bench, spans: list[tuple[int, int]]) -> tuple[float, int, int]:
    """Seconds of one step's attention over all layers, replayed as a graph; and (sequences, context) as far as they had room."""
    shape = bench.scale.shape
    while spans and blocks_of(spans, BLOCK) * _block_bytes(bench) > bench.room():
        spans = spans[: len(spans) // 2]
    if not spans:
        return 0.0, 0, 0
    num_blocks = blocks_of(spans, BLOCK)
    paged = Paged(shape, num_blocks, BLOCK, bench.dtype, bench.device, "gpu")
    for block in paged.pool.split(1024):
        block.normal_()
    step = paged.begin(spread(spans, num_blocks, BLOCK))
    tokens = len(step.slots)
    qkv = torch.randn(tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim, dtype=bench.dtype, device=bench.device)
    q, k, v = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)

    def walk() -> None:
        for layer in range(shape.layers):
            paged.attend(layer, q, k, v)

    with torch.inference_mode():
        seconds = bench.seconds(Captured(walk, bench.device).replay)
    return seconds, len(spans), sum(spans[0])


def sdpa_seconds(bench: Bench, tokens: int) -> float:
    """torch's own causal attention over contiguous K and V of one sequence, all layers one after the other."""
    shape = bench.scale.shape
    q = torch.randn(1, shape.heads, tokens, shape.head_dim, dtype=bench.dtype, device=bench.device)
    k, v = (torch.randn(1, shape.kv_heads, tokens, shape.head_dim, dtype=bench.dtype, device=bench.device) for _ in "kv")

    def attend() -> None:
        for _ in range(shape.layers):
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with torch.inference_mode():
        return bench.seconds(attend, 3)


def make_runner(bench: Bench, model: Model, num_blocks: int, sequences: int, context: int) -> tuple[TorchRunner, str | None]:
    """A runner whose graphs for up to ``sequences`` of ``context`` tokens are recorded; or one without any, and why."""
    runner = TorchRunner(model, num_blocks, BLOCK, "gpu", True)
    assert runner.graphs is not None
    try:
        if bench.on_gpu:  # elsewhere recording saves nothing
            runner.graphs.prepare(range(1, sequences + 1), context)
    except Exception as wrong:
        if not alive(bench):
            raise
        runner.graphs = None
        return runner, _said(wrong)
    return runner, None


def steps(bench: Bench) -> dict[str, Any]:
    """Whole steps, sampling included, as the engine runs them: seconds on the host's clock, against the roofline.

    ``device_s`` is the replay of a graph alone, on the device's clock: what is left is the host's share.
    """
    shape, scale, model = bench.scale.shape, bench.scale, build(bench)
    wanted = max(scale.batches) * blocks_for(scale.context, BLOCK) + blocks_for(max(scale.prompts), BLOCK)
    num_blocks = min(bench.room() // _block_bytes(bench), wanted)
    runner = TorchRunner(model, num_blocks, BLOCK, "gpu", True)
    cases = [("decode", [(scale.context - 1, 1)] * batch, recorded) for batch in scale.batches for recorded in (True, False)]
    cases += [("prefill", [(0, tokens)], False) for tokens in scale.prompts]
    rows = []
    for kind, spans, recorded in cases:
        if blocks_of(spans, BLOCK) > num_blocks:
            continue
        row: dict[str, Any] = {
            "step": kind, "sequences": len(spans), "new_tokens": sum(count for _, count in spans), "context": sum(spans[0]),
            "graphs": recorded,
        }  # fmt: skip
        try:
            cost = step_cost(shape, [(count, start + count) for start, count in spans], len(spans), _name(bench.dtype))
            limit = cost.seconds(*bench.ceilings())
            row |= step_seconds(bench, runner, spread(spans, num_blocks, BLOCK), recorded)
            row |= {"limit_s": limit, "of_limit": limit / row["seconds"]}
        except Exception as wrong:
            row["error"] = _said(wrong)
            if not alive(bench):
                raise
        rows.append(row)
    return {"rows": rows}


def step_seconds(bench: Bench, runner: TorchRunner, pieces: list[Piece], recorded: bool) -> dict[str, Any]:
    """Median seconds of a step of ``pieces``, from the plan to the drawn tokens; the host waits for them."""
    plan = Plan(pieces=pieces, draws=[Draw(i, Sampling(), 0, 0, 0) for i in range(len(pieces))], num_rows=len(pieces))
    walls, graphs = [], runner.graphs
    try:
        runner.graphs = graphs if recorded else None
        for turn in range(-2, bench.scale.repeats):
            before = perf_counter()
            runner.execute(plan, 0.0)
            if turn >= 0:
                walls.append(perf_counter() - before)
    finally:
        runner.graphs = graphs
    device_s = None
    if recorded and bench.on_gpu and graphs is not None:
        device_s = bench.seconds(graphs.steps[graphs.size(pieces)][1].replay)
    return {"seconds": median(walls), "device_s": device_s}


class CostOfSteps:
    """Adds up, while an engine runs, the least time that the roofline allows its steps, and where the time went."""

    def __init__(self, bench: Bench, runner: TorchRunner) -> None:
        self.bench, self.runner, self.limit_s, self.steps, self.executing_s = bench, runner, 0.0, 0, 0.0
        self.rates = bench.ceilings()

    def __enter__(self) -> CostOfSteps:
        execute = self.runner.execute

        def counted(plan: Plan, now: float) -> Any:
            pieces = [(len(piece.tokens), piece.end) for piece in plan.pieces]
            self.limit_s += step_cost(self.bench.scale.shape, pieces, plan.num_rows, _name(self.bench.dtype)).seconds(*self.rates)
            self.steps += 1
            before = perf_counter()
            result = execute(plan, now)
            self.executing_s += perf_counter() - before
            return result

        self.patch = patch.object(self.runner, "execute", counted)
        self.patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.stop()


def serving(bench: Bench) -> dict[str, Any]:
    """nano-vllm's published workload: all requests at once, random lengths in and out, temperature 0.6, no early stop."""
    scale, shape, model = bench.scale, bench.scale.shape, build(bench)
    draw = random.Random(0)
    prompts = [draw.choices(range(min(10_000, shape.vocab)), k=draw.randint(*scale.lengths)) for _ in range(scale.requests)]
    outputs = [draw.randint(*scale.lengths) for _ in range(scale.requests)]
    needed = sum(blocks_for(len(prompt) + new, BLOCK) for prompt, new in zip(prompts, outputs, strict=True))
    room = torch.cuda.mem_get_info(bench.device)[0] * 7 // 10 if bench.on_gpu else scale.kv_bytes
    preparing = perf_counter()
    num_blocks = min(needed, room // _block_bytes(bench))
    runner, without_graphs = make_runner(bench, model, num_blocks, scale.requests, 2 * scale.lengths[1])
    engine = Engine(runner=runner, max_batch_tokens=scale.batch_tokens, max_batch_requests=scale.requests)
    warm_up = Sampling(max_new_tokens=2, temperature=0.6, ignore_eos=True)
    engine.generate([[1] * (scale.lengths[0] * 3 // 2)] * min(2, scale.requests), warm_up)
    preparing = perf_counter() - preparing
    with CostOfSteps(bench, runner) as cost:
        started = perf_counter()
        for number, (prompt, new) in enumerate(zip(prompts, outputs, strict=True)):
            engine.add(number, prompt, Sampling(max_new_tokens=new, temperature=0.6, seed=number, ignore_eos=True))
        while engine.has_work:
            engine.step()
        seconds = perf_counter() - started
    return {
        "requests": scale.requests, "prompt_tokens": sum(map(len, prompts)), "output_tokens": sum(outputs), "seconds": seconds,
        "tokens_per_s": sum(outputs) / seconds, "limit_s": cost.limit_s, "of_limit": cost.limit_s / seconds, "steps": cost.steps,
        "executing_s": cost.executing_s, "preemptions": engine.stats().preemptions, "preparing_s": preparing,
        "without_graphs": without_graphs, "published": list(PUBLISHED),
    }  # fmt: skip


def cliff(bench: Bench) -> dict[str, Any]:
    """Sessions around a pool for ``fits`` of them: time to first token and hit rate on both sides of the knee."""
    scale, model = bench.scale, build(bench)
    without_graphs: list[str] = []

    def ready(num_blocks: int, block_size: int) -> TorchRunner:
        assert block_size == BLOCK
        longest = scale.workload.system_tokens + scale.workload.own_tokens
        runner, why = make_runner(bench, model, num_blocks, max(scale.sessions), longest)
        without_graphs.extend([why] if why else [])
        return runner

    Engine(runner=ready(8, BLOCK)).generate([[1] * 40], Sampling(max_new_tokens=2, ignore_eos=True))  # compiles the kernels
    rows = []
    for sessions in scale.sessions:
        rows.append(asdict(measure_row(ready, scale.workload, scale.fits, sessions, BLOCK, min(scale.batch_tokens, 4096))))
        free(bench)
    return {"fits_sessions": scale.fits, "workload": asdict(scale.workload), "rows": rows, "without_graphs": without_graphs[:1]}


def tile_sizes(bench: Bench) -> dict[str, Any]:
    """The kernel with other tiles than it has chosen: seconds for one decode case and one chunk each."""
    from minikv.cache.attention import gpu

    wide = gpu._power_of_2(bench.scale.shape.head_dim)
    chosen = gpu._sizes_for(bench.dtype, bench.device, wide)
    decode, chunk = [(bench.scale.reads[-1][1] - 1, 1)] * bench.scale.reads[-1][0], bench.scale.chunks[0]
    tried = {chosen} | {(chosen[0], chosen[1], tile, stages) for tile in (32, 64, 128) for stages in (2, 3, 4)}
    tried |= {(rows, warps, chosen[2], chosen[3]) for rows, warps in ((64, 4), (128, 4), (128, 8))}
    rows = []
    for sizes in sorted(tried) if bench.on_gpu else [chosen]:
        if perf_counter() - bench.started > bench.scale.seconds + 20:
            break
        row: dict[str, Any] = dict(zip(("rows", "warps", "tile", "stages"), sizes, strict=True)) | {"chosen": sizes == chosen}
        try:
            with patch.object(gpu, "_sizes_for", lambda *_, sizes=sizes: sizes):
                row["decode_s"] = kernel_seconds(bench, decode)[0]
                row["chunk_s"] = kernel_seconds(bench, [(chunk[1] - chunk[0], chunk[0])])[0]
        except Exception as wrong:  # a tile that does not fit in shared memory, for instance
            row["error"] = _said(wrong)
            if not alive(bench):
                raise
        rows.append(row)
        free(bench)
    return {"rows": rows}


SECTIONS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "machine": machine, "parity": parity, "memory": memory, "kernel": attention_kernels, "steps": steps, "serving": serving,
    "cliff": cliff, "sizes": tile_sizes,
}  # fmt: skip


# ---------------------------------------------------------------- one after the other


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _said(wrong: BaseException) -> str:
    """The kind of error and the last line of what it says that says something."""
    lines = [line.strip() for line in str(wrong).splitlines() if line.strip()]
    return f"{type(wrong).__name__}: {lines[0][:300] if lines else ''}"


def alive(bench: Bench) -> bool:
    """Whether the device still answers: after an illegal access none of this process's work on it does."""
    if not bench.on_gpu:
        return True
    try:
        torch.cuda.synchronize(bench.device)
        torch.zeros(1, device=bench.device).add_(1).item()
    except RuntimeError:
        return False
    return True


def make_bench(device: str, quick: bool, started: float) -> Bench:
    """FULL or QUICK on a CUDA device, TINY on a CPU."""
    where = torch.device(device)
    if where.type == "cuda":
        return Bench(QUICK if quick else FULL, where, default_dtype(where), started=started)
    return Bench(TINY, where, torch.bfloat16, started=started)


def run(
    bench: Bench, names: Sequence[str], on_section: Callable[[str, dict[str, Any]], None] = lambda name, result: None
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Run the sections called ``names``. Returns their results, and the names that are left because the device is lost.

    A result holds ``ok`` and ``seconds`` beside its figures, or ``error``.
    """
    results: dict[str, dict[str, Any]] = {}
    for place, name in enumerate(names):
        before = perf_counter()
        if before - bench.started > bench.scale.seconds:
            results[name] = {"ok": False, "error": f"left out: more than {bench.scale.seconds:.0f} s have passed", "seconds": 0.0}
        else:
            try:
                with patch.object(graph, "LEAST_WIDTH", graph.LEAST_WIDTH if bench.on_gpu else 1):  # the interpreter takes its time
                    results[name] = {"ok": True, **SECTIONS[name](bench)}
            except Exception as wrong:
                results[name] = {"ok": False, "error": _said(wrong)}
            results[name]["seconds"] = perf_counter() - before
        on_section(name, results[name])
        if not alive(bench):
            return results, list(names[place + 1 :])
        free(bench)
    return results, []
