"""compute an experiment at full scale, beside the published figure

The engine, scheduler, block pool and prefix cache are the real ones; only the clock is computed, from the bytes that a
step moves and the operations that it needs on the chosen machine (a roofline).

cliff: Momento's experiment (2026): Qwen3-4B on an NVIDIA L4, a shared system prompt of 10,000 tokens, then 12 turns.
The KV capacity was not published; it is fitted to the speaker's "about 13" sessions. The step budget was not published
either. What is predicted is that there is a cliff, how steep it is, and the tail behind it.

With --measured F, F being what `minikv cliff --json F` wrote, it computes that experiment instead, with this machine's
own rates, and stands beside what was measured: the simulator tested against reality."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from time import perf_counter
from typing import TYPE_CHECKING

from minikv.errors import RequestError
from minikv.show import console

if TYPE_CHECKING:
    from minikv.lab.cliff import CliffRow
    from minikv.lab.simulate import Scenario

COUNTS = (1, 3, 6, 9, 12, 13, 14, 16, 20, 24, 32, 48)
BAND = (9, 16)  # whole sessions: the other plausible readings of the unpublished capacity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", choices=["cliff"])
    parser.add_argument("--model", default="qwen3-4b", metavar="NAME", help="a preset, or a folder with a config.json")
    parser.add_argument("--hardware", default="l4", metavar="NAME")
    parser.add_argument("--fits", type=int, default=13, metavar="K", help="KV memory for K whole sessions in fp8 (default 13)")
    parser.add_argument("--kv-gb", type=float, metavar="GB", help="KV memory in GB (10^9 bytes), instead of --fits")
    parser.add_argument("--kv-dtype", default="fp8", metavar="DTYPE", help="bf16, fp8 (default) or int4")
    parser.add_argument("--weight-dtype", default="fp8", metavar="DTYPE", help="default fp8")
    parser.add_argument("--system-tokens", type=int, default=10_000, metavar="N")
    parser.add_argument("--turns", type=int, default=12, metavar="N")
    parser.add_argument("--turn-tokens", type=int, default=1_000, metavar="N")
    parser.add_argument("--output-tokens", type=int, default=75, metavar="N")
    parser.add_argument("--think-time", type=float, default=0.0, metavar="S")
    parser.add_argument("--max-batch-tokens", type=int, default=4096, metavar="N", help="tokens a step (default 4096)")
    parser.add_argument("--block-size", type=int, default=16, metavar="N")
    parser.add_argument("--step-overhead", type=float, default=0.0, metavar="S", help="seconds a step beside the roofline")
    parser.add_argument("--sessions", metavar="N,N,...", help=f"default {','.join(map(str, COUNTS))}")
    parser.add_argument("--no-band", action="store_true", help=f"do not compute the capacities of {BAND[0]} and {BAND[1]} sessions")
    parser.add_argument("--measured", metavar="F", help="predict the measured cliff in F (from minikv cliff --json F)")
    parser.add_argument("--json", metavar="F", help="write the numbers to F")
    parser.add_argument("--plot", metavar="F", default="simulated_cliff.png", help="write the figure to F")


def run(arguments: argparse.Namespace) -> int:
    console.check_writable(arguments.json)
    console.check_writable(arguments.plot, endings=(".png", ".svg", ".pdf"))
    return _run_measured(arguments) if arguments.measured else _run_published(arguments)


def _run_published(arguments: argparse.Namespace) -> int:
    from minikv.lab.cliff import PUBLISHED, as_json
    from minikv.lab.simulate import run_all

    started = perf_counter()
    scenario = _scenario(arguments)
    counts = console.whole_numbers(arguments.sessions) if arguments.sessions else list(COUNTS)
    bands = [] if arguments.no_band else [(fits, n) for fits in BAND for n in counts if abs(n - fits) <= 4]
    workload = scenario.workload
    print(
        f"{scenario.shape.name} on {scenario.machine.name}: {scenario.kv_bytes / 1e9:.2f} GB of KV in {scenario.kv_dtype} hold "
        f"{scenario.num_blocks * scenario.block_size:,} tokens = {workload.system_tokens:,} shared + {scenario.fits} sessions of "
        f"{workload.own_tokens:,}: the cliff must be at {scenario.fits + 1}."
    )
    tasks = [(scenario, n) for n in counts] + [(scenario.with_capacity(fits), n) for fits, n in bands]
    with console.progress() as progress:
        task = progress.add_task("simulating", total=sum(sessions for _, sessions in tasks))
        found = run_all(tasks, lambda row: progress.update(task, advance=row.sessions))
    rows, others = found[: len(counts)], found[len(counts) :]
    band: dict[int, list[CliffRow]] = {}
    for (fits, _), row in zip(bands, others, strict=True):
        band.setdefault(fits, []).append(row)
    console.show(console.cliff_table(rows, scenario.fits))
    _compare(rows)
    seconds = perf_counter() - started
    content = as_json(rows, scenario.fits, seconds, workload)
    content["band"] = {str(fits): [asdict(row) for row in members] for fits, members in band.items()}
    console.write_json(arguments.json, content)
    if arguments.plot:
        from minikv.show import plots

        title = f"{scenario.shape.name} on {scenario.machine.name}, computed; crosses: published"
        plots.save(plots.cliff(rows, scenario.fits, title, band, [(p["sessions"], p["p99_ttft_s"]) for p in PUBLISHED]), arguments.plot)
        print(f"figure: {arguments.plot}")
    print(f"{seconds:.0f} s in all")
    return 0


def _run_measured(arguments: argparse.Namespace) -> int:
    """Predict a measured cliff: same model, workload and pool, this machine's rates."""
    from minikv.lab.cliff import as_json, read_measured
    from minikv.lab.simulate import Scenario, run_all
    from minikv.lab.this_machine import measure_machine
    from minikv.model.weights import load

    started = perf_counter()
    measured = read_measured(arguments.measured)
    model = load(measured.model)
    machine = measure_machine(model, measured.block_size, measured.max_batch_tokens)
    print(
        f"this machine: {machine.bytes_per_s / 1e9:.1f} GB/s, {machine.flops_per_s / 1e9:.0f} GFLOP/s, "
        f"{1000 * machine.step_overhead_s:.2f} ms a step besides"
    )
    dtype = str(model.dtype).removeprefix("torch.")
    scenario = Scenario(
        model.shape, machine, measured.workload, kv_bytes=10**15, weight_dtype=dtype, kv_dtype=dtype,
        max_batch_tokens=measured.max_batch_tokens, block_size=measured.block_size,
    ).with_capacity(measured.fits, dtype)  # fmt: skip
    rows = run_all([(scenario, row.sessions) for row in measured.rows], processes=1)
    table = console.table("sessions", "hit rate", "computed", "p50 ms", "computed", "ratio", "p99 ms", "computed", "ratio")
    for real, row in zip(measured.rows, rows, strict=True):
        table.add_row(
            str(row.sessions), f"{real.hit_rate:.2%}", f"{row.hit_rate:.2%}",
            f"{1000 * real.p50_ttft_s:,.0f}", f"{1000 * row.p50_ttft_s:,.0f}", f"{row.p50_ttft_s / real.p50_ttft_s:.2f}",
            f"{1000 * real.p99_ttft_s:,.0f}", f"{1000 * row.p99_ttft_s:,.0f}", f"{row.p99_ttft_s / real.p99_ttft_s:.2f}",
        )  # fmt: skip
    console.show(table)
    content = as_json(rows, measured.fits, perf_counter() - started, measured.workload, measured=[asdict(row) for row in measured.rows])
    console.write_json(arguments.json, content)
    if arguments.plot:
        from minikv.show import plots

        crosses = [(row.sessions, row.p99_ttft_s) for row in measured.rows]
        plots.save(plots.cliff(rows, measured.fits, "Computed with this machine's rates", None, crosses, "measured p99"), arguments.plot)
        print(f"figure: {arguments.plot}")
    return 0


