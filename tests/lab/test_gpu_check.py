"""The GPU check, run at a tiny size on a CPU in Triton's interpreter: the same code from end to end, and what it would notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import minikv
from minikv.cache.paged import Paged
from minikv.cli import gpu_check as command
from minikv.lab import gpu_check
from minikv.model.weights import Model, random_weights
from minikv.shape.model_shape import ModelShape, preset

pytest.importorskip("triton")
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the Triton kernels run there")


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "minikv", "gpu-check", *words], capture_output=True, text=True, timeout=300, env=os.environ | environment
    )


@ON_CPU
def test_every_section_runs_on_a_cpu_and_says_what_it_measured(tmp_path: Path) -> None:
    done = run("--device", "cpu", "--json", str(tmp_path / "x.json"), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parity: all passed" in done.stdout
    content = json.loads((tmp_path / "x.json").read_text())
    sections = content["sections"]
    assert content["parity_passed"] is True
    assert list(sections) == list(gpu_check.SECTIONS)
    assert {name: section.get("error") for name, section in sections.items()} == dict.fromkeys(sections)
    engine = sections["parity"]["rows"][-1]
    assert engine["tokens_compared"] > 3
    assert engine["hit_tokens"]
    assert engine["preemptions"]
    assert engine["recorded_sizes"]
    assert sections["memory"]["within_tolerance"]
    assert {(row["step"], row["graphs"]) for row in sections["steps"]["rows"]} == {("decode", True), ("decode", False), ("prefill", False)}
    assert not [row for row in sections["steps"]["rows"] if "error" in row]
    assert sections["serving"]["output_tokens"] > 3
    assert [row["sessions"] for row in sections["cliff"]["rows"]] == [1, 2]
    for name in sections:
        assert f"== {name} (" in done.stdout


@ON_CPU
def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert done.returncode == 1
    assert "no CUDA device" in done.stdout
    assert not done.stderr


def test_an_unknown_section_is_refused_with_the_known_ones() -> None:
    done = run("--device", "cpu", "--only", "parity,speed")
    assert done.returncode == 2
    assert "'speed'; there are machine, parity" in done.stderr


def test_it_needs_torch_and_triton_and_little_else() -> None:
    code = f"""
import sys
sys.modules.update(dict.fromkeys({("numba", "llvmlite", "rich", "matplotlib", "safetensors", "tokenizers", "jinja2", "IPython")!r}))
import minikv.lab.gpu_check, minikv.cli.gpu_check, minikv.__main__, minikv.cache.attention.gpu
print(minikv.load(shape=minikv.ModelShape(layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8, vocab=8, ffn=8)).tokenizer)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "None"), done.stderr


def test_a_section_that_fails_is_reported_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(bench: gpu_check.Bench) -> dict[str, Any]:
        raise RuntimeError("out of something\n  at line 3")

    monkeypatch.setattr(gpu_check, "SECTIONS", {"bad": fails, "good": lambda bench: {"figure": 3.0}, "late": lambda bench: {}})
    bench = gpu_check.make_bench("cpu", True, 0.0)
    bench.scale = replace(bench.scale, seconds=1e18)
    results, left = gpu_check.run(bench, ["bad", "good"], command._print)
    assert results["bad"] == {"ok": False, "error": "RuntimeError: out of something", "seconds": results["bad"]["seconds"]}
    assert results["good"]["figure"] == 3.0
    assert not left
    said = capsys.readouterr().out
    assert "FAILED: RuntimeError: out of something" in said
    assert "figure" in said
    bench.scale = replace(bench.scale, seconds=0)
    assert "left out" in gpu_check.run(bench, ["late"])[0]["late"]["error"]


