"""Chapter 7: who computes in which step. A row a request, a column a step, drawn from what the real engine planned.

Some readers have their answers written when one long prompt arrives. ``Engine`` and ``Scheduler`` are the real ones; the runner
computes no token (it is the simulator's), so that a run of some sixty steps takes no noticeable time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from minikv.engine.engine import Engine
from minikv.engine.request import Output
from minikv.engine.runner import StepResult
from minikv.engine.scheduler import Plan
from minikv.errors import RequestError
from minikv.lab.simulate import RooflineRunner
from minikv.model.sampling import Sampling
from minikv.shape.hardware import HARDWARE
from minikv.shape.model_shape import PRESETS
from minikv.show.plots import DARK, LIGHT, MIDDLE
from minikv.show.widgets import Choice, Picture, Slider

BLOCK_SIZE = 4
NO_LIMIT = 1024  # tokens a step, more than all prompts together: no prompt is ever cut
LONG = "long"
LONG_NEW = 4
# (step before which it arrives, name, prompt tokens, new tokens); the long request comes at LONG_ARRIVES
READERS = ((0, "a", 6, 14), (0, "b", 5, 16), (1, "c", 7, 13), (2, "d", 4, 15))
LONG_ARRIVES = 4
BUDGETS = (5, 6, 8, 12, 16, 24, 32)
POOLS = (8, 12, 16, 20, 24, 32, 48)
PROMPTS = (8, 16, 32, 48, 64)

CONTROLS = {
    "budget": Slider("Step budget (tokens)", BUDGETS, 12),
    "chunking": Choice("Chunked prefill", ["on", "off"], "on"),
    "pool": Slider("Pool (blocks of 4)", POOLS, 48),
    "prompt": Slider("Long prompt (tokens)", PROMPTS, 48),
}


class Recorder(RooflineRunner):
    """A runner that computes nothing and writes down each step: {request: (tokens, whether it decodes)}."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(PRESETS["llama-3.1-8b"], HARDWARE["h100"], num_blocks, BLOCK_SIZE)
        self.steps: list[dict[str, tuple[int, bool]]] = []

    def execute(self, plan: Plan, now: float) -> StepResult:
        pieces = zip(plan.sequences, plan.pieces, strict=True)
        self.steps.append({str(text.request.request_id): (len(piece.tokens), text.is_decoding) for text, piece in pieces})
        return super().execute(plan, now)


@dataclass
class Run:
    """What happened: the plan of each step, who lost its blocks before it, when each request came, got tokens and left."""

    steps: list[dict[str, tuple[int, bool]]] = field(default_factory=list)
    preempted: list[set[str]] = field(default_factory=list)
    arrived: dict[str, int] = field(default_factory=dict)
    token_steps: dict[str, list[int]] = field(default_factory=dict)
    refused: str | None = None
    preemptions: int = 0

    @property
    def step_tokens(self) -> list[int]:
        return [sum(tokens for tokens, _ in step.values()) for step in self.steps]

    def longest_gap(self) -> tuple[int, str, int, int]:
        """(computed tokens, reader, step of the token before, step of the token after) of the readers' longest gap."""
        sizes = self.step_tokens
        return max(
            (sum(sizes[before + 1 : after + 1]), name, before, after)
            for _, name, _, _ in READERS
            for before, after in pairwise(self.token_steps[name])
        )


def run(budget: int, chunking: bool, pool: int, prompt: int) -> Run:
    """The requests on an engine with ``pool`` blocks, from the first arrival until nothing is left to do."""
    runner = Recorder(pool)
    engine = Engine(runner=runner, max_batch_tokens=budget if chunking else NO_LIMIT, prefix_caching=False)
    requests = sorted((*READERS, (LONG_ARRIVES, LONG, prompt, LONG_NEW)))
    done = Run(steps=runner.steps)
    outputs: dict[str, Output] = {}
    before: dict[str, int] = {}
    while requests or engine.has_work:
        while requests and requests[0][0] <= len(runner.steps):
            at, name, tokens, new = requests.pop(0)
            try:
                engine.add(name, [1] * tokens, Sampling(max_new_tokens=new, ignore_eos=True))
            except RequestError as wrong:
                done.refused = str(wrong)
            else:
                done.arrived[name] = at
        for output in engine.step():
            outputs[str(output.request_id)] = output
            done.token_steps.setdefault(str(output.request_id), []).append(len(runner.steps) - 1)
        counts = {str(text.request.request_id): text.output.preemptions for text in engine.scheduler.sequences()}
        done.preempted.append({name for name, count in counts.items() if count > before.get(name, 0)})
        before |= counts
    done.preemptions = engine.stats().preemptions
    return done


