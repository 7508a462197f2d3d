"""replay a trace through the prefix cache

Reads Mooncake's trace format (JSON lines with hash_ids, one for each block of 512 prompt tokens) and reports which share
of the blocks would have been found in a cache of a given size, and how that share grows with the size."""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter

from minikv.errors import RequestError
from minikv.show import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE.jsonl")
    parser.add_argument("--capacity-tokens", type=int, metavar="N", help="tokens that the cache holds (default: unlimited)")
    parser.add_argument("--policy", default="lru", choices=["lru", "fifo", "optimal"], help="what is evicted (default lru)")
    parser.add_argument("--json", metavar="F", help="write the numbers to F")
    parser.add_argument("--plot", metavar="F", help="draw hit rate against capacity for all policies to F")


def run(arguments: argparse.Namespace) -> int:
    from minikv.lab.replay import BLOCK_TOKENS, POLICIES, capacity_curve, read_trace, replay

    console.check_writable(arguments.json)
    console.check_writable(arguments.plot, endings=(".png", ".svg", ".pdf"))
    if arguments.capacity_tokens is not None and arguments.capacity_tokens < BLOCK_TOKENS:
        raise RequestError(f"--capacity-tokens must be at least one block of {BLOCK_TOKENS}, not {arguments.capacity_tokens}")
    trace = Path(arguments.trace)
    points = 12
    with console.progress() as progress:
        reading = progress.add_task("reading", total=trace.stat().st_size if trace.is_file() else None)
        requests = read_trace(trace, lambda size: progress.advance(reading, size))
        replaying = progress.add_task("replaying", total=len(requests))
        started = perf_counter()
        found = replay(
            requests, arguments.capacity_tokens, arguments.policy, console.in_steps(lambda step: progress.advance(replaying, step))
        )
        seconds = perf_counter() - started
        curve = None
        if arguments.plot:
            drawing = progress.add_task("curve", total=len(requests) * points * len(POLICIES))
            curve = capacity_curve(requests, POLICIES, points, console.in_steps(lambda step: progress.advance(drawing, step)))
    size = "no limit" if arguments.capacity_tokens is None else f"{found.capacity_blocks:,} blocks, {arguments.policy}"
    print(
        f"{len(requests):,} requests, {found.blocks:,} blocks of {BLOCK_TOKENS} tokens: {found.block_hits:,} found "
        f"({found.hit_rate:.2%}) with {size}; {found.evictions:,} evictions; "
        f"{(found.blocks + found.evictions) / seconds:,.0f} blocks touched a second"
    )
    content = {
        "blocks": found.blocks, "block_hits": found.block_hits, "hit_rate": found.hit_rate, "requests": len(requests),
        "capacity_blocks": found.capacity_blocks, "policy": arguments.policy, "evictions": found.evictions,
    }  # fmt: skip
    if curve is not None:
        from minikv.show import plots

        content["curve"] = {policy: [{"capacity_tokens": n, "hit_rate": rate} for n, rate in line] for policy, line in curve.items()}
        plots.save(plots.capacity(curve, f"{trace.name}: what a larger cache finds"), arguments.plot)
        print(f"figure: {arguments.plot}")
    console.write_json(arguments.json, content)
    return 0
