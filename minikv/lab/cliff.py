"""The cache cliff: sessions against time to first token, measured.

A pool holds so many whole sessions and no more. While all sessions fit, every turn finds its conversation in the cache
and computes only what is new. One session more, and least-recently-used eviction throws out the blocks that have
waited longest: those of the session whose turn comes next. It misses, computes its whole conversation again, evicts
the next one's blocks to do so, and stands in everybody's way meanwhile. So latency does not rise with the number of
sessions as a slope would; it falls off a cliff, at a place that arithmetic gives beforehand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from minikv.engine.engine import Engine
from minikv.engine.metrics import percentile
from minikv.engine.runner import Runner
from minikv.errors import RequestError
from minikv.lab.workload import Turn, Workload, run_sessions

if TYPE_CHECKING:
    from minikv.model.weights import Model

# Momento, "The concurrency cliff is a memory limit", 2026-06-26: Qwen3-4B (fp8 weights) on one NVIDIA L4 with vLLM 0.20.2,
# a shared system prompt of 10,000 tokens and 12 turns of about 1,000 tokens.
PUBLISHED: tuple[dict[str, Any], ...] = (
    {"sessions": 12, "p99_ttft_s": 2.6, "source": "Momento 2026, Qwen3-4B on one L4"},
    {"sessions": 14, "p99_ttft_s": 38.9, "source": "Momento 2026, Qwen3-4B on one L4"},
)
SAFE: dict[str, Any] = {"sessions": 6, "p99_below_s": 2}  # the same source's safe point


@dataclass(frozen=True)
class CliffRow:
    """One number of sessions. Percentiles and hit rates are over warm turns; the first turns, all cold, stand apart.

    ``hit_rate`` is the share of the warm turns' prompt tokens that were cached, ``best_hit_rate`` what a cache that
    forgets nothing would reach. ``luckiest_ttft_s`` and ``unluckiest_ttft_s`` are the smallest and the largest of the
    sessions' mean times to first token.
    """

    sessions: int
    p50_ttft_s: float
    p99_ttft_s: float
    hit_rate: float
    best_hit_rate: float
    tokens_per_s: float
    cold_p99_ttft_s: float
    luckiest_ttft_s: float
    unluckiest_ttft_s: float
    computed_tokens: int
    evictions: int
    preemptions: int
    seconds: float


def session_counts(fits: int, quick: bool = False) -> list[int]:
    """Numbers of sessions worth measuring around a pool for ``fits``: K-5, K-1, K, K+1, K+2 and a few more."""
    around = [fits - 5, fits - 1, fits, fits + 1, fits + 2]
    more = [] if quick else [1, fits - 3, fits + 3]
    return sorted({count for count in around + more if count >= 1})


def summarize(turns: Sequence[Turn], workload: Workload, sessions: int, engine: Engine) -> CliffRow:
    """One row from the finished turns of ``sessions`` sessions on ``engine``."""
    warm = [turn for turn in turns if turn.turn > 0] or list(turns)
    cold = [turn.ttft_s for turn in turns if turn.turn == 0]
    means = [fmean(turn.ttft_s for turn in warm if turn.session == session) for session in range(sessions)]
    prompt_tokens = sum(turn.prompt_tokens for turn in warm)
    best = sum(workload.cacheable_tokens(turn.turn, engine.pool.block_size) for turn in warm if turn.turn)
    seconds = max(turn.finished_at for turn in turns) - min(turn.arrived_at for turn in turns)
    stats = engine.stats()
    return CliffRow(
        sessions=sessions,
        p50_ttft_s=percentile([turn.ttft_s for turn in warm], 50),
        p99_ttft_s=percentile([turn.ttft_s for turn in warm], 99),
        hit_rate=sum(turn.cached_tokens for turn in warm) / prompt_tokens,
        best_hit_rate=best / prompt_tokens,
        tokens_per_s=sum(turn.output_tokens for turn in turns) / seconds,
        cold_p99_ttft_s=percentile(cold, 99),
        luckiest_ttft_s=min(means),
        unluckiest_ttft_s=max(means),
        computed_tokens=stats.computed_tokens,
        evictions=stats.evictions,
        preemptions=stats.preemptions,
        seconds=seconds,
    )


def measure_row(
    make_runner: Callable[[int, int], Runner],
    workload: Workload,
    fits: int,
    sessions: int,
    block_size: int = 16,
    max_batch_tokens: int = 512,
    on_turn: Callable[[Turn], None] = lambda turn: None,
) -> CliffRow:
    """Run ``sessions`` sessions over a pool that holds exactly ``fits`` whole ones, starting from an empty cache.

    ``make_runner(num_blocks, block_size)`` gives whoever computes. RequestError for a pool of less than one session.
    """
    if fits < 1 or sessions < 1:
        raise RequestError(f"the pool must fit at least one session, and one must run; got fits={fits}, sessions={sessions}")
    runner = make_runner(workload.blocks(fits, block_size), block_size)
    engine = Engine(runner=runner, max_batch_tokens=max_batch_tokens, max_batch_requests=max(64, sessions))
    turns = run_sessions(engine, workload, sessions, on_turn)
    engine.check_integrity()
    return summarize(turns, workload, sessions, engine)


def check_context(workload: Workload, max_context: int) -> None:
    """RequestError when a session outgrows a model's context of ``max_context`` tokens."""
    longest = workload.system_tokens + workload.own_tokens - 1
    if longest > max_context:
        raise RequestError(
            f"a session grows to {longest} tokens, more than the model's context of {max_context}; take fewer turns or smaller ones"
        )


