"""This machine as a line in the table of hardware: its rates, measured on the engine itself.

Data-sheet numbers would not do. A small model on a CPU is bound by neither bytes nor operations but by what a step costs
besides: Python, small tensor operations, waking threads. So three kinds of steps are timed on the real runner, and
three constants are solved from them: the fixed cost of a step (decoding one short sequence), the rate of operations (a
chunk of a prompt), and the rate of bytes (plain reading of as many bytes as the model has).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING

from minikv.cache.blocks import BlockTable, blocks_for
from minikv.cache.step import Piece
from minikv.engine.runner import TorchRunner
from minikv.engine.scheduler import Plan
from minikv.lab.ceilings import measure as measure_ceilings
from minikv.model.sampling import Draw, Sampling
from minikv.shape.hardware import Hardware
from minikv.shape.roofline import step_cost

if TYPE_CHECKING:
    from minikv.model.weights import Model


def measure_machine(model: Model, block_size: int = 16, chunk_tokens: int = 512, repeats: int = 9) -> Hardware:
    """Constants with which the roofline predicts this machine's steps of ``model``; takes a few seconds."""
    shape, dtype = model.shape, str(model.dtype).removeprefix("torch.")
    chunk = min(chunk_tokens, shape.max_context // 2)
    bytes_per_s = measure_ceilings(shape, seconds=2.0).bytes_per_s
    decode_s = _usual(step_times_s(model, [(1, 64)], block_size, at_least=4 * repeats + 2))
    moved_s = step_cost(shape, [(1, 64)], 1, dtype).bytes / bytes_per_s
    overhead_s = max(0.0, decode_s - moved_s)
    prefill_s = _usual(step_times_s(model, [(chunk, 2 * chunk)], block_size, at_least=repeats + 2))
    flops_per_s = step_cost(shape, [(chunk, 2 * chunk)], 1, dtype).flops / max(prefill_s - overhead_s, 1e-6)
    memory = 2.0**34  # not used by a simulation: the pool's size is given in blocks
    return Hardware("this-machine", memory, bytes_per_s, flops_per_s, step_overhead_s=overhead_s)


def step_times_s(
    model: Model,
    pieces: Sequence[tuple[int, int]],
    block_size: int = 16,
    at_least: int = 2,
    seconds: float = 0.0,
    pool_blocks: int | None = None,
) -> list[float]:
    """Seconds of real steps over ``pieces`` of (new tokens, context tokens), each with one greedy token.

    What ``step_cost`` counts, with a clock beside it: every piece is a sequence of its own whose earlier tokens are in
    the cache already (their K and V are zeros, which take as long to read as any). Their blocks lie evenly spread over a
    pool of ``pool_blocks`` (default: just those that are needed). The step is repeated until ``seconds`` have passed,
    and at least so many times. The first of them also warms up, and on a fresh machine compiles. ValueError as for
    ``step_cost``, and for a pool that is too small.
    """
    step_cost(model.shape, pieces, len(pieces))  # raises if the pieces make no sense
    needed = sum(blocks_for(context, block_size) for _, context in pieces)
    num_blocks = needed if pool_blocks is None else pool_blocks
    if num_blocks < needed:
        raise ValueError(f"these sequences need {needed} blocks, the pool has {num_blocks}")
    runner = TorchRunner(model, num_blocks, block_size)
    spread = iter(range(0, num_blocks, num_blocks // needed))
    plan = Plan(num_rows=len(pieces))
    for row, (new, context) in enumerate(pieces):
        table = BlockTable(block_size)
        for block in islice(spread, blocks_for(context, block_size)):
            runner.kv.pool[block] = 0.0  # written to, or the system would show one and the same page of zeros everywhere
            table.blocks.append(block)
        plan.pieces.append(Piece(row, [1] * new, context - new, table))
        plan.draws.append(Draw(row, Sampling(), 0, 0, 0))
    times: list[float] = []
    until = perf_counter() + seconds
    while len(times) < at_least or perf_counter() < until:
        start = perf_counter()
        runner.execute(plan, start)
        times.append(perf_counter() - start)
    return times


def _usual(times: list[float]) -> float:
    """The lower quartile, without the two that warmed up: whatever else the machine does only makes a step longer."""
    warm = sorted(times[2:])
    return warm[len(warm) // 4]
