"""What once broke the engine when it was used wrongly, each as the person who found it did it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch

import minikv
from minikv.cache.blocks import BlockTable
from minikv.cache.paged import Paged
from minikv.cache.step import Piece
from minikv.model.weights import BUNDLED, Model, random_weights

SHAPE = minikv.ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, vocab=256, ffn=128)


@pytest.fixture(scope="module")
def bundled():
    return minikv.load()


def test_weights_that_lie_otherwise_in_memory_are_the_same_weights():
    weights = random_weights(SHAPE)
    turned = {name: weight.t().contiguous().t() if weight.dim() == 2 else weight for name, weight in weights.items()}
    plain, other = (Model(SHAPE, given, torch.float64) for given in (weights, turned))
    torch.testing.assert_close(minikv.logits(plain, [1, 2, 3]), minikv.logits(other, [1, 2, 3]))
    other.layers[0].out = other.layers[0].out.t().contiguous().t()
    torch.testing.assert_close(minikv.logits(plain, [1, 2, 3]), minikv.logits(other, [1, 2, 3]))


def test_a_tokenizers_own_cutting_and_filling_up_is_switched_off(tmp_path, bundled):
    shutil.copytree(BUNDLED, tmp_path / "m", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    file = tmp_path / "m" / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None}
    content["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    file.write_text(json.dumps(content), encoding="utf-8")
    text = "The capital of France is"
    assert minikv.load(tmp_path / "m").tokenizer.encode(text) == bundled.tokenizer.encode(text)


def test_queries_that_do_not_belong_to_the_step_are_refused():
    paged, table = Paged(SHAPE, 2, 4, attention="cpu"), BlockTable(4)
    table.blocks.append(0)
    paged.begin([Piece("a", [1, 2, 3], 0, table)])
    q, kv = torch.ones(1, 4, 16), torch.ones(1, 2, 16)
    with pytest.raises(ValueError, match="do not belong"):
        paged.attend(0, q, kv, kv)
    with pytest.raises(ValueError, match="do not belong"):
        paged.attend(0, torch.ones(3, 4, 16, dtype=torch.float64), torch.ones(3, 2, 16), torch.ones(3, 2, 16))


def test_one_engine_in_many_threads_says_so_and_does_not_crash():
    code = """
        import threading, minikv
        shape = minikv.ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, vocab=256, ffn=128)
        engine, said = minikv.Engine(minikv.load(shape=shape), num_blocks=200), []
        def work():
            for _ in range(5):
                try:
                    engine.generate([[1, 2, 3], [4, 5]], minikv.Sampling(max_new_tokens=20))
                except RuntimeError as wrong:
                    said.append(str(wrong))
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert all("another thread" in text for text in said), said
        print("done")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("now", ["x", float("nan"), float("inf"), True, [1]])
def test_a_time_that_is_none_is_refused_and_harms_nobody(bundled, now):
    engine = minikv.Engine(bundled, num_blocks=20)
    with pytest.raises(minikv.RequestError, match="time in seconds"):
        engine.add("bad", [1], now=now)
    assert engine.generate([[1, 2]])[0].finished
    engine.check_integrity()


@pytest.mark.parametrize("sampling", ["x", {}, {"temperature": 1}, 5])
def test_a_sampling_of_another_type_is_refused(bundled, sampling):
    engine = minikv.Engine(bundled, num_blocks=20)
    with pytest.raises(minikv.RequestError, match=r"minikv\.Sampling"):
        engine.add("bad", [1], sampling)
    with pytest.raises(minikv.RequestError, match=r"minikv\.Sampling"):
        engine.generate([[1]], sampling)


@pytest.mark.parametrize("wrong", [{"temperature": 10**400}, {"n": 10**9}, {"max_new_tokens": 10**30}])
def test_numbers_beyond_all_sense_are_refused(bundled, wrong):
    with pytest.raises(minikv.RequestError, match=next(iter(wrong))):
        minikv.Engine(bundled, num_blocks=20).generate([[1]], minikv.Sampling(**wrong))


@pytest.mark.parametrize("prompt", ["\ud800 hi", b"abc", {1, 2}, {1: 2}, [1.5], None, ["a"], [True]])
def test_what_is_no_prompt_is_refused_by_the_engine_and_by_the_oracle(bundled, prompt):
    with pytest.raises(minikv.RequestError):
        minikv.Engine(bundled, num_blocks=20).add("bad", prompt)
    with pytest.raises(minikv.RequestError):
        minikv.logits(bundled, prompt)
    with pytest.raises(minikv.RequestError):
        minikv.generate_with_cache(bundled, prompt, 3)


def test_an_id_stays_in_use_until_its_output_has_been_handed_out(bundled):
    engine = minikv.Engine(bundled, num_blocks=50)
    engine.add("a", "The capital", minikv.Sampling(max_new_tokens=2))
    engine.generate(["The capital of France is"], minikv.Sampling(max_new_tokens=6))
    with pytest.raises(minikv.RequestError, match="in use"):
        engine.add("a", "again")
    assert engine.abort("a") is True
    assert engine.abort("a") is False
    assert not engine.has_work


def test_an_abort_gives_the_text_that_was_held_back(bundled):
    engine = minikv.Engine(bundled, num_blocks=50)
    engine.add("a", "The capital of France is", minikv.Sampling(max_new_tokens=8, stop=(" Paris which hasX",)))
    outputs = [engine.step() for _ in range(3)]
    output = outputs[0][0]
    assert output.text == ""
    engine.abort("a")
    assert output.text == bundled.tokenizer.decode(output.tokens) == " Paris which has"


def test_samples_that_find_no_place_finish_in_their_order(bundled):
    engine = minikv.Engine(bundled, num_blocks=50, max_batch_requests=2)
    engine.add("a", "The capital", minikv.Sampling(max_new_tokens=3, n=6))
    finished = []
    while engine.has_work:
        finished += [output.sample for output in engine.step() if output.finished]
        engine.check_integrity()
    assert finished == sorted(finished)


@pytest.mark.parametrize(
    "wrong", [{"num_blocks": 8.5}, {"block_size": 4.0}, {"block_size": True}, {"max_batch_tokens": "5"}, {"max_batch_requests": 2.5}]
)
def test_sizes_are_whole_numbers(bundled, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        minikv.Engine(bundled, **wrong)