def draw(budget: int, chunking: str, pool: int, prompt: int) -> Picture:
    """The timeline for these values. ValueError for values that no engine could run with."""
    if chunking not in ("on", "off"):
        raise ValueError(f"chunked prefill is on or off, not {chunking!r}")
    if budget < 1 or prompt < 1:
        raise ValueError(f"a step and a prompt need at least a token; got a budget of {budget} and a prompt of {prompt}")
    smallest = max(-(-(tokens + new - 1) // BLOCK_SIZE) for _, _, tokens, new in READERS)
    if pool < smallest:
        raise ValueError(f"a pool of {_count(pool, 'block')} cannot hold a reader's {smallest}: make it larger")
    done = run(budget, chunking == "on", pool, prompt)
    return Picture(_figure(done), _summary(done, budget, chunking, pool, prompt))


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _summary(done: Run, budget: int, chunking: str, pool: int, prompt: int) -> str:
    sizes = done.step_tokens
    limit = f"at most {budget} tokens a step" if chunking == "on" else "no limit to a step (chunking off)"
    gap, name, before, after = done.longest_gap()
    if done.refused is not None:
        taken_in = f"The long request was refused when it came: {done.refused}. "
    else:
        first = done.token_steps[LONG][0]
        chunks = [step[LONG][0] for step in done.steps[: first + 1] if LONG in step]
        again = f" ({sum(chunks) - prompt} tokens of them twice, after a preemption)" if sum(chunks) > prompt else ""
        waited = sum(sizes[LONG_ARRIVES : first + 1])
        taken_in = (
            f"The long prompt of {prompt} tokens was computed in {_count(len(chunks), 'piece')}{again}; "
            f"its first token came in step {first}, {waited} computed tokens after it arrived. "
        )
    return (
        f"{_count(len(sizes), 'step')}, {limit}, {_count(pool, 'block')}; the largest step has {_count(max(sizes), 'token')}; "
        f"{_count(done.preemptions, 'preemption')}. {taken_in}"
        f"Longest gap between two tokens of a reader: {_count(gap, 'computed token')} ({name}, from step {before} to {after})."
    )


def _figure(done: Run) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    names = [name for _, name, _, _ in READERS] + [LONG]
    columns = max(len(done.steps), 24)
    figure = Figure(figsize=(9.4, 3.3), layout="constrained")
    axis = figure.subplots()
    axis.grid(False)
    size = 7 if columns <= 40 else 5.5
    for row, name in enumerate(names):
        if name not in done.arrived:
            axis.text(LONG_ARRIVES, row, "refused when it came", va="center", fontsize=8)
            continue
        for step in range(done.arrived[name], done.token_steps[name][-1] + 1):
            tokens, decodes = done.steps[step].get(name, (0, False))
            lost = name in done.preempted[step]
            face = DARK if lost else "white" if tokens and not decodes else LIGHT if tokens else "#f4f4f4"
            hatch = "////" if tokens and not decodes else ""
            axis.add_patch(Rectangle((step, row - 0.4), 1, 0.8, facecolor=face, hatch=hatch, edgecolor=MIDDLE, linewidth=0.4))
            label = "x" if lost else "d" if decodes else str(tokens) if tokens else ""
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.8} if hatch else None
            axis.text(
                step + 0.5, row, label, ha="center", va="center", fontsize=size, color="white" if lost else DARK, bbox=behind
            )  # fmt: skip
    for step, tokens in enumerate(done.step_tokens):
        axis.text(step + 0.5, len(names), str(tokens), ha="center", va="center", fontsize=size)
    axis.axvline(LONG_ARRIVES, color=DARK, linestyle=(0, (6, 4)), linewidth=0.9)
    axis.annotate("the long prompt arrives", (LONG_ARRIVES, -0.75), xytext=(4, 0), textcoords="offset points", fontsize=8, va="center")
    axis.set_xlim(0, columns)
    axis.set_ylim(len(names) + 0.5, -1)
    axis.set_yticks([*range(len(names)), len(names)], [*names, "tokens"])
    axis.set_xticks([step + 0.5 for step in range(0, columns, 4)], [str(step) for step in range(0, columns, 4)])
    axis.set_xlabel("step")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(length=0, labelsize=8)
    looks = {"prefill, with its tokens": ("white", "////"), "d  decode": (LIGHT, ""), "waits": ("#f4f4f4", ""), "x  preempted": (DARK, "")}
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=face, hatch=hatch, edgecolor=MIDDLE, label=label) for label, (face, hatch) in looks.items()
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=4, frameon=False, fontsize=8)
    return figure
