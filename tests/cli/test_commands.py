"""The commands as a person types them, in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import minikv
from minikv.model.weights import save


def command(*words: str, cwd=None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "minikv", *words], capture_output=True, text=True, cwd=cwd, timeout=300)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save(minikv.load(shape=minikv.ModelShape(layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, vocab=64, ffn=16)), folder)
    return folder


def test_cliff_prints_a_table_and_writes_json_and_a_figure(small_model, tmp_path):
    done = command(
        "cliff", "--model", str(small_model), "--fits", "3", "--sessions", "2,3,5", "--turns", "4",
        "--json", "cliff.json", "--plot", "cliff.png", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the cliff must be at 4" in done.stdout
    content = json.loads((tmp_path / "cliff.json").read_text())
    assert content["fits_sessions"] == 3
    hits = {entry["sessions"]: (entry["hit_rate"], entry["best_hit_rate"]) for entry in content["rows"]}
    assert hits[2][0] == hits[2][1]
    assert hits[3][0] == hits[3][1]
    assert hits[5][0] < hits[5][1]
    assert (tmp_path / "cliff.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cliff", "--fits", "0"), "at least one session"),
        (("cliff", "--sessions", "3,x"), "whole numbers"),
        (("cliff", "--sessions", "0"), "at least 1"),
        (("cliff", "--turns", "0"), "turns must be at least 1"),
        (("cliff", "--turns", "4000"), "more than the model's context"),
        (("cliff", "--think-time", "-1"), "think_time_s"),
        (("cliff", "--json", "no/such/folder/x.json"), "no folder"),
        (("cliff", "--plot", "cliff.txt"), ".png"),
        (("cliff", "--block-size", "0"), "block"),
        (("cliff", "--max-batch-tokens", "0"), "token"),
        (("cliff", "--model", "no/such/model"), "no model folder"),
        (("generate", "x", "--model", "no/such/model"), "no model folder"),
        (("generate", ""), "empty"),
        (("generate", "x", "--max-new-tokens", "0"), "max_new_tokens"),
        (("generate", "x", "--temperature", "-1"), "temperature"),
        (("generate", "x", "--device", "nowhere"), "nowhere"),
        (("simulate", "cliff", "--model", "gpt-9"), "known are llama-2-7b"),
        (("simulate", "cliff", "--hardware", "tpu"), "known are l4"),
        (("simulate", "cliff", "--kv-dtype", "fp5"), "known are"),
        (("simulate", "cliff", "--kv-gb", "1"), "less than one session"),
        (("simulate", "cliff", "--fits", "0"), "at least one session"),
        (("simulate", "cliff", "--turns", "0"), "turns must be at least 1"),
        (("simulate", "cliff", "--think-time", "-1"), "think_time_s"),
        (("simulate", "cliff", "--block-size", "0"), "block size"),
        (("simulate", "cliff", "--step-overhead", "-1"), "step_overhead_s"),
        (("simulate", "cliff", "--step-overhead", "inf"), "step_overhead_s"),
        (("simulate", "cliff", "--model", "deepseek-v3"), "latent"),
        (("simulate", "cliff", "--measured", "nothing.json"), "nothing.json"),
        (("size", "gpt-9"), "known are"),
        (("size", "qwen3-4b", "--tokens", "0"), "at least one token"),
        (("size", "qwen3-4b", "--tokens", "10", "--shared-tokens", "10"), "of its own"),
        (("size", "qwen3-4b", "--kv-dtype", "fp5"), "unknown KV dtype"),
        (("bench", "--repeats", "0"), "repeats"),
        (("bench", "--peer-python", "vllm"), "NAME=PATH"),
        (("bench", "--plot", "profile.txt"), ".png"),
        (("replay", "nothing.jsonl"), "nothing.jsonl"),
        (("replay", "nothing.jsonl", "--capacity-tokens", "511"), "one block"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(words, said, tmp_path):
    done = command(*words, cwd=tmp_path)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_generate_refuses_a_model_without_a_tokenizer(small_model):
    done = command("generate", "hello", "--model", str(small_model))
    assert done.returncode == 2
    assert "tokenizer.json" in done.stderr


def test_generate_streams_the_bundled_model_and_reports():
    done = command("generate", "The capital of France is", "--max-new-tokens", "3", "--stop", ".")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The capital of France is Paris")
    assert "cached" in done.stderr
    assert "first token after" in done.stderr


def test_a_second_prompt_finds_what_it_shares_with_the_first():
    shared = "Of all the capitals that we know of, " * 4
    done = command("generate", shared + "one", shared + "two", "--max-new-tokens", "2")
    assert done.returncode == 0, done.stderr
    first, second = (line for line in done.stderr.splitlines() if "cached" in line)
    assert " 0 of them cached" in first
    assert " 0 of them cached" not in second


def test_help_names_every_command():
    done = command("--help")
    assert done.returncode == 0
    for name in ("cliff", "generate", "bench", "simulate", "size", "replay"):
        assert name in done.stdout


def test_the_same_seed_gives_the_same_text():
    words = ("generate", "The", "--max-new-tokens", "12", "--temperature", "1.0", "--seed")
    one, two, other = command(*words, "3"), command(*words, "3"), command(*words, "4")
    assert one.stdout == two.stdout != other.stdout


def test_simulate_prints_the_published_beside_the_computed(tmp_path):
    done = command(
        "simulate", "cliff", "--sessions", "12,14", "--no-band", "--block-size", "100", "--json", "s.json", "--plot", "s.png", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "2.6 s published" in done.stdout
    assert "38.9 s published" in done.stdout
    content = json.loads((tmp_path / "s.json").read_text())
    assert content["fits_sessions"] == 13
    assert [row["sessions"] for row in content["rows"]] == [12, 14]
    assert (tmp_path / "s.png").exists()


def test_the_simulator_predicts_the_hits_of_a_measured_cliff(small_model, tmp_path):
    words = ("--fits", "3", "--sessions", "2,3,4,5", "--turns", "6", "--json", "m.json", "--plot", "m.png")
    assert command("cliff", "--model", str(small_model), *words, cwd=tmp_path).returncode == 0
    done = command("simulate", "cliff", "--measured", "m.json", "--json", "s.json", "--plot", "s.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    computed, measured = (json.loads((tmp_path / name).read_text())["rows"] for name in ("s.json", "m.json"))
    for ours, real in zip(computed, measured, strict=True):
        assert (ours["hit_rate"], ours["computed_tokens"], ours["evictions"]) == (
            real["hit_rate"],
            real["computed_tokens"],
            real["evictions"],
        )


def test_size_says_bytes_in_both_units_and_what_fits(tmp_path):
    done = command("size", "qwen3-4b", "--tokens", "22800", "--kv-dtype", "fp8", "--requests", "13", "--json", "size.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for said in ("73,728 B", "21.85 GB", "20.35 GiB", "weights in bf16"):
        assert said in done.stdout
    content = json.loads((tmp_path / "size.json").read_text())
    assert content["bytes_per_token"] == 73_728
    assert content["total_bytes"] == 13 * 22_800 * 73_728
    assert command("size", "deepseek-v3").stdout.count("68.62 KiB") == 2


def test_size_reads_any_config_json(tmp_path, small_model):
    done = command("size", str(small_model), "--tokens", "10")
    assert done.returncode == 0, done.stderr
    assert "32 B" in done.stdout  # 2 x 1 layer x 1 KV head x 8 x 2 bytes
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    assert "num_attention_heads" in command("size", str(tmp_path)).stderr


def test_replay_counts_every_block(tmp_path):
    lines = [{"timestamp": 0, "input_length": 1_000, "output_length": 1, "hash_ids": ids} for ids in ([0, 1], [0, 2], [0, 1])]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = command("replay", "t.jsonl", "--json", "r.json", "--plot", "r.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "r.json").read_text())
    assert (content["blocks"], content["block_hits"], content["hit_rate"]) == (6, 3, 0.5)
    assert (tmp_path / "r.png").exists()
