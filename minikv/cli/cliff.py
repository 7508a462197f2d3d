"""measure the cache cliff on this machine

Agents' conversations over a pool that holds exactly K of them: first one by one, then K, then more than fit.
Prints a table, saves a figure, and marks where arithmetic says the cliff must be."""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter

from minikv.errors import RequestError
from minikv.lab.cliff import PUBLISHED, CliffRow, as_json, check_context, measure, session_counts
from minikv.lab.workload import Workload
from minikv.show import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    workload = Workload()
    parser.add_argument("--model", metavar="PATH", help="a Hugging Face folder (default: the bundled model)")
    parser.add_argument("--fits", type=int, metavar="K", help="whole sessions that the pool holds (default 8, with --quick 6)")
    parser.add_argument("--sessions", metavar="N,N,...", help="numbers of sessions to run (default: around K)")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rows")
    parser.add_argument("--system-tokens", type=int, default=workload.system_tokens, metavar="N", help="shared system prompt")
    parser.add_argument("--turns", type=int, default=workload.turns, metavar="N", help="turns a session")
    parser.add_argument("--turn-tokens", type=int, default=workload.turn_tokens, metavar="N", help="new tokens in, a turn")
    parser.add_argument("--output-tokens", type=int, default=workload.output_tokens, metavar="N", help="tokens out, a turn")
    parser.add_argument("--think-time", type=float, default=0.0, metavar="S", help="seconds between an answer and the next turn")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens a block (default 16)")
    parser.add_argument("--max-batch-tokens", type=int, default=512, metavar="N", help="tokens a step (default 512)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="F", help="write the numbers to F")
    parser.add_argument("--plot", metavar="F", default="cliff.png", help="write the figure to F (default cliff.png)")


def run(arguments: argparse.Namespace) -> int:
    started = perf_counter()
    workload = Workload(
        arguments.system_tokens, arguments.turns, arguments.turn_tokens, arguments.output_tokens, arguments.think_time, arguments.seed
    )
    fits = (6 if arguments.quick else 8) if arguments.fits is None else arguments.fits
    counts = console.whole_numbers(arguments.sessions) if arguments.sessions else session_counts(fits, arguments.quick)
    console.check_writable(arguments.json)
    console.check_writable(arguments.plot, endings=(".png", ".svg", ".pdf"))
    if fits < 1 or arguments.block_size < 1 or arguments.max_batch_tokens < 1:
        raise RequestError(
            f"the pool must hold at least one session in blocks of at least one token, and a step compute at least one; "
            f"got --fits {fits}, --block-size {arguments.block_size}, --max-batch-tokens {arguments.max_batch_tokens}"
        )
    import minikv

    model = minikv.load(arguments.model)
    check_context(workload, model.shape.max_context)
    blocks = workload.blocks(fits, arguments.block_size)
    print(
        f"{fits} sessions of {workload.system_tokens} shared + {workload.own_tokens} own tokens "
        f"({workload.turns} turns) fit in {blocks} blocks of {arguments.block_size}: the cliff must be at {fits + 1}."
    )
    with console.progress() as progress:
        task = progress.add_task("compiling", total=sum(counts) * workload.turns)

        def on_turn(sessions: int, turn: object) -> None:
            progress.update(task, advance=1, description=f"{sessions} sessions")

        rows = measure(model, workload, fits, counts, arguments.block_size, arguments.max_batch_tokens, on_turn=on_turn)
    seconds = perf_counter() - started
    console.show(console.cliff_table(rows, fits, unit="ms"))
    _verdict(rows, fits)
    setting = {"model": arguments.model, "block_size": arguments.block_size, "max_batch_tokens": arguments.max_batch_tokens}
    console.write_json(arguments.json, as_json(rows, fits, seconds, workload, **setting))
    if arguments.plot:
        from minikv.show import plots

        plots.save(plots.cliff(rows, fits, "The cache cliff, measured on this machine"), arguments.plot)
        print(f"figure: {Path(arguments.plot)}")
    print(f"{seconds:.0f} s in all")
    return 0


def _verdict(rows: list[CliffRow], fits: int) -> None:
    by_sessions = {row.sessions: row for row in rows}
    before, after = by_sessions.get(fits - 1), by_sessions.get(fits + 2)
    if before and after:
        published = PUBLISHED[1]["p99_ttft_s"] / PUBLISHED[0]["p99_ttft_s"]
        print(
            f"p99 with {after.sessions} sessions is {after.p99_ttft_s / before.p99_ttft_s:.0f} times that with {before.sessions} "
            f"(published, where 13 fit: {published:.0f} times, {PUBLISHED[1]['sessions']} against {PUBLISHED[0]['sessions']})."
        )
    fitting = [row for row in rows if row.sessions <= fits]
    if fitting and all(row.hit_rate == row.best_hit_rate for row in fitting):
        print(f"Up to {fits} sessions nothing that was computed is computed again: the hit rate is all that is possible.")
