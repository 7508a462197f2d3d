"""The same engine at full scale, under a clock that is computed.

A learner has no L4 with a 4-billion-parameter model at hand. The engine does not mind: it asks a runner to execute a
plan and to say when it ended. ``RooflineRunner`` computes no token. It takes the plan's pieces, adds up the bytes that
the step must move and the operations that it must compute, and says that it took as long as the slower of the two
needs on a given machine. Scheduler, block pool, prefix cache and workload are the very objects that run for real, so
hits, evictions and queues are not modelled: they happen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace

from minikv.cache.blocks import blocks_for
from minikv.engine.runner import StepResult
from minikv.engine.scheduler import Plan
from minikv.errors import RequestError
from minikv.lab.cliff import CliffRow, check_context, measure_row
from minikv.lab.workload import Turn, Workload
from minikv.shape.hardware import HARDWARE, Hardware
from minikv.shape.model_shape import PRESETS, ModelShape
from minikv.shape.roofline import step_cost


class RooflineRunner:
    """Executes nothing; its clock moves by what the roofline says a step costs.

    ``weight_dtype`` and ``kv_dtype`` say in how many bytes a weight and a number of the cache are stored. Its tokens
    are all 0: who reads them needs another runner.
    """

    tokenizer = None
    stop_tokens: tuple[int, ...] = ()

    def __init__(
        self,
        shape: ModelShape,
        machine: Hardware,
        num_blocks: int,
        block_size: int,
        weight_dtype: str = "bf16",
        kv_dtype: str = "bf16",
    ) -> None:
        self.shape, self.machine = shape, machine
        self.weight_dtype, self.kv_dtype = weight_dtype, kv_dtype
        self.num_blocks, self.block_size = num_blocks, block_size
        self.vocab, self.max_context = shape.vocab, shape.max_context
        self._clock = 0.0

    def content(self) -> dict[str, str]:
        return {"model": self.shape.name, "dtype": self.kv_dtype}

    def weights_changed(self) -> None:
        """There are none."""

    def now(self) -> float:
        return self._clock

    def wait_until(self, at: float) -> None:
        self._clock = max(self._clock, at)

    def step_seconds(self, pieces: Sequence[tuple[int, int]], rows: int) -> float:
        """Seconds for a step over (new tokens, context tokens) with logits for ``rows`` tokens."""
        cost = step_cost(self.shape, pieces, rows, self.weight_dtype, self.kv_dtype)
        return cost.seconds(self.machine.bytes_per_s, self.machine.flops_per_s) + self.machine.step_overhead_s

    def execute(self, plan: Plan, now: float) -> StepResult:
        pieces = [(len(piece.tokens), piece.end) for piece in plan.pieces]
        self._clock = now + self.step_seconds(pieces, plan.num_rows)
        return StepResult([0] * len(plan.draws), [0.0] * len(plan.draws), self._clock)


WORKLOAD = Workload(system_tokens=10_000, turns=12, turn_tokens=1_000, output_tokens=75)
FITS = 13  # whole sessions, in fp8 and blocks of 16


@dataclass(frozen=True)
class Scenario:
    """A model on a machine under a workload, with so much memory for KV: everything that a simulated cliff depends on.

    The defaults are Momento's published experiment: Qwen3-4B on an NVIDIA L4, weights in fp8, a system prompt of 10,000 tokens,
    12 turns of 1,000 tokens in and 75 out. Two things in it are not published. The KV capacity is fitted to the
    speaker's "about 13" conversations: ``kv_bytes`` are what 13 whole sessions take in fp8. The step budget is not
    known either; 4,096 is a choice, and the time to first token below the cliff depends on it.
    """

    shape: ModelShape = PRESETS["qwen3-4b"]
    machine: Hardware = HARDWARE["l4"]
    workload: Workload = WORKLOAD
    kv_bytes: int = WORKLOAD.blocks(FITS, 16) * 16 * PRESETS["qwen3-4b"].kv_bytes_per_token("fp8")
    weight_dtype: str = "fp8"
    kv_dtype: str = "fp8"
    max_batch_tokens: int = 4096
    block_size: int = 16

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.max_batch_tokens < 1:
            raise RequestError(
                f"blocks and steps need room for a token; got a block size of {self.block_size} and {self.max_batch_tokens} tokens a step"
            )
        if self.shape.mla_latent is not None:
            raise RequestError(f"{self.shape.name} uses multi-head latent attention, whose steps are not simulated yet")
        check_context(self.workload, self.shape.max_context)
        if self.fits < 1:
            raise RequestError(
                f"{self.kv_bytes / 1e9:.2f} GB of KV hold {self.num_blocks * self.block_size} tokens in {self.kv_dtype}, less than "
                f"one session of {self.workload.system_tokens + self.workload.own_tokens}; give more memory, a smaller KV dtype "
                "or a shorter session"
            )

    def session_bytes(self, sessions: int, kv_dtype: str | None = None) -> int:
        """Bytes of KV of so many whole sessions that share the system prompt."""
        tokens = self.workload.blocks(sessions, self.block_size) * self.block_size
        return tokens * self.shape.kv_bytes_per_token(kv_dtype or self.kv_dtype)

    @property
    def num_blocks(self) -> int:
        """Whole blocks that ``kv_bytes`` hold in ``kv_dtype``."""
        return self.kv_bytes // (self.block_size * self.shape.kv_bytes_per_token(self.kv_dtype))

    @property
    def fits(self) -> int:
        """Whole sessions that fit, by arithmetic: the cliff must be behind this number."""
        own = blocks_for(self.workload.own_tokens, self.block_size)
        return (self.num_blocks - blocks_for(self.workload.system_tokens, self.block_size)) // own

    def with_capacity(self, sessions: int, kv_dtype: str = "fp8") -> Scenario:
        """The same with memory for exactly ``sessions`` whole sessions in ``kv_dtype``."""
        return replace(self, kv_bytes=self.session_bytes(sessions, kv_dtype))

    def run(self, sessions: int, on_turn: Callable[[Turn], None] = lambda turn: None) -> CliffRow:
        """Simulate ``sessions`` sessions from an empty cache; ``on_turn`` is told of each turn as it ends."""
        return measure_row(
            lambda num_blocks, block_size: RooflineRunner(
                self.shape, self.machine, self.num_blocks, block_size, self.weight_dtype, self.kv_dtype
            ),
            self.workload, self.fits, sessions, self.block_size, self.max_batch_tokens, on_turn,
        )  # fmt: skip


def run_all(
    tasks: Sequence[tuple[Scenario, int]], on_row: Callable[[CliffRow], None] = lambda row: None, processes: int | None = None
) -> list[CliffRow]:
    """Simulate each (scenario, sessions) of ``tasks``, on all cores; rows in the order of ``tasks``.

    ``on_row`` is called after each, in the order in which they end. A simulation is plain Python and depends on nothing
    but its scenario, so that one in another process gives the same row.
    """
    processes = min(os.cpu_count() or 1, len(tasks)) if processes is None else processes
    if processes <= 1:
        rows = []
        for scenario, sessions in tasks:
            rows.append(scenario.run(sessions))
            on_row(rows[-1])
        return rows
    with ProcessPoolExecutor(processes) as pool:
        # The longest first, so that no core is left with one of them at the end.
        order = sorted(range(len(tasks)), key=lambda place: -tasks[place][1])
        futures = {place: pool.submit(tasks[place][0].run, tasks[place][1]) for place in order}
        for future in as_completed(futures.values()):
            on_row(future.result())
        return [futures[place].result() for place in range(len(tasks))]
