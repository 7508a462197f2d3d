"""The loop of agents as a peer runs it: the same as ``minikv.lab.workload.run_sessions``, without minikv.

All sessions begin at once with the same system prompt; each sends its next turn when it has its answer and has thought.
The prompts come from the other end, so that both engines get the same; the answers are the peer's own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any, Protocol

Turns = list[list[int]]  # what comes in, turn by turn


class Steps(Protocol):
    """What the loop needs of an engine."""

    def add(self, number: int, prompt: list[int], new_tokens: int) -> None: ...

    def step(self) -> list[tuple[int, list[int], bool, int]]:
        """One step; for each request that got something: number, all its tokens so far, whether it ended, cached tokens."""
        ...


def run(
    engine: Steps, system: list[int], sessions: list[Turns], output_tokens: int, think_time_s: float,
    clock: Callable[[], float] = perf_counter,
) -> list[dict[str, Any]]:  # fmt: skip
    """Run ``sessions`` to their ends; their turns as they finished, in the words of ``minikv.lab.workload.Turn``."""
    texts = [list(system) for _ in sessions]
    turn_of = [0] * len(sessions)
    start = clock()
    arrivals = [(start, number) for number in range(len(sessions))]  # a heap: when, who
    running: dict[int, dict[str, Any]] = {}
    done: list[dict[str, Any]] = []
    while arrivals or running:
        while arrivals and arrivals[0][0] <= clock():
            at, number = heapq.heappop(arrivals)
            texts[number] += sessions[number][turn_of[number]]
            running[number] = {"session": number, "turn": turn_of[number], "prompt_tokens": len(texts[number]), "arrived_at": at}
            engine.add(number, texts[number], output_tokens)
        if not running:
            sleep(max(0.0, arrivals[0][0] - clock()))
            continue
        news = engine.step()
        now = clock()
        for number, tokens, ended, cached in news:
            turn = running[number]
            if tokens:
                turn.setdefault("ttft_s", now - turn["arrived_at"])
            if ended:
                del running[number]
                done.append({**turn, "cached_tokens": cached, "output_tokens": len(tokens), "finished_at": now})
                texts[number] += tokens
                turn_of[number] += 1
                if turn_of[number] < len(sessions[number]):
                    heapq.heappush(arrivals, (now + think_time_s, number))
    return done