def _scenario(arguments: argparse.Namespace) -> Scenario:
    from minikv.lab.simulate import Scenario
    from minikv.lab.workload import Workload
    from minikv.shape.hardware import hardware
    from minikv.shape.model_shape import find_shape

    try:
        machine = replace(hardware(arguments.hardware), step_overhead_s=arguments.step_overhead)
        shape = find_shape(arguments.model)
        for dtype in (arguments.kv_dtype, arguments.weight_dtype):
            shape.kv_bytes_per_token(dtype)
    except ValueError as wrong:
        raise RequestError(str(wrong)) from None
    workload = Workload(arguments.system_tokens, arguments.turns, arguments.turn_tokens, arguments.output_tokens, arguments.think_time)
    if arguments.fits < 1:
        raise RequestError(f"the memory must hold at least one session, not {arguments.fits}")
    if arguments.kv_gb is not None and not 0 < arguments.kv_gb < 1e6:
        raise RequestError(f"--kv-gb must be above 0, not {arguments.kv_gb}")
    scenario = Scenario(
        shape, machine, workload, kv_bytes=10**15, weight_dtype=arguments.weight_dtype,
        max_batch_tokens=arguments.max_batch_tokens, block_size=arguments.block_size,
    )  # fmt: skip
    kv_bytes = scenario.session_bytes(arguments.fits, "fp8") if arguments.kv_gb is None else int(arguments.kv_gb * 1e9)
    return replace(scenario, kv_bytes=kv_bytes, kv_dtype=arguments.kv_dtype)


def _compare(rows: list[CliffRow]) -> None:
    from minikv.lab.cliff import PUBLISHED, SAFE

    found = {row.sessions: row for row in rows}
    safe = found.get(SAFE["sessions"])
    if safe is not None:
        print(f"{safe.sessions} sessions: p99 {safe.p99_ttft_s:.1f} s computed, published as safe, under {SAFE['p99_below_s']} s")
    for published in PUBLISHED:
        row = found.get(published["sessions"])
        if row is not None:
            ratio = row.p99_ttft_s / published["p99_ttft_s"]
            print(
                f"{row.sessions} sessions: p99 {row.p99_ttft_s:.1f} s computed, {published['p99_ttft_s']} s published ({ratio:.2f} of it)"
            )
