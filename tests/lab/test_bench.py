"""The benchmark's bookkeeping: what it counts, what its JSON says, and that a missing peer is named. No clock is asserted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

import minikv
from minikv.cli import bench as command
from minikv.errors import RequestError
from minikv.lab import anatomy, bench, bookkeeping
from minikv.lab.bench import BenchWorkload, Recorder, Run, Step, limit_seconds
from minikv.lab.ceilings import Ceilings, best_seconds
from minikv.lab.ceilings import measure as measure_ceilings
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
    outputs = ours.generate(prompts, 6)
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
    """Answers like minikv, except where it is told to fail."""

    def __init__(self, folder: Path) -> None:
        self.model = minikv.load(folder)

    def engines(self, batched: bool) -> dict[str, bench.Generate]:
        def right(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
            return bench.Ours(self.model).generate(prompts, new_tokens)

        def wrong(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
            raise OverflowError("too much")

        return {"right": right, "right, one by one": right, "wrong": wrong} if batched else {"right": right}


def measure(model, monkeypatch, peers):  # type: ignore[no-untyped-def]
    monkeypatch.setitem(bench.PEERS, "good", f"{__name__}:Peer")
    monkeypatch.setitem(bench.PEERS, "absent", "no_such_package_anywhere:Peer")
    monkeypatch.setitem(bench.PEERS, "broken", "minikv.lab.bench:quick")
    monkeypatch.setattr(bench, "import_module", lambda name: argparse.Namespace(Peer=Peer) if name == __name__ else __import__(name))
    workloads = [BenchWorkload(1, 4, 4, 3), BenchWorkload(5, 4, 9, 3)]
    return bench.measure(model, workloads, ROOF, peers, repeats=2)


def test_a_peer_runs_on_the_same_weights_and_prompts(model, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    rows, missing = measure(model, monkeypatch, ["good"])
    assert [(row["workload"], row["engine"]) for row in rows] == [
        ("1 request, 4 in, 3 out", "minikv"), ("1 request, 4 in, 3 out", "right"),
        ("5 requests, 4 to 9 in, 3 out", "minikv"), ("5 requests, 4 to 9 in, 3 out", "right"),
        ("5 requests, 4 to 9 in, 3 out", "right, one by one"),
    ]  # fmt: skip
    assert [row["same_tokens"] for row in rows if row["engine"] != "minikv"] == [1.0, 1.0, 1.0]
    assert rows[-1]["requests"] == bench.ONE_BY_ONE_REQUESTS
    assert all(len(row["times_s"]) == 2 for row in rows)
    assert missing == {"wrong on 5 requests, 4 to 9 in, 3 out": "OverflowError: too much"}


def test_a_peer_that_is_not_there_is_named(model, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    rows, missing = measure(model, monkeypatch, ["absent", "broken"])
    assert {row["engine"] for row in rows} == {"minikv"}
    assert "not installed" in missing["absent"]
    assert "no_such_package_anywhere" in missing["absent"]
    assert "failed to start" in missing["broken"]


def test_tokens_per_s_is_that_of_the_median_run() -> None:
    assert Run(requests=4, new_tokens=10, seconds=[9.0, 2.0, 1.0]).tokens_per_s == 20.0


def test_the_hugging_face_peer_serves_the_same_tokens(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from minikv.lab.peers.hf import HuggingFace
    from minikv.model.weights import save

    model = minikv.load(shape=SHAPE)
    save(model, tmp_path)
    peer = HuggingFace(tmp_path)
    prompts = BenchWorkload(3, 4, 9, 4).prompts(SHAPE.vocab)
    ours = bench.Ours(model).generate(prompts, 4)
    engines = peer.engines(batched=True)
    assert list(engines) == ["hf generate", "hf generate, one by one", "hf continuous batching"]
    for name in list(engines)[:2]:  # the third needs seconds to stop its thread
        assert engines[name](prompts, 4) == ours, name
    assert list(peer.engines(batched=False)) == ["hf generate"]


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


def test_the_parts_of_a_step_are_all_there(model) -> None:  # type: ignore[no-untyped-def]
    parts = anatomy.anatomy(model, prompt_tokens=20, requests=3, repeats=3)
    assert list(parts) == ["prefill, 127 tokens", "decode, 3 x 20"]
    for seconds in parts.values():
        assert tuple(seconds) == anatomy.PARTS
        assert all(seconds[part] > 0 for part in anatomy.PARTS), seconds
    row = anatomy.kernel_bandwidth(SHAPE, sequences=2, context=20, repeats=1)
    assert row["paged_gb_s"] > 0
    assert row["contiguous_gb_s"] > 0


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


def test_the_command_writes_the_fixed_words(monkeypatch, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    from minikv.lab import ceilings

    monkeypatch.setattr(ceilings, "measure", lambda shape, seconds: ROOF)
    monkeypatch.setattr(bench, "WORKLOADS", (BenchWorkload(1, 4, 4, 2), BenchWorkload(2, 4, 4, 2)))
    monkeypatch.setattr(bookkeeping, "CACHED_BLOCKS", (200, 400))
    monkeypatch.setattr(anatomy, "anatomy", lambda *_, **__: {"decode": dict.fromkeys(anatomy.PARTS, 0.001)})
    monkeypatch.setitem(bench.PEERS, "hf", "no_such_package_anywhere:Peer")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    file = tmp_path / "bench.json"
    assert command.run(parser.parse_args(["--quick", "--peer", "hf", "--json", str(file)])) == 0
    content = json.loads(file.read_text())
    assert content["ceilings"]["copy_gb_s"] == 8.0
    assert content["ceilings"]["gemm_gflop_s"] == 100.0
    assert len(content["rows"]) == 2
    for row in content["rows"]:
        assert row["engine"] == "minikv"
        assert min(row["tokens_per_s"], row["step_s"], row["of_limit"]) > 0
    printed = capsys.readouterr().out
    assert "not measured: hf: not installed" in printed
    assert "1 request, 4 in" in printed
    with pytest.raises(RequestError, match="repeats"):
        command.run(parser.parse_args(["--repeats", "0"]))
