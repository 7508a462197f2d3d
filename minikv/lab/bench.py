"""How fast is it? The engine against other engines, and both against what the machine can do at best.

Four workloads, the same for every engine: one short and one long prompt alone, many short ones, several long ones.
All run the same random weights over the same random tokens, greedily and without early stops, so that the work is the
same to the token. Speed is generated tokens a second over the whole run, prefill included: the number that a user of
a batch feels.

Absolute numbers age with the machine, and on a shared one they change by the minute. So engines take turns, run by
run, each figure is a median, and beside it stands the *share of the limit*: the least time that the run's own steps
can take on this machine (``shape/roofline.py`` over ``lab/ceilings.py``), divided by the time that they took.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from minikv.engine.engine import Engine
from minikv.engine.metrics import percentile
from minikv.engine.runner import Runner, StepResult, TorchRunner
from minikv.engine.scheduler import Plan
from minikv.lab.ceilings import Ceilings
from minikv.model.sampling import Sampling
from minikv.shape.model_shape import ModelShape
from minikv.shape.roofline import step_cost

if TYPE_CHECKING:
    from minikv.model.weights import Model

PEERS = {"hf": "minikv.lab.peers.hf:HuggingFace"}
BLOCK_SIZE = 16
MAX_BATCH_TOKENS = 512
# A loop of single calls costs the same a request however many there are: so many of a workload's requests are run.
ONE_BY_ONE_REQUESTS = 4


@dataclass(frozen=True)
class BenchWorkload:
    """``requests`` prompts of ``shortest`` to ``longest`` random tokens, each continued by ``new_tokens``."""

    requests: int
    shortest: int
    longest: int
    new_tokens: int

    @property
    def name(self) -> str:
        lengths = f"{self.shortest:,}" if self.shortest == self.longest else f"{self.shortest:,} to {self.longest:,}"
        return f"{self.requests} request{'s' if self.requests > 1 else ''}, {lengths} in, {self.new_tokens} out"

    def prompts(self, vocab: int, seed: int = 1) -> list[list[int]]:
        """The same token ids for the same seed; lengths are drawn from the same source."""
        draw = random.Random(seed)
        return [[draw.randrange(vocab) for _ in range(draw.randint(self.shortest, self.longest))] for _ in range(self.requests)]


WORKLOADS = (
    BenchWorkload(1, 32, 32, 128),
    BenchWorkload(1, 1024, 1024, 64),
    BenchWorkload(32, 32, 128, 64),
    BenchWorkload(12, 900, 1000, 32),
)


def quick(workload: BenchWorkload) -> BenchWorkload:
    """A quarter of the requests and half of the new tokens."""
    return BenchWorkload(max(1, workload.requests // 4), workload.shortest, workload.longest, workload.new_tokens // 2)


@dataclass(frozen=True)
class Step:
    """What one step computed, as (new tokens, context tokens) of each piece, and how long it took."""

    pieces: tuple[tuple[int, int], ...]
    rows: int
    seconds: float

    @property
    def is_decode(self) -> bool:
        return all(new == 1 for new, _ in self.pieces)


class Recorder:
    """A runner that writes down the steps of another one."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.steps: list[Step] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, plan: Plan, now: float) -> StepResult:
        result = self._runner.execute(plan, now)
        pieces = tuple((piece.end - piece.start, piece.end) for piece in plan.pieces)
        self.steps.append(Step(pieces, plan.num_rows, result.ended_at - now))
        return result


def limit_seconds(shape: ModelShape, steps: Iterable[Step], ceilings: Ceilings, dtype: str = "float32") -> float:
    """The least time that ``steps`` can take: for each the longer of its bytes and its FLOPs at the machine's best rates."""
    costs = (step_cost(shape, step.pieces, step.rows, dtype) for step in steps)
    return sum(cost.seconds(ceilings.bytes_per_s, ceilings.flops_per_s) for cost in costs)


@dataclass
class Run:
    """All that was measured of one engine on one workload."""

    requests: int
    new_tokens: int
    seconds: list[float] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)  # of the last run; peers do not say
    outputs: list[list[int]] = field(default_factory=list)
    failed: str | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.requests * self.new_tokens / median(self.seconds)


Generate = Callable[[list[list[int]], int], list[list[int]]]