def test_a_lost_device_leaves_the_rest_to_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "SECTIONS", {"one": lambda bench: {}, "two": lambda bench: {}, "three": lambda bench: {}})
    monkeypatch.setattr(gpu_check, "alive", lambda bench: False)
    bench = replace(gpu_check.make_bench("cpu", True, 0.0), scale=replace(gpu_check.TINY, seconds=1e18))
    results, left = gpu_check.run(bench, ["one", "two", "three"])
    assert (list(results), left) == (["one"], ["two", "three"])

    def another(words: list[str], check: bool) -> None:
        assert words[words.index("--only") + 1] == "two,three"
        assert words[-1] == "--quick"
        if answers:
            Path(words[words.index("--json") + 1]).write_text('{"sections": {"two": {"ok": true}, "three": {"ok": true}}}')

    monkeypatch.setattr(command.subprocess, "run", another)
    arguments = command.argparse.Namespace(device="cuda", quick=True)
    for answers in (True, False):
        assert {name: section["ok"] for name, section in command._elsewhere(arguments, left).items()} == {"two": answers, "three": answers}


@pytest.mark.parametrize("wrong", ["values", "beyond", "nothing stored", "raises"])
def test_parity_sees_a_kernel_that_is_wrong(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(paged: Paged, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if wrong == "raises":
            raise RuntimeError("does not compile")
        pool = paged.pool.clone()
        out = right(paged, layer, q, k, v)
        if wrong == "values":
            out[3] += 0.1
        elif wrong == "beyond":
            paged.pool[paged.step.block_tables[0, 0], 0, 1, :, 1] = 7
        else:
            paged.pool.copy_(pool)
        return out

    right = Paged.attend
    monkeypatch.setattr(Paged, "attend", attend)
    monkeypatch.setattr(gpu_check, "model_parity", lambda *_: {"passed": True})
    monkeypatch.setattr(gpu_check, "engine_parity", lambda *_: {"passed": True})
    result = gpu_check.parity(gpu_check.make_bench("cuda" if torch.cuda.is_available() else "cpu", True, 0.0))
    assert not result["passed"]
    assert [row["passed"] for row in result["rows"] if row["check"].startswith("kernel")] == [False] * 3


def test_parity_sees_an_engine_whose_tokens_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from minikv.engine import runner

    choose = runner.choose
    monkeypatch.setattr(
        runner, "choose", lambda logits, draws, best: ([(token + 1) % 64 for token in choose(logits, draws)[0]], [0.0] * len(draws))
    )
    assert not gpu_check.engine_parity(gpu_check.make_bench("cuda" if torch.cuda.is_available() else "cpu", True, 0.0))["passed"]


SHAPES = [
    ModelShape(
        layers=3, hidden=24, heads=6, kv_heads=2, head_dim=8, vocab=50, ffn=40, max_context=64, qk_norm=norm, qkv_bias=bias, tied=tied
    )
    for norm, bias, tied in ((False, False, True), (True, False, False), (False, True, False))
]


@pytest.mark.parametrize("shape", [*SHAPES, preset("bench-14m")], ids=["plain", "q/k norm", "bias", "bench-14m"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_and_pool_take_the_bytes_that_arithmetic_says(shape: ModelShape, dtype: torch.dtype) -> None:
    model = Model(shape, random_weights(shape), dtype)
    weights = sum(weight.nbytes for _, weight in model.named_weights())
    norms = shape.layers * (2 * shape.hidden + 2 * shape.head_dim * shape.qk_norm) + shape.hidden  # kept in float32
    assert weights == shape.parameters * dtype.itemsize + norms * (4 - dtype.itemsize)
    pool = Paged(shape, 10, 4, dtype, attention="reference")
    assert pool.pool.nbytes == 11 * 4 * shape.kv_bytes_per_token(str(dtype).removeprefix("torch."))
    assert pool.block_bytes == 4 * shape.kv_bytes_per_token(str(dtype).removeprefix("torch."))


def test_weights_drawn_on_the_device_are_a_model() -> None:
    shape = SHAPES[1]
    drawn = gpu_check.WeightsOnDevice(shape, torch.float32, torch.device("cpu"))
    assert set(drawn) == set(random_weights(shape))
    assert len(drawn) == len(random_weights(shape))
    logits = minikv.logits(Model(shape, drawn, torch.float32), [1, 2, 3])
    assert logits.std() > 0.1
