"""Conversations of agents: the load under which a KV cache shows what it is worth.

All sessions begin with the same system prompt. Every turn appends some tokens (a tool's result, a question) and the
model answers; the next turn's prompt is the whole conversation so far. So all of a prompt but its last few tokens has
been computed before, and whether it has to be computed again is decided by whether it is still in the cache.

The loop is closed: a session sends its next turn when it has its answer, after an optional think time. That is how
people and agents behave, and it means that a slow server is also asked less often.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from minikv.cache.blocks import blocks_for
from minikv.engine.engine import Engine
from minikv.errors import RequestError
from minikv.model.sampling import Sampling


@dataclass(frozen=True)
class Workload:
    """``turns`` turns a session, each of ``turn_tokens`` new tokens in and ``output_tokens`` out, after a shared system prompt.

    By default a session ends with 1,472 tokens, two thirds of them its own, which came in small pieces: a turn that finds
    the conversation cached computes some 40 tokens, one that misses up to a thousand. RequestError when a number makes no sense.
    """

    system_tokens: int = 512
    turns: int = 24
    turn_tokens: int = 32
    output_tokens: int = 8
    think_time_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("system_tokens", 0), ("turns", 1), ("turn_tokens", 1), ("output_tokens", 1)):
            if getattr(self, name) < least:
                raise RequestError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not 0 <= self.think_time_s < float("inf"):
            raise RequestError(f"think_time_s must be at least 0 seconds, not {self.think_time_s}")

    @property
    def own_tokens(self) -> int:
        """Tokens that a session has at its end, besides the shared system prompt."""
        return self.turns * (self.turn_tokens + self.output_tokens)

    def blocks(self, sessions: int, block_size: int) -> int:
        """Blocks that hold ``sessions`` whole sessions: the system prompt once, the rest per session.

        Exact when the system prompt fills its last block; otherwise that block is not shared, and its tokens have a
        place in each session's own blocks only if these have room for them.
        """
        return blocks_for(self.system_tokens, block_size) + sessions * blocks_for(self.own_tokens, block_size)

    def prompt_tokens(self, turn: int) -> int:
        """Length of the prompt of ``turn`` (0 is the first)."""
        return self.system_tokens + turn * (self.turn_tokens + self.output_tokens) + self.turn_tokens

    def cacheable_tokens(self, turn: int, block_size: int) -> int:
        """Prompt tokens of a later turn that a cache which forgets nothing serves: full blocks of the turn before.

        The last token of an answer is never fed back, so the turn before left one token less than it has.
        """
        return (self.prompt_tokens(turn) - self.turn_tokens - 1) // block_size * block_size


@dataclass(frozen=True)
class Turn:
    """What one turn of one session got. Times are seconds on the runner's clock."""

    session: int
    turn: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    arrived_at: float
    ttft_s: float
    finished_at: float


@lru_cache(maxsize=1)  # every session of a run begins with it
def _system_prompt(seed: int, tokens: int, vocab: int) -> tuple[int, ...]:
    return tuple(random.Random(f"system prompt {seed}").choices(range(vocab), k=tokens))


class Session:
    """One conversation: its tokens so far and the next piece of them."""

    def __init__(self, workload: Workload, number: int, vocab: int) -> None:
        self.workload, self.number, self.turn = workload, number, 0
        self._vocab = vocab
        self._random = random.Random(f"session {workload.seed} {number}")
        self.tokens = list(_system_prompt(workload.seed, workload.system_tokens, vocab))

    def next_prompt(self) -> list[int]:
        """The conversation so far with this turn's new tokens behind it."""
        self.tokens += self._random.choices(range(self._vocab), k=self.workload.turn_tokens)
        return self.tokens


def run_sessions(engine: Engine, workload: Workload, sessions: int, on_turn: Callable[[Turn], None] = lambda turn: None) -> list[Turn]:
    """Run ``sessions`` sessions side by side to their ends; all begin at once. Returns their turns as they finished.

    ``on_turn`` is called after each. RequestError when a session cannot fit the engine.
    """
    runner = engine.runner
    everyone = [Session(workload, number, runner.vocab) for number in range(sessions)]
    start = runner.now()
    arrivals = [(start, number) for number in range(sessions)]  # a heap: when, who
    arrived: dict[int, float] = {}
    sampling = Sampling(max_new_tokens=workload.output_tokens, ignore_eos=True)
    turns: list[Turn] = []
    while arrivals or engine.has_work:
        while arrivals and arrivals[0][0] <= runner.now():
            at, number = heapq.heappop(arrivals)
            arrived[number] = at
            engine.add(("session", number), everyone[number].next_prompt(), sampling, now=at)
        if not engine.has_work:
            runner.wait_until(arrivals[0][0])
            continue
        outputs = engine.step()
        finished = runner.now()  # one time for all who end with this step: their order must not hang on rounding
        for output in outputs:
            if not output.finished:
                continue
            session = everyone[output.request_id[1]]  # type: ignore[index]
            at = arrived[session.number]
            ttft = output.token_times_s[0]
            turn = Turn(
                session.number, session.turn, len(session.tokens), output.cached_tokens, output.computed_tokens,
                len(output.tokens), at, ttft, finished,
            )  # fmt: skip
            session.tokens += output.tokens
            session.turn += 1
            turns.append(turn)
            on_turn(turn)
            if session.turn < workload.turns:
                heapq.heappush(arrivals, (finished + workload.think_time_s, session.number))
    return turns
