"""How fast is it? The engine against other engines, and both against what the machine can do at best.

Four workloads, the same for every engine: one short and one long prompt alone, many short ones, several long ones.
All run the same random weights over the same random tokens, greedily and without early stops, so that the work is the
same to the token. Speed is generated tokens a second over the whole run, prefill included: the number that a user of
a batch feels. Every engine computes with as many threads, in float32. The others run in processes of their own, which
are stopped while it is not their turn (``lab/peers/process.py``).

Absolute numbers age with the machine, and on a shared one they change by the minute. So engines take turns, run by
run, each figure is a median, and beside it stands the *share of the limit*: the least time that the run's own steps
can take on this machine (``shape/roofline.py`` over ``lab/ceilings.py``), divided by the time that they took.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from minikv.engine.engine import Engine
from minikv.engine.metrics import percentile
from minikv.engine.runner import Runner, StepResult, TorchRunner
from minikv.engine.scheduler import Plan
from minikv.lab.ceilings import Ceilings
from minikv.lab.peers.environments import KINDS, PeerError, python_for
from minikv.lab.peers.process import PeerProcess, close_all
from minikv.model.sampling import Sampling
from minikv.shape.model_shape import ModelShape
from minikv.shape.roofline import step_cost

if TYPE_CHECKING:
    from minikv.model.weights import Model

BLOCK_SIZE = 16
MAX_BATCH_TOKENS = 512
MAX_BATCH_REQUESTS = 64
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


Generate = Callable[[list[list[int]], int], tuple[list[list[int]], float]]  # prompts, new tokens -> their tokens, seconds


class Ours:
    """minikv as one of the engines: a fresh engine with an empty cache for every run, with just the blocks it needs."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.steps: list[Step] = []

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], float]:
        start = perf_counter()
        blocks = sum(-(-(len(prompt) + new_tokens) // BLOCK_SIZE) for prompt in prompts)
        recorder = Recorder(TorchRunner(self.model, blocks, BLOCK_SIZE))
        engine = Engine(runner=recorder, max_batch_tokens=MAX_BATCH_TOKENS, max_batch_requests=MAX_BATCH_REQUESTS)
        outputs = engine.generate(prompts, Sampling(max_new_tokens=new_tokens, ignore_eos=True))
        self.steps = recorder.steps
        return [output.tokens for output in outputs], perf_counter() - start


@contextmanager
def open_peers(
    names: Iterable[str],
    folder: Path,
    model: Model,
    pythons: Mapping[str, str],
    say: Callable[[str], None],
    **settings: Any,
) -> Iterator[tuple[dict[str, PeerProcess], dict[str, str]]]:
    """The peers called ``names`` over ``folder``, which has the weights of ``model``; and for those that cannot run, why.

    ``pythons`` and ``say`` are for ``python_for``. ``settings`` go to every peer besides the usual ones. The processes
    end with the context.
    """
    import torch

    usual = {"max_context": model.shape.max_context, "max_batch_tokens": MAX_BATCH_TOKENS, "max_batch_requests": MAX_BATCH_REQUESTS}
    opened: dict[str, PeerProcess] = {}
    missing: dict[str, str] = {}
    try:
        for name in names:
            kind = KINDS[name]
            try:
                python = python_for(kind, pythons, say)
                script = Path(__file__).parent / "peers" / kind.script
                opened[name] = PeerProcess(python, script, torch.get_num_threads(), {"folder": str(folder), **usual, **settings})
            except (PeerError, OSError) as wrong:  # whatever a peer does, our own figures are still wanted
                missing[name] = f"did not start: {wrong}"
        yield opened, missing
    finally:
        close_all(opened.values())


def measure(
    model: Model,
    workloads: Iterable[BenchWorkload],
    ceilings: Ceilings,
    peers: Mapping[str, PeerProcess] | None = None,
    repeats: int = 3,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Run every workload on minikv and on ``peers``; rows as they stand in the JSON file, and what did not run, with the reason.

    After one short run each to warm up, engines take turns ``repeats`` times.
    """
    rows: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    ours = Ours(model)
    for workload in workloads:
        engines: dict[str, Generate] = {"minikv": ours.generate}
        for peer in (peers or {}).values():
            ways = peer.about["together" if workload.requests > 1 else "alone"]
            engines |= {way: partial(_generate, peer, way) for way in ways}
        runs = _take_turns(workload, model.shape.vocab, engines, ours, repeats, progress)
        missing |= {f"{name} on {workload.name}": run.failed for name, run in runs.items() if run.failed}
        rows += _rows(workload, runs, model.shape, ceilings)
    return rows, missing


def _generate(peer: PeerProcess, way: str, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], float]:
    answer = peer.ask("generate", way=way, prompts=prompts, new_tokens=new_tokens)
    return answer["tokens"], answer["seconds"]


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
            try:
                outputs, seconds = generate(prompts, new_tokens)
            except PeerError as wrong:
                run.failed = str(wrong)
                continue
            if turn >= 0:
                run.seconds.append(seconds)
                run.outputs = outputs
                run.steps = ours.steps if name == "minikv" else []
    return runs


def _rows(workload: BenchWorkload, runs: dict[str, Run], shape: ModelShape, ceilings: Ceilings) -> list[dict[str, Any]]:
    """Our row and one for each peer. A peer's share of the limit is taken of our steps' least time, for the same work."""
    ours = runs["minikv"]
    seconds, steps = median(ours.seconds), ours.steps
    limit_tokens_per_s = ours.requests * ours.new_tokens / limit_seconds(shape, steps, ceilings)
    decode = [step.seconds for step in steps if step.is_decode]
    prefill = [step for step in steps if not step.is_decode]
    row: dict[str, Any] = {
        "workload": workload.name,
        "engine": "minikv",
        "tokens_per_s": ours.tokens_per_s,
        "step_s": seconds / len(steps),
        "of_limit": ours.tokens_per_s / limit_tokens_per_s,
        "limit_tokens_per_s": limit_tokens_per_s,
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
                "workload": workload.name, "engine": name, "tokens_per_s": run.tokens_per_s, "step_s": None,
                "of_limit": run.tokens_per_s / limit_tokens_per_s,
                "minikv_is_times_faster": ours.tokens_per_s / run.tokens_per_s, "requests": run.requests,
                "same_tokens": sum(same) / len(same), "times_s": run.seconds,
            }
        )  # fmt: skip
    return rows


def marks(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each workload that a peer ran: its best peer and its best Hugging Face, and our speed as a multiple of theirs."""
    by_workload: dict[str, dict[str, float]] = {}
    for row in rows:
        by_workload.setdefault(row["workload"], {})[row["engine"]] = row["tokens_per_s"]
    found = []
    for workload, speeds in by_workload.items():
        ours = speeds.pop("minikv")
        if not speeds:
            continue
        best = max(speeds, key=speeds.__getitem__)
        hf = max((engine for engine in speeds if engine.startswith("hf ")), key=speeds.__getitem__, default=None)
        found.append(
            {
                "workload": workload, "best_peer": best, "of_best_peer": ours / speeds[best],
                "best_hf": hf, "of_best_hf": ours / speeds[hf] if hf else None,
            }
        )  # fmt: skip
    return found