def warm_up(model: Model, max_batch_tokens: int = 512) -> None:
    """Compile and touch what the first measured step would otherwise pay for."""
    from minikv.model.sampling import Sampling

    prompt = [i % model.shape.vocab for i in range(min(max_batch_tokens + 40, model.shape.max_context - 4))]
    engine = Engine(model, num_blocks=4 + 2 * len(prompt) // 16, block_size=16, max_batch_tokens=max_batch_tokens)
    for _ in range(2):
        engine.generate([prompt, prompt[:9]], Sampling(max_new_tokens=3, ignore_eos=True))


def measure(
    model: Model,
    workload: Workload,
    fits: int,
    counts: Sequence[int],
    block_size: int = 16,
    max_batch_tokens: int = 512,
    attention: str = "auto",
    on_turn: Callable[[int, Turn], None] = lambda sessions, turn: None,
) -> list[CliffRow]:
    """The cliff on this machine: one row for each number of sessions in ``counts``."""
    from minikv.engine.runner import TorchRunner

    check_context(workload, model.shape.max_context)
    warm_up(model, max_batch_tokens)
    rows = []
    for sessions in counts:

        def told(turn: Turn, sessions: int = sessions) -> None:
            on_turn(sessions, turn)

        rows.append(
            measure_row(
                lambda num_blocks, size: TorchRunner(model, num_blocks, size, attention),
                workload, fits, sessions, block_size, max_batch_tokens, told,
            )
        )  # fmt: skip
    return rows


def as_json(rows: Sequence[CliffRow], fits: int, seconds: float, workload: Workload, **more: Any) -> dict[str, Any]:
    """What ``--json`` writes; ``more`` says on what it ran."""
    return {
        "fits_sessions": fits,
        "seconds": seconds,
        "workload": asdict(workload),
        "rows": [asdict(row) for row in rows],
        "published": list(PUBLISHED),
        **more,
    }


@dataclass(frozen=True)
class Measured:
    """A measured cliff as ``minikv cliff --json`` wrote it."""

    fits: int
    workload: Workload
    rows: list[CliffRow]
    model: str | None
    block_size: int
    max_batch_tokens: int


def read_measured(path: str | Path) -> Measured:
    """Read back what ``minikv cliff --json`` wrote. RequestError when ``path`` is no such file."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return Measured(
            content["fits_sessions"], Workload(**content["workload"]), [CliffRow(**row) for row in content["rows"]],
            content["model"], content["block_size"], content["max_batch_tokens"],
        )  # fmt: skip
    except (OSError, ValueError, TypeError, KeyError) as wrong:
        raise RequestError(f"{path} is not what `minikv cliff --json` writes: {wrong}") from None
