"""Who computes a step: the scheduler plans, a runner executes, and the runner's clock says when it ended.

The engine never asks what time it is. ``TorchRunner`` owns every tensor, runs the model and reads a real clock. Another
runner may compute nothing and only say when the step would have ended on some other machine: the same engine and the
same scheduler then simulate that machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, Protocol

from minikv.engine.scheduler import Plan
from minikv.model.sampling import Best, choose

if TYPE_CHECKING:
    from torch import Tensor

    from minikv.cache.paged import StepTensors
    from minikv.engine.compiled_step import CompiledStep
    from minikv.engine.graph import DecodeGraphs
    from minikv.model.weights import Model


@dataclass(frozen=True, slots=True)
class StepResult:
    """One token and its log-probability for each draw of the plan, and when the step ended (seconds, runner's clock)."""

    tokens: list[int]
    logprobs: list[float]
    ended_at: float


class Runner(Protocol):
    """What the engine needs of whoever computes. Times are seconds on the runner's own clock."""

    num_blocks: int
    block_size: int
    vocab: int
    max_context: int
    tokenizer: Any
    stop_tokens: tuple[int, ...]

    def content(self) -> dict[str, str]:
        """What K and V depend on besides the tokens: part of every prefix key."""
        ...

    def weights_changed(self) -> None:
        """The weights were written to: ``content`` must be found anew."""
        ...

    def now(self) -> float: ...

    def wait_until(self, at: float) -> None:
        """Nothing can run before ``at``: sleep, or set a virtual clock."""
        ...

    def execute(self, plan: Plan, now: float) -> StepResult:
        """Compute ``plan``, which begins at ``now``. When it raises, no token counts as computed."""
        ...


class TorchRunner:
    """Runs ``model`` over a paged pool of ``num_blocks`` blocks on the model's own device and dtype.

    Steps with the "cpu" attention go through the compiled forward pass of ``minikv.engine.compiled_step``; decode steps with
    the "gpu" attention are replayed from ``minikv.engine.graph``, on a CUDA device or where ``graphs`` is True.
    """

    def __init__(self, model: Model, num_blocks: int, block_size: int, attention: str = "auto", graphs: bool | None = None) -> None:
        from minikv.cache.paged import Paged

        self.model = model
        self.kv = Paged(model.shape, num_blocks, block_size, model.dtype, model.device, attention)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.vocab, self.max_context = model.shape.vocab, model.shape.max_context
        self.tokenizer, self.stop_tokens = model.tokenizer, model.stop_tokens
        self.compiled: CompiledStep | None = None
        if self.kv.attention.__module__ == "minikv.cache.attention.cpu":
            from minikv.engine.compiled_step import CompiledStep  # not above: on a GPU nothing is compiled by Numba

            self.compiled = CompiledStep(model)
        self.graphs: DecodeGraphs | None = None
        if graphs is None:
            graphs = self.kv.device.type == "cuda"
        if graphs and self.kv.attention.__module__ == "minikv.cache.attention.gpu":  # the reference asks the host for lengths
            from minikv.engine.graph import DecodeGraphs

            self.graphs = DecodeGraphs(model, self.kv)

    def content(self) -> dict[str, str]:
        return {"model": self.model.fingerprint, "dtype": str(self.kv.pool.dtype)}

    def weights_changed(self) -> None:
        self.model.weights_changed()
        if self.graphs is not None:
            self.graphs.forget()

    def now(self) -> float:
        return perf_counter()

    def wait_until(self, at: float) -> None:
        sleep(max(0.0, at - self.now()))

    def execute(self, plan: Plan, now: float) -> StepResult:
        """Compute ``plan``. On a GPU the host waits once, for the drawn tokens; a step that draws none is still running."""
        if plan.copies:
            with self._torch():
                self.kv.copy_blocks(plan.copies)
            plan.copies.clear()  # done, whatever happens to the rest of the step
        logits, best = self._logits(plan)
        tokens, logprobs = choose(logits, plan.draws, best) if plan.draws else ([], [])
        return StepResult(tokens, logprobs, self.now())

    def _logits(self, plan: Plan) -> tuple[Tensor, Best | None]:
        """One forward pass: K and V into the pool, logits [rows, vocab] for the pieces that want them.

        And the best of each row, where the pass has found it. Both are valid until the next step.
        """
        if self.compiled is not None:
            step = self.kv.begin(plan.pieces)
            if self.compiled.can(self.kv, step):
                return self.compiled(self.kv, step)
            with self._torch():
                return self._call_model(step), None
        with self._torch():
            if self.graphs is not None and self.graphs.can(plan.pieces):
                return self.graphs(plan.pieces), None
            return self._call_model(self.kv.begin(plan.pieces)), None

    def _call_model(self, step: StepTensors) -> Tensor:
        return self.model(step.token_ids, step.positions, self.kv, step.logit_rows)

    @contextmanager
    def _torch(self) -> Iterator[None]:
        """How torch computes: without gradients, and where the pool is, for there Triton launches."""
        import torch

        device = self.kv.device
        with torch.inference_mode(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield
