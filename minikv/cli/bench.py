"""measure the engine's speed, beside other engines and this machine's limits

Four workloads on a random model of 14.2 M parameters, float32, greedy. Speed is generated tokens a second over the
whole run, prefill included: the median of several runs, in which the engines take turns.

A peer runs in a process and a Python of its own: the one given with --peer-python, or minikv's if the peer is installed
there, or a virtual environment in the cache folder, which is made at the first time (it says what it installs)."""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from minikv.errors import RequestError
from minikv.show import console

if TYPE_CHECKING:
    from minikv.lab.ceilings import Ceilings
    from minikv.model.weights import Model

PEERS = ("hf", "vllm", "llama.cpp")
PROFILED = ((1, 32), (32, 96), (12, 950))  # decode steps whose parts are timed: sequences, tokens of their prompts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer", action="append", default=[], choices=PEERS, help="also run another engine on the same weights")
    parser.add_argument(
        "--peer-python", action="append", default=[], metavar="NAME=PATH", help="the Python in which that peer is installed"
    )
    parser.add_argument("--agentic", action="store_true", help="also the loop of agents: time to first token (always with --peer vllm)")
    parser.add_argument("--scaling", action="store_true", help="only how cost grows: batch, context, pool, bookkeeping, start-up, memory")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of which the median counts (default 3)")
    parser.add_argument("--quick", action="store_true", help="smaller workloads, one run each")
    parser.add_argument("--json", metavar="F", help="write the numbers to F")
    parser.add_argument("--plot", metavar="F", help="draw where a step's time goes (with --scaling: how cost grows) into F")


def run(arguments: argparse.Namespace) -> int:
    if arguments.repeats < 1:
        raise RequestError(f"--repeats must be at least 1, not {arguments.repeats}")
    pythons = _pythons(arguments.peer_python)
    console.check_writable(arguments.json)
    console.check_writable(arguments.plot, endings=(".png", ".svg", ".pdf"))
    started = perf_counter()
    with console.progress() as progress:
        task = progress.add_task("the machine's ceilings", total=None)

        def tell(text: str) -> None:
            progress.update(task, description=text)

        model, roof, content = _machine(arguments.quick)
        if arguments.scaling:
            from minikv.lab import scaling

            content["scaling"] = scaling.measure(model, roof, arguments.quick, tell)
        else:
            content |= measure(model, roof, arguments, pythons, tell)
    content["seconds"] = perf_counter() - started
    _print(content)
    console.write_json(arguments.json, content)
    if arguments.plot:
        _draw(content, arguments.plot)
    return 0


def _pythons(words: list[str]) -> dict[str, str]:
    """Paths by peer, from NAME=PATH. RequestError for another form or a name that is no peer's."""
    pythons = {}
    for word in words:
        name, equals, path = word.partition("=")
        if name not in PEERS or not equals or not path:
            raise RequestError(f"--peer-python takes NAME=PATH with a name of {', '.join(PEERS)}, not {word!r}")
        pythons[name] = path
    return pythons


def _machine(quick: bool) -> tuple[Model, Ceilings, dict[str, Any]]:
    """The model, the machine's ceilings, and how both stand in the JSON file."""
    import minikv
    from minikv.lab import ceilings
    from minikv.shape.model_shape import preset

    shape = preset("bench-14m")
    roof = ceilings.measure(shape, seconds=3 if quick else 8)
    content: dict[str, Any] = {
        "machine": f"{platform.machine()}, {console.counted(roof.threads, 'thread')}",
        "model": f"{shape.name}, {shape.parameters:,} parameters, float32, random weights",
        "ceilings": {
            "read_gb_s": roof.read_gb_s, "read_weights_gb_s": roof.read_weights_gb_s, "copy_gb_s": roof.copy_gb_s,
            "gemm_gflop_s": roof.gemm_gflop_s, "gemm_by_size_gflop_s": roof.gemm,
        },
    }  # fmt: skip
    return minikv.load(shape=shape, seed=0), roof, content


def measure(
    model: Model, roof: Ceilings, arguments: argparse.Namespace, pythons: dict[str, str], progress: Callable[[str], None]
) -> dict[str, Any]:
    """Everything but the ceilings that the command measures, as it stands in the JSON file."""
    from minikv.lab import anatomy, bench, bookkeeping, start_up

    quick, repeats = arguments.quick, 1 if arguments.quick else arguments.repeats
    workloads = [bench.quick(workload) for workload in bench.WORKLOADS] if quick else bench.WORKLOADS
    content = _beside_peers(model, roof, workloads, repeats, arguments, pythons, progress)
    progress("the attention kernel")
    sizes = ((12, 1000),) if quick else ((1, 1000), (12, 1000), (32, 128))
    content["kernel"] = [anatomy.kernel_bandwidth(model.shape, sequences, context) for sequences, context in sizes]
    progress("where the time goes")
    content["step_parts_s"] = {}
    for requests, prompt_tokens in PROFILED:
        content["step_parts_s"] |= anatomy.anatomy(model, prompt_tokens, requests, repeats=8 if quick else 20)
    progress("bookkeeping")
    content["bookkeeping"] = bookkeeping.measure(bookkeeping.CACHED_BLOCKS[: 2 if quick else 3])
    progress("start-up")
    content["start_up_s"] = start_up.measure(repeats, compile_too=not quick)
    return content


def _beside_peers(
    model: Model,
    roof: Ceilings,
    workloads: Any,
    repeats: int,
    arguments: argparse.Namespace,
    pythons: dict[str, str],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """The workloads and the loop of agents, with the peers that were asked for."""
    from minikv.lab import agentic, bench
    from minikv.lab.peers.environments import KINDS
    from minikv.model.weights import save

    names = list(dict.fromkeys(arguments.peer))
    content: dict[str, Any] = {}

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    with tempfile.TemporaryDirectory(prefix="minikv-bench-") as temporary:
        folder = Path(temporary)
        if names:
            save(model, folder)
            progress(f"starting {', '.join(names)}")
        with bench.open_peers(names, folder, model, pythons, say) as (peers, missing):
            content["peers"] = {name: peer.about["version"] for name, peer in peers.items()}
            content["rows"], failed = bench.measure(model, workloads, roof, peers, repeats, progress)
        content["missing"] = missing | failed
        content["marks"] = bench.marks(content["rows"])
        sharing = [name for name in names if KINDS[name].shares_prefixes and name not in missing]
        if arguments.agentic or any(KINDS[name].shares_prefixes for name in names):
            progress("starting for the loop of agents")
            loop = agentic.quick(agentic.WORKLOAD) if arguments.quick else agentic.WORKLOAD
            with bench.open_peers(sharing, folder, model, pythons, say, **agentic.pool_settings(loop)) as (peers, missing):
                content["agentic"], failed = agentic.measure_beside(model, loop, peers, progress)
            content["missing"] |= {f"{name}, agents": reason for name, reason in missing.items()} | failed
    return content


def _draw(content: dict[str, Any], path: str) -> None:
    from minikv.show import plots

    if "scaling" in content:
        figure = plots.scaling(content["scaling"], f"How cost grows: {content['model']}, {content['machine']}")
    else:
        figure = plots.step_profile(content["step_parts_s"], f"Where a step's time goes: {content['machine']}, float32")
    plots.save(figure, path)
    print(f"figure: {Path(path)}")


def _print(content: dict[str, Any]) -> None:
    roof = content["ceilings"]
    print(f"{content['machine']}; {content['model']}")
    print(
        f"ceilings: read {roof['read_gb_s']:.1f} GB/s ({roof['read_weights_gb_s']:.1f} over the size of the weights), "
        f"copy {roof['copy_gb_s']:.1f} GB/s (read + written), "
        f"GEMM {roof['gemm_gflop_s']:.0f} GFLOP/s ("
        + ", ".join(f"{size} {rate:.0f}" for size, rate in roof["gemm_by_size_gflop_s"].items())
        + ")"
    )
    if "scaling" in content:
        _print_scaling(content["scaling"])
    else:
        _print_measured(content)
    print(f"{content['seconds']:.0f} s in all")


def _print_measured(content: dict[str, Any]) -> None:
    for name, version in content["peers"].items():
        print(f"{name}: {version}")
    console.show(_speed_table(content["rows"]))
    if content["marks"]:
        console.show(_marks_table(content["marks"]))
    if "agentic" in content:
        console.show(_agentic_table(content["agentic"]))
    for name, reason in content["missing"].items():
        print(f"not measured: {name}: {reason}")
    console.show(_kernel_table(content["kernel"]))
    console.show(_parts_table(content["step_parts_s"]))
    console.show(_bookkeeping_table(content["bookkeeping"]))
    console.show(_start_up_table(content["start_up_s"]))


def _print_scaling(found: dict[str, Any]) -> None:
    console.show(_steps_table([*found["batch"], *found["context"], *found["pool"]]))
    console.show(_memory_table(found["memory"]))
    console.show(_bookkeeping_table(found["bookkeeping"]))
    console.show(_start_up_table(found["start_up_s"]))


def _speed_table(rows: list[dict[str, Any]]) -> object:
    table = console.table("workload", "engine", "tokens/s", "ms a step", "of limit", "minikv is faster by")
    for row in rows:
        ours = row["engine"] == "minikv"
        if ours and table.row_count:
            table.add_section()
        note = f" ({row['requests']} of them)" if row["engine"].endswith("one by one") else ""
        table.add_row(
            row["workload"] if ours else "", row["engine"] + note, f"{row['tokens_per_s']:,.1f}",
            f"{1000 * row['step_s']:.1f}" if ours else "", f"{row['of_limit']:.0%}" if row["of_limit"] else "",
            "" if ours else f"{row['minikv_is_times_faster']:.2f}x",
        )  # fmt: skip
    return table


def _marks_table(rows: list[dict[str, Any]]) -> object:
    table = console.table("the marks", "best peer", "minikv / best peer", "best of Hugging Face", "minikv / Hugging Face")
    for row in rows:
        hf = (row["best_hf"], f"{row['of_best_hf']:.2f}x") if row["best_hf"] else ("", "")
        table.add_row(row["workload"], row["best_peer"], f"{row['of_best_peer']:.2f}x", *hf)
    return table


def _agentic_table(rows: list[dict[str, Any]]) -> object:
    table = console.table(
        "sessions of agents", "engine", "p50 TTFT ms", "p99 TTFT ms", "hit rate", "cold p50 ms", "cold p99 ms", "tokens/s"
    )
    for row in rows:
        times = (f"{1000 * row[name]:,.0f}" for name in ("p50_ttft_s", "p99_ttft_s", "cold_p50_ttft_s", "cold_p99_ttft_s"))
        p50, p99, cold_p50, cold_p99 = times
        ours = row["engine"] == "minikv"
        table.add_row(
            str(row["sessions"]) if ours else "", row["engine"], p50, p99, f"{row['hit_rate']:.1%}", cold_p50, cold_p99,
            f"{row['tokens_per_s']:,.0f}",
        )  # fmt: skip
    return table


def _start_up_table(found: dict[str, dict[str, float]]) -> object:
    table = console.table("start-up, s from a fresh process", "first token", "second token")
    names = {"warm": "kernels kept from before", "empty": "nothing kept: kernels are compiled"}
    for name, times in found.items():
        table.add_row(names[name], f"{times['first_token_s']:.1f}", f"{times['second_token_s']:.1f}")
    return table


def _steps_table(rows: list[dict[str, Any]]) -> object:
    table = console.table("a decode step", "blocks in the pool", "ms", "limit ms", "of limit")
    for row in rows:
        table.add_row(
            f"{row['sequences']} x {row['context']:,} tokens of context", f"{row['pool_blocks']:,}" if row["pool_blocks"] else "as needed",
            f"{1000 * row['step_s']:.2f}", f"{1000 * row['limit_s']:.2f}", f"{row['limit_s'] / row['step_s']:.0%}",
        )  # fmt: skip
    return table


def _memory_table(rows: list[dict[str, Any]]) -> object:
    table = console.table("memory, MB", "by arithmetic", "tensors", "process grew by", "measured / arithmetic")
    for row in rows:
        computed, tensors, grown = (row[f"{name}_bytes"] for name in ("computed", "tensor", "rss"))
        table.add_row(
            row["what"], f"{computed / 1e6:,.1f}", f"{tensors / 1e6:,.1f}", f"{grown / 1e6:,.1f}" if grown else "unknown",
            f"{(grown or tensors) / computed:.3f}",
        )  # fmt: skip
    return table


def _kernel_table(rows: list[dict[str, Any]]) -> object:
    table = console.table("attention of one token each", "paged GB/s", "contiguous SDPA GB/s", "paged / contiguous")
    for row in rows:
        name = f"{row['sequences']} x {row['context']:,} tokens of context"
        table.add_row(name, f"{row['paged_gb_s']:.1f}", f"{row['contiguous_gb_s']:.1f}", f"{row['paged_of_contiguous']:.2f}")
    return table


def _parts_table(steps: dict[str, dict[str, float]]) -> object:
    table = console.table("where the time goes, ms", *steps)
    for part in next(iter(steps.values())):
        table.add_row(part, *(f"{1000 * seconds[part]:.2f}" for seconds in steps.values()))
    table.add_section()
    table.add_row("in all", *(f"{1000 * sum(seconds.values()):.2f}" for seconds in steps.values()))
    return table


def _bookkeeping_table(rows: list[dict[str, Any]]) -> object:
    table = console.table("bookkeeping alone, cached blocks", "us a looked-up prompt token", "us a decoded token")
    for row in rows:
        table.add_row(f"{row['cached_blocks']:,}", f"{row['lookup_us_per_prompt_token']:.2f}", f"{row['decode_us_per_token']:.1f}")
    return table