class Ours:
    """minikv as one of the engines: a fresh engine with an empty cache for every run, with just the blocks it needs."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.steps: list[Step] = []

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        blocks = sum(-(-(len(prompt) + new_tokens) // BLOCK_SIZE) for prompt in prompts)
        recorder = Recorder(TorchRunner(self.model, blocks, BLOCK_SIZE))
        engine = Engine(runner=recorder, max_batch_tokens=MAX_BATCH_TOKENS)
        outputs = engine.generate(prompts, Sampling(max_new_tokens=new_tokens, ignore_eos=True))
        self.steps = recorder.steps
        return [output.tokens for output in outputs]


def open_peers(names: Iterable[str], folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The peers called ``names`` over the weights in ``folder``, and for those that cannot run, why."""
    opened: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name in names:
        module, _, cls = PEERS[name].partition(":")
        try:
            opened[name] = getattr(import_module(module), cls)(folder)
        except ImportError as wrong:
            missing[name] = f"not installed: {wrong}"
        except Exception as wrong:  # whatever a peer does, our own figures are still wanted
            missing[name] = f"failed to start: {type(wrong).__name__}: {wrong}"
    return opened, missing


def measure(
    model: Model,
    workloads: Iterable[BenchWorkload],
    ceilings: Ceilings,
    peers: Iterable[str] = (),
    repeats: int = 3,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Run every workload on minikv and on the peers; rows as they stand in the JSON file, and peers that did not run.

    After one warm-up run each, engines take turns ``repeats`` times.
    """
    from minikv.model.weights import save

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="minikv-bench-") as folder:
        if peers:
            save(model, folder)
        opened, missing = open_peers(peers, Path(folder))
        ours = Ours(model)
        for workload in workloads:
            engines: dict[str, Generate] = {"minikv": ours.generate}
            for peer in opened.values():
                engines |= peer.engines(batched=workload.requests > 1)
            runs = _take_turns(workload, model.shape.vocab, engines, ours, repeats, progress)
            missing |= {f"{name} on {workload.name}": run.failed for name, run in runs.items() if run.failed}
            rows += _rows(workload, runs, model.shape, ceilings)
    return rows, missing


def _take_turns(
    workload: BenchWorkload, vocab: int, engines: dict[str, Generate], ours: Ours, repeats: int, progress: Callable[[str], None]
) -> dict[str, Run]:
    runs: dict[str, Run] = {}
    for turn in range(-1, repeats):  # turn -1 warms up
        for name, generate in engines.items():
            prompts = workload.prompts(vocab)
            if name.endswith("one by one"):
                prompts = prompts[:ONE_BY_ONE_REQUESTS]
            run = runs.setdefault(name, Run(len(prompts), workload.new_tokens))
            if run.failed:
                continue
            progress(f"{workload.name}: {name}")
            new_tokens = workload.new_tokens if turn >= 0 else min(4, workload.new_tokens)
            start = perf_counter()
            try:
                outputs = generate(prompts, new_tokens)
            except Exception as wrong:
                if name == "minikv":
                    raise
                run.failed = f"{type(wrong).__name__}: {wrong}"
                continue
            if turn >= 0:
                run.seconds.append(perf_counter() - start)
                run.outputs = outputs
                run.steps = ours.steps if name == "minikv" else []
    return runs


def _rows(workload: BenchWorkload, runs: dict[str, Run], shape: ModelShape, ceilings: Ceilings) -> list[dict[str, Any]]:
    ours = runs["minikv"]
    seconds, steps = median(ours.seconds), ours.steps
    decode = [step.seconds for step in steps if step.is_decode]
    prefill = [step for step in steps if not step.is_decode]
    row: dict[str, Any] = {
        "workload": workload.name,
        "engine": "minikv",
        "tokens_per_s": ours.tokens_per_s,
        "step_s": seconds / len(steps),
        "of_limit": limit_seconds(shape, steps, ceilings) / seconds,
        "limit_tokens_per_s": ours.requests * ours.new_tokens / limit_seconds(shape, steps, ceilings),
        "steps": len(steps),
        "decode_step_s": percentile(decode, 50) if decode else None,
        "prefill_tokens_per_s": sum(new for step in prefill for new, _ in step.pieces) / sum(step.seconds for step in prefill),
        "times_s": ours.seconds,
    }
    rows = [row]
    for name, run in runs.items():
        if name == "minikv" or run.failed:
            continue
        same = [a == b for mine, theirs in zip(ours.outputs, run.outputs, strict=False) for a, b in zip(mine, theirs, strict=True)]
        rows.append(
            {
                "workload": workload.name, "engine": name, "tokens_per_s": run.tokens_per_s, "step_s": None, "of_limit": None,
                "minikv_is_times_faster": ours.tokens_per_s / run.tokens_per_s, "requests": run.requests,
                "same_tokens": sum(same) / len(same), "times_s": run.seconds,
            }
        )  # fmt: skip
    return rows
