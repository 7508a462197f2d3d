"""This machine as a line in the table of hardware: its rates, measured on the engine itself.

Data-sheet numbers would not do. A small model on a CPU is bound by neither bytes nor operations but by what a step costs
besides: Python, small tensor operations, waking threads. So three kinds of steps are timed on the real runner, and
three constants are solved from them: the fixed cost of a step (decoding one short sequence), the rate of operations (a
chunk of a prompt), and the rate of bytes (plain reading of as many bytes as the model has).
"""

from __future__ import annotations

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
    decode_s = _step_seconds(model, block_size, new=1, context=64, repeats=4 * repeats)
    moved_s = step_cost(shape, [(1, 64)], 1, dtype).bytes / bytes_per_s
    overhead_s = max(0.0, decode_s - moved_s)
    prefill_s = _step_seconds(model, block_size, new=chunk, context=2 * chunk, repeats=repeats)
    flops_per_s = step_cost(shape, [(chunk, 2 * chunk)], 1, dtype).flops / max(prefill_s - overhead_s, 1e-6)
    memory = 2.0**34  # not used by a simulation: the pool's size is given in blocks
    return Hardware("this-machine", memory, bytes_per_s, flops_per_s, step_overhead_s=overhead_s)


def _step_seconds(model: Model, block_size: int, new: int, context: int, repeats: int) -> float:
    """Seconds of one real step over the last ``new`` of ``context`` tokens of one sequence, with one greedy token.

    The lower quartile of ``repeats``: whatever else the machine does only makes a step longer.
    """
    num_blocks = blocks_for(context, block_size)
    runner = TorchRunner(model, num_blocks, block_size)
    table = BlockTable(block_size)
    table.blocks.extend(range(num_blocks))
    plan = Plan(pieces=[Piece("probe", [1] * new, context - new, table)], draws=[Draw(0, Sampling(), 0, 0, 0)], num_rows=1)
    times = []
    for _ in range(repeats + 2):
        start = perf_counter()
        runner.execute(plan, start)
        times.append(perf_counter() - start)
    return sorted(times[2:])[repeats // 4]
