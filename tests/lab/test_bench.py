"""The benchmark's bookkeeping: what it counts, what its JSON says, and that a missing peer is named. No clock is asserted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from unittest.mock import patch

import pytest

import minikv
from minikv.cli import bench as command
from minikv.compiled import threads
from minikv.engine.engine import Engine
from minikv.engine.metrics import percentile
from minikv.engine.runner import TorchRunner
from minikv.errors import RequestError
from minikv.lab import agentic, anatomy, bench, bookkeeping, kernel_clock, scaling, start_up
from minikv.lab.bench import BenchWorkload, Recorder, Run, Step, limit_seconds
from minikv.lab.ceilings import Ceilings, best_seconds
from minikv.lab.ceilings import measure as measure_ceilings
from minikv.lab.peers.environments import Kind, PeerError
from minikv.lab.workload import Workload
from minikv.model.sampling import Sampling
from minikv.shape.model_shape import ModelShape, preset
from minikv.shape.roofline import step_cost

SHAPE = ModelShape(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, vocab=50, ffn=48, qk_norm=True, max_context=128)
ROOF = Ceilings(read_gb_s=10.0, read_weights_gb_s=20.0, copy_gb_s=8.0, gemm={"small": 50.0, "large": 100.0}, threads=2)


@pytest.fixture(scope="module")
def model():  # type: ignore[no-untyped-def]
    return minikv.load(shape=SHAPE)


def test_the_four_workloads_are_those_of_the_table() -> None:
    assert [workload.name for workload in bench.WORKLOADS] == [
        "1 request, 32 in, 128 out", "1 request, 1,024 in, 64 out",
        "32 requests, 32 to 128 in, 64 out", "12 requests, 900 to 1,000 in, 32 out",
    ]  # fmt: skip
    assert preset("bench-14m").parameters == pytest.approx(14.2e6, rel=0.01)
    for workload in bench.WORKLOADS:
        prompts = workload.prompts(4096)
        assert prompts == workload.prompts(4096)
        assert prompts != workload.prompts(4096, seed=2)
        assert len(prompts) == workload.requests
        assert all(workload.shortest <= len(prompt) <= workload.longest for prompt in prompts)


def test_the_recorded_steps_are_the_work_that_was_done(model) -> None:  # type: ignore[no-untyped-def]
    ours = bench.Ours(model)
    prompts = BenchWorkload(3, 5, 20, 6).prompts(SHAPE.vocab)
    outputs, seconds = ours.generate(prompts, 6)
    assert seconds > sum(step.seconds for step in ours.steps)
    assert [len(tokens) for tokens in outputs] == [6, 6, 6]
    assert sum(new for step in ours.steps for new, _ in step.pieces) == sum(len(prompt) + 5 for prompt in prompts)
    assert sum(step.rows for step in ours.steps) == 18
    assert [step.is_decode for step in ours.steps] == [False] + [True] * 5
    assert ours.steps[-1].pieces == tuple((1, len(prompt) + 5) for prompt in prompts)


def test_the_limit_sums_the_roof_over_the_steps() -> None:
    steps = [Step(((8, 8),), 1, 1.0), Step(((1, 9), (1, 4)), 2, 1.0)]
    costs = [step_cost(SHAPE, step.pieces, step.rows) for step in steps]
    assert limit_seconds(SHAPE, steps, ROOF) == sum(max(cost.bytes / 20e9, cost.flops / 100e9) for cost in costs)


def test_the_recorder_is_the_runner_that_it_wraps(model) -> None:  # type: ignore[no-untyped-def]
    from minikv.engine.runner import TorchRunner

    runner = TorchRunner(model, 4, 8)
    assert (Recorder(runner).num_blocks, Recorder(runner).vocab) == (4, SHAPE.vocab)


class Peer:
    """Answers like minikv, except where it is told to fail; stands in for a process."""

    def __init__(self, model) -> None:  # type: ignore[no-untyped-def]
        self.model, self.asked = model, []
        self.about = {"version": "1", "alone": ["right"], "together": ["right", "right, one by one", "wrong"]}

    def ask(self, do: str, way: str, prompts: list[list[int]], new_tokens: int):  # type: ignore[no-untyped-def]
        self.asked.append((do, way, len(prompts), new_tokens))
        if way == "wrong":
            raise PeerError("OverflowError: too much")
        tokens, _ = bench.Ours(self.model).generate(prompts, new_tokens)
        return {"tokens": tokens, "seconds": 0.5}


def test_a_peer_runs_on_the_same_prompts_in_turns(model) -> None:  # type: ignore[no-untyped-def]
    peer = Peer(model)
    workloads = [BenchWorkload(1, 4, 4, 6), BenchWorkload(5, 4, 9, 6)]
    rows, missing = bench.measure(model, workloads, ROOF, {"good": peer}, repeats=2)
    assert [(row["workload"], row["engine"]) for row in rows] == [
        ("1 request, 4 in, 6 out", "minikv"), ("1 request, 4 in, 6 out", "right"),
        ("5 requests, 4 to 9 in, 6 out", "minikv"), ("5 requests, 4 to 9 in, 6 out", "right"),
        ("5 requests, 4 to 9 in, 6 out", "right, one by one"),
    ]  # fmt: skip
    assert [row["same_tokens"] for row in rows if row["engine"] != "minikv"] == [1.0, 1.0, 1.0]
    assert rows[1]["tokens_per_s"] == 6 / 0.5
    assert rows[1]["of_limit"] == pytest.approx(rows[0]["of_limit"] * rows[1]["tokens_per_s"] / rows[0]["tokens_per_s"])
    assert rows[-1]["requests"] == bench.ONE_BY_ONE_REQUESTS
    assert all(len(row["times_s"]) == 2 for row in rows)
    assert missing == {"wrong on 5 requests, 4 to 9 in, 6 out": "OverflowError: too much"}
    assert peer.asked[:3] == [("generate", "right", 1, 4), ("generate", "right", 1, 6), ("generate", "right", 1, 6)]  # first a short one
    assert [way for _, way, _, _ in peer.asked[3:8]] == ["right", "right, one by one", "wrong", "right", "right, one by one"]


def test_peers_that_do_not_start_are_named(model, monkeypatch, fake_peer: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(bench.KINDS, "fine", Kind("fine", str(fake_peer), "json", ("fine",), "tiny"))
    monkeypatch.setitem(bench.KINDS, "absent", Kind("absent", str(tmp_path / "absent.py"), "json", ("absent",), "tiny"))
    with bench.open_peers(["absent", "fine"], tmp_path, model, {}, print, mode="good") as (opened, missing):
        assert list(opened) == ["fine"]
        assert opened["fine"].about["version"].endswith("['max_batch_requests', 'max_batch_tokens', 'max_context'])")
        assert "did not start: ended without an answer" in missing["absent"]
    with pytest.raises(PeerError, match="it has ended"):
        opened["fine"].ask("generate")


def test_the_marks_are_the_best_peer_and_the_best_of_hugging_face() -> None:
    speeds = [("a", "minikv", 100), ("a", "vllm", 50), ("a", "hf one", 20), ("a", "hf two", 25), ("b", "minikv", 10), ("c", "minikv", 9)]
    rows = [{"workload": workload, "engine": engine, "tokens_per_s": speed} for workload, engine, speed in speeds]
    rows.append({"workload": "c", "engine": "vllm", "tokens_per_s": 18})
    assert bench.marks(rows) == [
        {"workload": "a", "best_peer": "vllm", "of_best_peer": 2.0, "best_hf": "hf two", "of_best_hf": 4.0},
        {"workload": "c", "best_peer": "vllm", "of_best_peer": 0.5, "best_hf": None, "of_best_hf": None},
    ]


def test_tokens_per_s_is_that_of_the_median_run() -> None:
    assert Run(requests=4, new_tokens=10, seconds=[9.0, 2.0, 1.0]).tokens_per_s == 20.0


def test_bookkeeping_keeps_the_pool_full() -> None:
    rows = bookkeeping.measure((200, 400), rounds=1)
    assert [row["cached_blocks"] for row in rows] == [200, 400]
    assert all(row["cached_now_blocks"] >= row["cached_blocks"] - 32 for row in rows)
    pool = bookkeeping.FullPool(200, sequences=4)
    before = pool.engine.stats()
    pool.look_up_us()
    after = pool.engine.stats()
    assert after.hit_tokens - before.hit_tokens == bookkeeping.PROMPT_BLOCKS * 16  # all but the one token that must be computed
    evictions = after.evictions
    pool.decode_us()
    assert pool.engine.stats().evictions > evictions
    pool.engine.check_integrity()


@pytest.mark.parametrize("compiled", [True, False])
def test_the_parts_of_a_step_are_all_there(model, monkeypatch, compiled: bool) -> None:  # type: ignore[no-untyped-def]
    from minikv.engine.compiled_step import CompiledStep

    calls: list[bool] = []
    can = CompiledStep.can
    monkeypatch.setattr(CompiledStep, "can", lambda *step: calls.append(compiled and can(*step)) or calls[-1])
    parts = anatomy.anatomy(model, prompt_tokens=20, requests=3, repeats=3)
    assert any(calls) == compiled  # the clocks must not push the step onto another path
    assert list(parts) == ["prefill, 127 tokens", "decode, 3 x 20"]
    for seconds in parts.values():
        assert tuple(seconds) == anatomy.PARTS
        assert all(seconds[part] > 0 for part in anatomy.PARTS), seconds
    row = anatomy.kernel_bandwidth(SHAPE, sequences=2, context=20, repeats=1)
    assert row["paged_gb_s"] > 0
    assert row["contiguous_gb_s"] > 0


def test_the_parts_of_a_step_add_up_to_it(model, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Whatever the clocks between the kernels say, of every one of them, what is left over is the rest."""

    def five_seconds_each(run, tell):  # type: ignore[no-untyped-def]
        return lambda *arguments: (run(*arguments), tell([5.0] * (5 * SHAPE.layers + 3)))

    monkeypatch.setattr(anatomy, "clocked", five_seconds_each)
    runner = TorchRunner(model, 20, 16)
    engine = Engine(runner=runner)
    engine.add("one", [1, 2, 3], Sampling(max_new_tokens=2))
    seconds = anatomy.Clock(engine, runner).step()
    assert seconds["head product"] == 5
    assert 0 < sum(seconds.values()) < 4


