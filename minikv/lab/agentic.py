"""The loop of agents beside another engine: the same sessions over the same number of blocks.

The pool holds thirteen and a half whole sessions. Eight fit well, twelve just, sixteen do not: what an engine does with
a conversation that it had to forget, and with those that wait meanwhile, shows in the time to first token. Both engines
get the same prompts turn by turn (``lab/workload.py``), have blocks of the same size and as many of them, compute as
many tokens a step, and begin each run with an empty cache. The first turns, all cold and all at once, stand apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from minikv.cache.blocks import blocks_for
from minikv.engine.metrics import percentile
from minikv.lab.peers.environments import PeerError
from minikv.lab.peers.process import PeerProcess
from minikv.lab.workload import Session, Workload, run_sessions

if TYPE_CHECKING:
    from minikv.model.weights import Model

WORKLOAD = Workload(system_tokens=512, turns=12, turn_tokens=64, output_tokens=16)
SESSIONS = (8, 12, 16)
FITS = 13.5
BLOCK_SIZE = 32
MAX_BATCH_TOKENS = 512
MAX_BATCH_REQUESTS = 64


def pool_blocks(workload: Workload, fits: float = FITS, block_size: int = BLOCK_SIZE) -> int:
    """Blocks for the system prompt and the own tokens of ``fits`` sessions."""
    return blocks_for(workload.system_tokens, block_size) + int(fits * blocks_for(workload.own_tokens, block_size))


def pool_settings(workload: Workload) -> dict[str, int]:
    """What a peer is opened with, besides the usual, to have the same pool."""
    return {"blocks": pool_blocks(workload), "block_size": BLOCK_SIZE}


@dataclass(frozen=True)
class Answered:
    """What a turn of a session got: which turn, and in seconds and tokens."""

    turn: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    arrived_at: float
    ttft_s: float
    finished_at: float


Loop = Callable[[int], list[Answered]]  # sessions -> their turns


def ours(model: Model, workload: Workload) -> Loop:
    """minikv's side: a fresh engine for every run."""
    from minikv.engine.engine import Engine

    def run(sessions: int) -> list[Answered]:
        engine = Engine(
            model, num_blocks=pool_blocks(workload), block_size=BLOCK_SIZE, max_batch_tokens=MAX_BATCH_TOKENS,
            max_batch_requests=MAX_BATCH_REQUESTS,
        )  # fmt: skip
        return [_answered(asdict(turn)) for turn in run_sessions(engine, workload, sessions)]

    return run


def theirs(peer: PeerProcess, workload: Workload, vocab: int) -> Loop:
    """A peer's side: the same prompts, sent beforehand."""

    def run(sessions: int) -> list[Answered]:
        everyone = [Session(workload, number, vocab) for number in range(sessions)]
        system = list(everyone[0].tokens)
        answer = peer.ask(
            "sessions", system=system, sessions=[_pieces(session) for session in everyone],
            output_tokens=workload.output_tokens, think_time_s=workload.think_time_s,
        )  # fmt: skip
        return [_answered(turn) for turn in answer["turns"]]

    return run


def _pieces(session: Session) -> list[list[int]]:
    """What comes in, turn by turn; it does not depend on the answers."""
    pieces = []
    for _ in range(session.workload.turns):
        before = len(session.tokens)
        pieces.append(session.next_prompt()[before:])
    return pieces


def _answered(turn: Mapping[str, Any]) -> Answered:
    return Answered(**{name: turn[name] for name in Answered.__dataclass_fields__})


def quick(workload: Workload) -> Workload:
    """A third of the turns; the pool is for whole sessions of this length, so what fits and what does not stays the same."""
    return replace(workload, turns=max(2, workload.turns // 3))


def measure_beside(
    model: Model, workload: Workload, peers: Mapping[str, PeerProcess], progress: Callable[[str], None] = lambda text: None
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """``measure`` for minikv and ``peers``, which have been opened with ``pool_settings(workload)``."""
    loops = {"minikv": ours(model, workload)}
    loops |= {name: theirs(peer, workload, model.shape.vocab) for name, peer in peers.items()}
    return measure(loops, SESSIONS, progress=progress)


def measure(
    loops: Mapping[str, Loop],
    sessions: Iterable[int] = SESSIONS,
    repeats: int = 1,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Each of ``loops`` by its engine's name, taking turns; a row for every number of sessions and engine, and what failed.

    Percentiles are over the turns of all ``repeats`` runs. Before the first, every engine serves two sessions to warm up.
    """
    rows: list[dict[str, Any]] = []
    missing: dict[str, str] = {}

    def attempt(engine: str, count: int) -> list[Answered]:
        progress(f"{count} sessions of agents: {engine}")
        try:
            return [] if engine in missing else loops[engine](count)
        except PeerError as wrong:
            missing[engine] = str(wrong)
            return []

    for engine in loops:
        attempt(engine, 2)
    for count in sessions:
        runs: dict[str, list[list[Answered]]] = {engine: [] for engine in loops}
        for _ in range(repeats):
            for engine in loops:
                runs[engine].append(attempt(engine, count))
        rows += [summarize(engine, count, found) for engine, found in runs.items() if engine not in missing]
    return rows, {f"{engine}, agents": reason for engine, reason in missing.items()}


def summarize(engine: str, sessions: int, runs: Sequence[Sequence[Answered]]) -> dict[str, Any]:
    """One row: times to first token of warm and of cold turns, the warm turns' hit rate, generated tokens a second."""
    warm = [turn for run in runs for turn in run if turn.turn > 0]
    cold = [turn for run in runs for turn in run if turn.turn == 0]
    seconds = sum(max(turn.finished_at for turn in run) - min(turn.arrived_at for turn in run) for run in runs)
    return {
        "sessions": sessions,
        "engine": engine,
        **{f"p{p}_ttft_s": percentile([turn.ttft_s for turn in warm], p) for p in (50, 99)},
        **{f"cold_p{p}_ttft_s": percentile([turn.ttft_s for turn in cold], p) for p in (50, 99)},
        "hit_rate": sum(turn.cached_tokens for turn in warm) / sum(turn.prompt_tokens for turn in warm),
        "tokens_per_s": sum(turn.output_tokens for run in runs for turn in run) / seconds,
        "seconds": seconds,
        "runs": len(runs),
    }
