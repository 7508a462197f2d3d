"""The peer's end of the line: one JSON object a line comes in, one goes out.

Whoever runs this has only the peer installed, not minikv; so nothing of minikv is imported here or in the scripts beside
it (serve_hf.py, serve_vllm.py, serve_llama_cpp.py), which are started by their path. They are not called after the
packages that they import, because a script's own folder is searched first.

    {"do": "open", "folder": ..., "threads": 2, ...}          ->  {"version": ..., "alone": [way, ...], "together": [way, ...]}
    {"do": "generate", "way": ..., "prompts": [[id, ...], ...], "new_tokens": n}   ->  {"tokens": [[id, ...], ...], "seconds": s}
    {"do": "sessions", ...}                                    ->  {"turns": [{...}, ...]}
    anything that goes wrong                                   ->  {"error": "Type: what it said"}

A *way* is one of several in which an engine can be used, and a row of the table. What a library prints goes to standard
error, whatever it does with standard output.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

Prompts = list[list[int]]


class Served(Protocol):
    """What a script gives to ``serve``: an engine over the weights in a folder."""

    version: str
    alone: Sequence[str]  # the ways to run one request
    together: Sequence[str]  # the ways to run many

    def prepare(self, prompts: Prompts, new_tokens: int) -> None:
        """What may be done before the clock starts: memory for so many tokens, an empty cache."""
        ...

    def generate(self, way: str, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        """Greedy, and ``new_tokens`` for every prompt: no early stop."""
        ...

    def sessions(self, **loop: Any) -> list[dict[str, Any]]:
        """The loop of agents, if the peer has a step to drive; see ``conversations.py``."""
        ...


def serve(open_engine: Callable[..., Served]) -> None:
    """Answer until standard input ends. ``open_engine(folder, threads, **settings)`` loads the peer."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a library that prints, in Python or in C, must not break the line
    engine: Served | None = None
    for line in sys.stdin:
        message = json.loads(line)
        do = message.pop("do")
        try:
            if do == "open":
                engine = open_engine(**message)
                answer: dict[str, Any] = {"version": engine.version, "alone": engine.alone, "together": engine.together}
            else:
                assert engine is not None, "open comes first"
                answer = _generate(engine, **message) if do == "generate" else {"turns": engine.sessions(**message)}
        except Exception as wrong:  # whatever it is, the other end wants to know
            answer = {"error": f"{type(wrong).__name__}: {wrong}"}
        print(json.dumps(answer), file=answers, flush=True)


def _generate(engine: Served, way: str, prompts: Prompts, new_tokens: int) -> dict[str, Any]:
    engine.prepare(prompts, new_tokens)
    start = perf_counter()
    tokens = engine.generate(way, prompts, new_tokens)
    seconds = perf_counter() - start
    short = sum(len(each) != new_tokens for each in tokens)
    if len(tokens) != len(prompts) or short:
        raise RuntimeError(f"{len(tokens)} of {len(prompts)} requests finished, {short} of them without {new_tokens} tokens")
    return {"tokens": tokens, "seconds": seconds}