def test_a_clock_between_kernels_changes_no_result(model) -> None:  # type: ignore[no-untyped-def]
    prompts = BenchWorkload(2, 4, 9, 5).prompts(SHAPE.vocab)
    plain, _ = bench.Ours(model).generate(prompts, 5)
    told: list[list[float]] = []
    with patch.object(threads, "run", kernel_clock.clocked(threads.run, told.append)):
        assert bench.Ours(model).generate(prompts, 5)[0] == plain
    assert len(told) >= 4  # every decode step
    assert {len(seconds) for seconds in told} == {5 * SHAPE.layers + 3}  # and embedding, head, best tokens
    assert min(map(min, told)) >= 0


def test_the_fastest_half_of_the_steps_counts() -> None:
    steps = [dict.fromkeys(anatomy.PARTS, seconds) for seconds in (5.0, 1.0, 3.0, 9.0)]
    assert anatomy._usual(steps) == dict.fromkeys(anatomy.PARTS, 2.0)


def test_ceilings_are_measured(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from minikv.lab import ceilings

    monkeypatch.setattr(ceilings, "LARGE_BYTES", 1 << 16)
    monkeypatch.setattr(ceilings, "SQUARES", (32,))
    roof = measure_ceilings(SHAPE, seconds=0.01)
    assert min(roof.read_gb_s, roof.read_weights_gb_s, roof.copy_gb_s, *roof.gemm.values()) > 0
    assert list(roof.gemm) == ["32x32x32", "32x32x96", "512x32x96"]
    calls: list[int] = []
    best_seconds(lambda: calls.append(1), 0.0)
    assert len(calls) == 4
    assert (ROOF.bytes_per_s, ROOF.flops_per_s) == (20e9, 100e9)


@pytest.fixture
def small(monkeypatch, fake_peer: Path):  # type: ignore[no-untyped-def]
    """The command on a tiny model, with a peer that needs nothing installed in the place of vLLM."""
    from minikv.lab import ceilings
    from minikv.shape import model_shape

    monkeypatch.setattr(model_shape, "preset", lambda name: SHAPE)
    monkeypatch.setattr(ceilings, "measure", lambda shape, seconds: ROOF)
    monkeypatch.setattr(bench, "WORKLOADS", (BenchWorkload(1, 4, 4, 2), BenchWorkload(8, 4, 4, 4)))
    monkeypatch.setattr(bookkeeping, "CACHED_BLOCKS", (200, 400))
    monkeypatch.setattr(command, "PROFILED", ((1, 8), (2, 9)))
    monkeypatch.setattr(agentic, "WORKLOAD", Workload(32, 6, 4, 2))
    monkeypatch.setattr(agentic, "SESSIONS", (2, 3))
    monkeypatch.setattr(start_up, "seconds_to_tokens", lambda folder: {"first_token_s": 1.0, "second_token_s": 1.25})
    monkeypatch.setitem(bench.KINDS, "vllm", Kind("vllm", str(fake_peer), "json", ("vllm",), "tiny", shares_prefixes=True))

    def run(*words: str) -> int:
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        return command.run(parser.parse_args(words))

    return run


def test_the_command_measures_everything_beside_a_peer(small, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    file, figure = tmp_path / "bench.json", tmp_path / "profile.png"
    words = ("--peer", "vllm", "--peer", "llama.cpp", "--peer-python", "llama.cpp=nowhere")
    assert small("--quick", *words, "--json", str(file), "--plot", str(figure)) == 0
    content = json.loads(file.read_text())
    assert content["ceilings"]["copy_gb_s"] == 8.0
    assert content["ceilings"]["gemm_gflop_s"] == 100.0
    assert [row["engine"] for row in content["rows"]] == ["minikv", "fake", "minikv", "fake", "fake, one by one"]
    for row in content["rows"]:
        assert min(row["tokens_per_s"], row["of_limit"]) > 0
        assert row["engine"] != "minikv" or row["step_s"] > 0
    assert [row["best_hf"] for row in content["marks"]] == [None, None]
    assert [(row["sessions"], row["engine"]) for row in content["agentic"]] == [(2, "minikv"), (2, "vllm"), (3, "minikv"), (3, "vllm")]
    assert content["start_up_s"] == {"warm": {"first_token_s": 1.0, "second_token_s": 1.25}}
    assert content["missing"] == {"llama.cpp": "did not start: not there: nowhere is no Python"}
    assert len(content["step_parts_s"]) == 3
    printed = capsys.readouterr().out
    for said in (
        "not measured: llama.cpp: did not start",
        "1 request, 4 in",
        "vllm: fake 1.0",
        "the marks",
        "sessions of agents",
        "start-up",
    ):
        assert said in printed
    assert figure.stat().st_size > 5_000


def test_without_peers_nothing_is_said_of_marks_or_agents(small, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    assert small("--quick", "--json", str(tmp_path / "bench.json")) == 0
    content = json.loads((tmp_path / "bench.json").read_text())
    assert (content["marks"], content["missing"], content["peers"]) == ([], {}, {})
    assert "agentic" not in content
    assert "the marks" not in capsys.readouterr().out


def test_scaling_is_measured_and_drawn(small, monkeypatch, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(scaling, "SEQUENCES", (1, 2, 3))
    monkeypatch.setattr(scaling, "SEQUENCES_CONTEXT", 20)
    monkeypatch.setattr(scaling, "CONTEXTS", (8, 16, 64, 100, 4096))
    monkeypatch.setattr(scaling, "POOLS", (40, 80, 160))
    monkeypatch.setattr(scaling, "POOLS_SEQUENCES", 2)
    monkeypatch.setattr(scaling, "POOLS_CONTEXT", 60)
    file = tmp_path / "scaling.json"
    assert small("--scaling", "--quick", "--json", str(file), "--plot", str(tmp_path / "scaling.png")) == 0
    found = json.loads(file.read_text())["scaling"]
    assert [row["sequences"] for row in found["batch"]] == [1, 3]
    assert [(row["sequences"], row["context"]) for row in found["context"]] == [(1, 8), (1, 64), (8, 8), (8, 64)]
    assert [row["pool_blocks"] for row in found["pool"]] == [40, 160]
    assert all(0 < row["limit_s"] < row["step_s"] for row in [*found["batch"], *found["context"], *found["pool"]])
    assert (tmp_path / "scaling.png").stat().st_size > 5_000
    assert "memory, MB" in capsys.readouterr().out


def test_memory_is_what_the_arithmetic_says() -> None:
    shape = preset("bench-14m")
    rows = [scaling.pool_row(shape, blocks) for blocks in (256, 512)]
    assert [row["computed_bytes"] for row in rows] == [256 * 2**17, 512 * 2**17]
    assert [row["tensor_bytes"] for row in rows] == [257 * 2**17, 513 * 2**17]
    assert scaling.worst_memory_error(rows) < 0.05
    weights = scaling.weights_row(minikv.load(shape=shape))
    assert weights["computed_bytes"] == weights["tensor_bytes"] == 4 * shape.parameters
    assert scaling.worst_memory_error([{"rss_bytes": None, "tensor_bytes": 90, "computed_bytes": 100}]) == pytest.approx(0.1)


def test_a_fresh_process_says_two_tokens(tmp_path: Path) -> None:
    times = start_up.seconds_to_tokens(None)
    assert 0 < times["first_token_s"] < times["second_token_s"]


def test_start_up_is_the_median_of_warm_ones_and_one_with_nothing_kept(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    folders: list[str | None] = []
    warm = iter([99.0, 3.0, 1.0, 2.0])

    def seconds(folder: str | None) -> dict[str, float]:
        folders.append(folder)
        return dict.fromkeys(("first_token_s", "second_token_s"), 40.0 if folder else next(warm))

    monkeypatch.setattr(start_up, "seconds_to_tokens", seconds)
    found = start_up.measure(3)
    assert found["warm"]["first_token_s"] == 2.0
    assert found["empty"]["first_token_s"] == 40.0
    assert folders[:4] == [None] * 4
    assert folders[4] is not None


def test_the_pool_of_the_agents_is_that_of_the_issue() -> None:
    assert agentic.pool_blocks(agentic.WORKLOAD) == 16 + 405  # 512 shared tokens; 13.5 times 30 blocks
    assert agentic.pool_settings(agentic.WORKLOAD) == {"blocks": 421, "block_size": 32}
    assert [agentic.WORKLOAD.prompt_tokens(turn) for turn in (0, 11)] == [576, 1456]
    assert agentic.quick(agentic.WORKLOAD).turns == 4


def test_cold_turns_stand_apart() -> None:
    def turn(number: int, ttft: float) -> agentic.Answered:
        return agentic.Answered(number, 100, 0 if number == 0 else 75, 4, 10.0, ttft, 10.0 + 2 * ttft)

    runs = [[turn(0, 8.0), turn(1, 1.0)], [turn(0, 6.0), turn(1, 3.0)]]
    row = agentic.summarize("minikv", 1, runs)
    assert (row["p50_ttft_s"], row["p99_ttft_s"]) == (percentile([1.0, 3.0], 50), percentile([1.0, 3.0], 99))
    assert row["cold_p99_ttft_s"] == percentile([6.0, 8.0], 99)
    assert row["hit_rate"] == 0.75
    assert row["tokens_per_s"] == 16 / (16.0 + 12.0)


def test_an_engine_that_fails_with_the_agents_is_named_and_the_other_goes_on() -> None:
    calls: list[tuple[str, int]] = []

    def good(sessions: int) -> list[agentic.Answered]:
        calls.append(("good", sessions))
        return [agentic.Answered(turn, 10, 5, 1, 0.0, 1.0, 2.0) for turn in (0, 1)]

    def bad(sessions: int) -> list[agentic.Answered]:
        calls.append(("bad", sessions))
        if sessions > 3:
            raise PeerError("out of blocks")
        return good(sessions)

    rows, missing = agentic.measure({"minikv": good, "vllm": bad}, (3, 4, 5))
    assert [(row["sessions"], row["engine"]) for row in rows] == [(3, "minikv"), (3, "vllm"), (4, "minikv"), (5, "minikv")]
    assert missing == {"vllm, agents": "out of blocks"}
    assert ("bad", 5) not in calls


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--repeats", "0"], "repeats"),
        (["--peer-python", "vllm"], "NAME=PATH"),
        (["--peer-python", "other=python"], "NAME=PATH"),
        (["--plot", "profile.txt"], "png"),
    ],
)
def test_what_the_command_cannot_do_is_said_before_it_starts(small, words: list[str], said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RequestError, match=said):
        small(*words)
