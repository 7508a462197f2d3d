"""The engine's public face: what one may ask, what one gets, and what one is told when it cannot be."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch

import minikv
from minikv import RequestError, Sampling
from minikv.engine.metrics import percentile

PROMPT = [(5 * i * i + 2 * i + 7) % 32 for i in range(40)]
GREEDY = Sampling(max_new_tokens=6)


@pytest.fixture
def engine(model):
    return minikv.Engine(model, num_blocks=16, block_size=4, attention="reference")


@pytest.fixture
def writes(fake_runner, byte_tokenizer):
    """writes(text) -> an engine whose model goes on with ``text``, a byte a token."""

    def make(text, **options):
        return minikv.Engine(runner=fake_runner(64, 4, vocab=300, tokenizer=byte_tokenizer, script=byte_tokenizer.encode(text), **options))

    return make


# ---------------------------------------------------------------- generate


def test_outputs_keep_the_order_of_the_prompts_whoever_ends_first(engine, alone):
    stop = Sampling(max_new_tokens=12, stop_tokens=(14, 16))
    prompts = [PROMPT[:13], PROMPT[20:21], PROMPT[5:11], PROMPT[:2]]
    outs = engine.generate(prompts, stop)
    assert [out.tokens for out in outs] == [alone(prompt, stop)[0][0] for prompt in prompts]
    assert len({len(out.tokens) for out in outs}) > 1


def test_n_samples_lie_behind_each_other(engine, alone):
    sampling = Sampling(max_new_tokens=4, n=3, temperature=1.5, seed=2)
    outs = engine.generate([PROMPT[:5], PROMPT[9:12]], sampling)
    assert [out.sample for out in outs] == [0, 1, 2, 0, 1, 2]
    assert [out.tokens for out in outs] == [tokens for prompt in (PROMPT[:5], PROMPT[9:12]) for tokens, _ in alone(prompt, sampling)]
    assert len({out.request_id for out in outs}) == 2


def test_greedy_samples_are_all_the_same(engine):
    outs = engine.generate([PROMPT[:6]], Sampling(max_new_tokens=4, n=3))
    assert outs[0].tokens == outs[1].tokens == outs[2].tokens


def test_all_prompts_are_checked_before_any_runs(engine):
    before = engine.stats()
    with pytest.raises(RequestError, match=r"prompt 2: token id 32 at place 1 is outside the vocabulary of 32"):
        engine.generate([PROMPT[:5], PROMPT[:6], [1, 32], PROMPT[:3]], GREEDY)
    assert engine.stats() == before
    assert not engine.has_work


@pytest.mark.parametrize("prompts", ["text", [1, 2, 3], np.array([1, 2, 3])])
def test_generate_takes_a_list_of_prompts(engine, prompts):
    with pytest.raises(RequestError, match=r"list of prompts|prompt 0"):
        engine.generate(prompts, GREEDY)


def test_no_prompts_are_no_outputs(engine):
    assert engine.generate([], GREEDY) == []


def test_sixteen_greedy_tokens_are_the_default(engine):
    [out] = engine.generate([PROMPT[:5]])
    assert (len(out.tokens), out.finish_reason) == (16, "length")


def test_generate_more_prompts_than_fit_at_once(model, alone):
    engine = minikv.Engine(model, num_blocks=5, block_size=4, max_batch_requests=2, attention="reference")
    outs = engine.generate([PROMPT[i : i + 5] for i in range(20)], GREEDY)
    assert [out.tokens for out in outs] == [alone(PROMPT[i : i + 5], GREEDY)[0][0] for i in range(20)]


def test_a_policy_that_refuses_everybody_is_reported_and_leaves_nobody_behind(model):
    class Closed:
        def admits(self, needed_blocks, available_blocks, running):
            return False

    engine = minikv.Engine(model, num_blocks=16, block_size=4, attention="reference", admission=Closed())
    with pytest.raises(RuntimeError, match="admission policy refuses"):
        engine.generate([PROMPT[:5]], GREEDY)
    assert not engine.has_work
    engine.check_integrity()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_interrupted_generate_leaves_no_orphan(engine, alone, steps):
    execute, calls = engine.runner.execute, []

    def interrupted(plan, now):
        calls.append(plan)
        if len(calls) == steps + 1:
            raise KeyboardInterrupt
        return execute(plan, now)

    engine.runner.execute = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.generate([PROMPT[:5], PROMPT[:9]], Sampling(max_new_tokens=6, n=2))
    assert not engine.has_work
    engine.check_integrity()
    assert engine.stats().free_blocks == 16
    assert engine.generate([PROMPT[:5]], GREEDY)[0].tokens == alone(PROMPT[:5], GREEDY)[0][0]


def test_an_interrupt_while_prompts_are_queued_leaves_no_orphan(engine, monkeypatch):
    queue, calls = engine._queue, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return queue(*args)

    monkeypatch.setattr(engine, "_queue", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([PROMPT[:5]] * 3, GREEDY)
    assert not engine.has_work


def test_what_others_get_while_generate_runs_is_handed_out_by_the_next_step(engine, alone, drain):
    long = Sampling(max_new_tokens=9)
    engine.add("short", PROMPT[:4], Sampling(max_new_tokens=2))
    engine.add("long", PROMPT[:7], long)
    [streamed] = [out.new_tokens for out in engine.step() if out.request_id == "long"]
    engine.generate([PROMPT[20:25]], GREEDY)
    assert engine.has_work
    steps = engine.stats().steps
    caught_up = {out.request_id: out for out in engine.step()}
    assert engine.stats().steps == steps
    assert caught_up.keys() == {"short", "long"}
    assert (caught_up["short"].finished, caught_up["short"].new_tokens) == (True, caught_up["short"].tokens[1:])
    streamed += caught_up["long"].new_tokens
    while engine.has_work:
        for out in engine.step():
            streamed += out.new_tokens
    assert streamed == alone(PROMPT[:7], long)[0][0]


def test_what_was_aborted_during_or_after_generate_is_not_handed_out(engine):
    engine.add("other", PROMPT[:4], Sampling(max_new_tokens=20))
    engine.generate([PROMPT[20:25]], GREEDY)
    assert engine.abort("other") is True
    assert not engine.has_work
    assert engine.step() == []


def test_the_ids_of_generate_keep_away_from_those_in_use(engine, drain):
    engine.add("generate-0", PROMPT[:4], GREEDY)
    [out] = engine.generate([PROMPT[:5]], GREEDY)
    assert out.request_id != "generate-0"
    assert ("generate-0", 0) in drain(engine)


# ---------------------------------------------------------------- how a text ends


def test_a_stop_token_ends_the_tokens_and_is_no_text(writes, byte_tokenizer):
    [stop] = byte_tokenizer.encode("c")
    [out] = writes("abcd").generate(["x"], Sampling(max_new_tokens=4, stop_tokens=(stop,)))
    assert (out.tokens, out.text, out.finish_reason) == (byte_tokenizer.encode("abc"), "ab", "stop")


def test_the_models_own_end_ends_unless_it_is_ignored(writes, byte_tokenizer):
    eos = tuple(byte_tokenizer.encode("c"))
    engine = writes("abcd", stop_tokens=eos)
    [ends] = engine.generate(["x"], Sampling(max_new_tokens=4))
    [goes_on] = engine.generate(["x"], Sampling(max_new_tokens=4, ignore_eos=True))
    assert (ends.text, ends.finish_reason) == ("ab", "stop")
    assert (goes_on.text, goes_on.finish_reason) == ("abcd", "length")


def test_stop_tokens_count_even_when_the_end_is_ignored(writes, byte_tokenizer):
    engine = writes("abcd", stop_tokens=tuple(byte_tokenizer.encode("c")))
    sampling = Sampling(max_new_tokens=4, ignore_eos=True, stop_tokens=tuple(byte_tokenizer.encode("b")))
    assert engine.generate(["x"], sampling)[0].text == "a"


@pytest.mark.parametrize(
    ("text", "stop", "given", "tokens"),
    [
        ("one two three", ("two",), "one ", 7),
        ("one two three", "two", "one ", 7),  # a single text is meant as one stop string
        ("one two three", ("three", "two"), "one ", 7),
        ("one two three", ("one",), "", 3),
        ("one two three", ("four",), "one two three", 13),
        ("one two thr", ("three",), "one two thr", 11),  # held back, and given out at the end
        ("aaab", ("aab",), "a", 4),
        ("abab abac", ("abac",), "abab ", 9),
        ("a€b", ("€",), "a", 4),  # three bytes, three tokens, one character
    ],
)
def test_a_text_ends_before_a_stop_string(writes, byte_tokenizer, text, stop, given, tokens):
    engine = writes(text)
    engine.add("a", "x", Sampling(max_new_tokens=len(byte_tokenizer.encode(text)), stop=stop))
    pieces = []
    while engine.has_work:
        for out in engine.step():
            pieces.append(out.new_text)
            assert out.text == "".join(pieces), "what was handed out is never taken back"
            assert given.startswith(out.text)
    assert (out.text, len(out.tokens)) == (given, tokens)
    assert out.finish_reason == ("length" if given == text else "stop")


def test_text_comes_out_as_soon_as_it_cannot_be_a_stop_string(writes):
    engine = writes("twist")
    engine.add("a", "x", Sampling(max_new_tokens=5, stop=("two",)))
    assert [out.new_text for _ in range(5) for out in engine.step()] == ["", "", "twi", "s", "t"]


def test_a_text_that_ends_inside_a_character_says_so(writes, byte_tokenizer):
    engine = writes("a€")
    [out] = engine.generate(["x"], Sampling(max_new_tokens=3))
    assert out.text == "a\N{REPLACEMENT CHARACTER}" == byte_tokenizer.decode(out.tokens)


def test_held_back_text_comes_out_before_a_stop_token(writes, byte_tokenizer):
    [end] = byte_tokenizer.encode("!")
    [out] = writes("so tw!").generate(["x"], Sampling(max_new_tokens=6, stop=("two",), stop_tokens=(end,)))
    assert (out.text, out.finish_reason) == ("so tw", "stop")


def test_an_empty_text_is_an_empty_prompt(writes):
    with pytest.raises(RequestError, match="empty"):
        writes("abc").add("a", "", GREEDY)


def test_every_fork_has_its_own_text(fake_runner, byte_tokenizer):
    engine = minikv.Engine(runner=fake_runner(32, 4, vocab=90, tokenizer=byte_tokenizer))
    outs = engine.generate(["hello"], Sampling(max_new_tokens=6, n=3, seed=1, temperature=1.0))
    assert [out.text for out in outs] == [byte_tokenizer.decode(out.tokens) for out in outs]
    assert len({out.text for out in outs}) == 3


def test_text_and_its_tokens_are_the_same_prompt(writes, byte_tokenizer):
    engine = writes("abcdef")
    a, b = engine.generate(["hello world", byte_tokenizer.encode("hello world")], Sampling(max_new_tokens=2))
    assert a.text == b.text
    assert engine.generate(["hello world"], Sampling(max_new_tokens=2))[0].cached_tokens == 8


def test_without_a_tokenizer_there_is_no_text(engine):
    [out] = engine.generate([PROMPT[:5]], GREEDY)
    assert (out.text, out.new_text) == (None, "")
    for prompt, sampling in (("hello", GREEDY), ([1, 2], Sampling(stop=("x",)))):
        with pytest.raises(RequestError, match="tokenizer"):
            engine.add("a", prompt, sampling)


# ---------------------------------------------------------------- what can be wrong with a request

BAD = {
    "empty": ([], {}, "empty"),
    "out of range": ([1, 2, 32], {}, "token id 32 at place 2 is outside the vocabulary of 32 .0 to 31."),
    "negative": ([1, -1], {}, "token id -1 at place 1"),
    "float": ([1.0, 2.0], {}, "whole numbers"),
    "bool": ([True, False], {}, "whole numbers"),
    "bool among numbers": ([1, True], {}, "whole numbers"),
    "strings": (["a", "b"], {}, "whole numbers"),
    "nested": ([[1, 2]], {}, "whole numbers"),
    "None": (None, {}, "whole numbers"),
    "a number": (7, {}, "whole numbers"),
    "float array": (np.array([1.0, 2.0]), {}, "whole numbers"),
    "bool tensor": (torch.tensor([True, False]), {}, "whole numbers"),
    "two-dimensional tensor": (torch.tensor([[1, 2]]), {}, "whole numbers"),
    "scalar tensor": (torch.tensor(1), {}, "whole numbers"),
    "over the pool": ([1] * 40, {"max_new_tokens": 26}, "40 prompt tokens and 26 new ones need 17 blocks of 4, the pool has 16"),
    "over the context": ([1] * 100, {"max_new_tokens": 30}, "100 prompt tokens and 30 new ones need 129 positions, .* context of 128"),
    "max_new_tokens 0": ([1], {"max_new_tokens": 0}, "max_new_tokens .* at least 1, not 0"),
    "max_new_tokens -1": ([1], {"max_new_tokens": -1}, "not -1"),
    "max_new_tokens True": ([1], {"max_new_tokens": True}, "not True"),
    "max_new_tokens 2.5": ([1], {"max_new_tokens": 2.5}, "not 2.5"),
    "temperature": ([1], {"temperature": -0.1}, "temperature .* not -0.1"),
    "temperature nan": ([1], {"temperature": float("nan")}, "temperature"),
    "temperature inf": ([1], {"temperature": float("inf")}, "temperature"),
    "temperature text": ([1], {"temperature": "hot"}, "temperature"),
    "top_p 0": ([1], {"top_p": 0.0}, "top_p .* not 0.0"),
    "top_p 1.5": ([1], {"top_p": 1.5}, "top_p"),
    "top_k": ([1], {"top_k": -1}, "top_k .* not -1"),
    "n": ([1], {"n": 0}, "n must .* not 0"),
    "seed": ([1], {"seed": 2**64}, "seed"),
    "seed text": ([1], {"seed": "x"}, "seed"),
    "stop token text": ([1], {"stop_tokens": ("a",)}, "stop_tokens"),
    "stop token list": ([1], {"stop_tokens": ([1],)}, "stop_tokens"),
    "empty stop string": ([1], {"stop": ("",)}, "stop string"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_request_is_refused_with_the_numbers_and_harms_nobody(engine, alone, drain, what):
    prompt, wish, complaint = BAD[what]
    engine.add("neighbour", PROMPT[:6], GREEDY)
    engine.step()
    before = (engine.stats(), list(engine.pool.references), set(engine._requests))
    with pytest.raises(RequestError, match=complaint):
        engine.add("bad", prompt, Sampling(**wish))
    assert (engine.stats(), list(engine.pool.references), set(engine._requests)) == before
    assert drain(engine)["neighbour", 0].tokens == alone(PROMPT[:6], GREEDY)[0][0]


@pytest.mark.parametrize("salt", [b"x", 3, ["x"]])
def test_a_salt_is_text(engine, salt):
    with pytest.raises(RequestError, match="salt"):
        engine.add("a", PROMPT[:5], GREEDY, salt=salt)
    assert not engine.has_work


@pytest.mark.parametrize("request_id", [("turn", 3), 7, frozenset([1]), None, 1.5])
def test_anything_hashable_is_an_id(engine, drain, request_id):
    engine.add(request_id, PROMPT[:5], GREEDY)
    assert drain(engine).keys() == {(request_id, 0)}


@pytest.mark.parametrize("request_id", [[1], {"a": 1}, ("turn", [3])])
def test_what_cannot_be_hashed_is_no_id(engine, request_id):
    with pytest.raises(RequestError, match="hashable"):
        engine.add(request_id, PROMPT[:5], GREEDY)
    assert engine.abort(request_id) is False
    assert not engine.has_work


@pytest.mark.parametrize("kind", [tuple, list, iter, np.array, torch.tensor, lambda p: np.array(p, np.uint8), lambda p: list(np.array(p))])
def test_a_prompt_may_be_any_sequence_of_whole_numbers(engine, alone, kind):
    [out] = engine.generate([kind(PROMPT[:7])], GREEDY)
    assert out.tokens == alone(PROMPT[:7], GREEDY)[0][0]


def test_what_the_caller_does_to_the_prompt_afterwards_does_no_harm(engine, alone, drain):
    prompts = {"list": PROMPT[:7], "array": np.array(PROMPT[:7])}
    for name, prompt in prompts.items():
        engine.add(name, prompt, GREEDY)
    prompts["list"][0] = 31
    prompts["list"].append(5)
    prompts["array"][:] = 0
    for out in drain(engine).values():
        assert out.tokens == alone(PROMPT[:7], GREEDY)[0][0]


# ---------------------------------------------------------------- what can be wrong with an engine


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_blocks": 0}, {"num_blocks": -3}, {"block_size": 0}, {"block_size": 0, "num_blocks": 4}, {"block_size": -1},
        {"max_batch_tokens": 0}, {"max_batch_requests": 0}, {"attention": "magic"}, {"tiers": ["disk"]},
    ],
    ids=str,
)  # fmt: skip
def test_an_engine_that_cannot_work_is_refused(model, sizes):
    with pytest.raises(ValueError, match=r"block|room|unknown attention 'magic'|tiers"):
        minikv.Engine(model, **sizes)


def test_an_engine_has_a_model_or_a_runner(model, fake_runner):
    for arguments in ({}, {"model": model, "runner": fake_runner()}):
        with pytest.raises(ValueError, match="exactly one"):
            minikv.Engine(**arguments)


def test_the_default_pool_holds_at_least_a_full_context(model, alone):
    engine = minikv.Engine(model, attention="reference")
    assert engine.stats().total_blocks * 16 >= model.shape.max_context
    assert engine.generate([PROMPT[:5]], GREEDY)[0].tokens == alone(PROMPT[:5], GREEDY)[0][0]


def test_a_prompt_of_the_whole_context_runs(model):
    engine = minikv.Engine(model, num_blocks=32, block_size=4, attention="reference")
    [out] = engine.generate([[1] * 128], Sampling(max_new_tokens=1))
    assert out.tokens == minikv.generate_without_cache(model, [1] * 128, 1).tokens


# ---------------------------------------------------------------- looking in


def test_counters_are_read_as_attributes_or_by_name(engine):
    engine.generate([PROMPT[:13], [*PROMPT[:12], 3, 4]], Sampling(max_new_tokens=3))
    engine.generate([PROMPT[:13]], Sampling(max_new_tokens=3))
    stats = engine.stats()
    assert dict(stats) == {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)}
    assert (stats.prompt_tokens, stats.hit_tokens, stats.generated_tokens) == (13 + 14 + 13, 12, 9)
    assert (stats.computed_tokens, stats.hit_rate) == (13 + 14 + 1 + 3 * 2, 12 / 40)
    assert (stats["total_blocks"], stats["free_blocks"], stats["running"], stats["waiting"], stats["tier_hits"]) == (16, 16, 0, 0, 0)
    with pytest.raises(KeyError, match="no counter 'speed'; there are total_blocks"):
        stats["speed"]


def test_a_new_engine_has_counted_nothing(engine):
    stats = dict(engine.stats())
    assert (stats.pop("total_blocks"), stats.pop("free_blocks")) == (16, 16)
    assert set(stats.values()) == {0}
    assert engine.stats().hit_rate == 0.0


def test_the_time_to_the_first_token_is_the_first_tokens_time(engine, drain):
    engine.add("a", PROMPT[:5], GREEDY)
    waiting = engine._requests["a"].sequences[0].output
    assert (waiting.ttft_s, waiting.finished, waiting.finish_reason) == (None, False, None)
    out = drain(engine)["a", 0]
    assert out is waiting
    assert 0 < out.ttft_s == out.token_times_s[0]
    assert out.token_times_s == sorted(out.token_times_s)
    assert len(out.token_times_s) == len(out.logprobs) == len(out.tokens) == 6


def test_salts_keep_requests_apart(engine, drain):
    for salt, cached in ((None, 0), ("a", 0), ("b", 0), ("null", 0), ("a", 12), (None, 12)):
        engine.add("x", PROMPT[:13], Sampling(max_new_tokens=1), salt=salt)
        assert drain(engine)["x", 0].cached_tokens == cached


def test_without_prefix_caching_nothing_is_found_or_kept(model):
    engine = minikv.Engine(model, num_blocks=16, block_size=4, prefix_caching=False, attention="reference")
    assert [engine.generate([PROMPT[:13]], GREEDY)[0].cached_tokens for _ in range(2)] == [0, 0]
    assert (engine.stats().cached_blocks, engine.stats().hit_tokens) == (0, 0)
    engine.invalidate_cache()


def test_generated_tokens_can_be_found_too(engine):
    [out] = engine.generate([PROMPT[:5]], Sampling(max_new_tokens=8))
    assert engine.generate([PROMPT[:5] + out.tokens], GREEDY)[0].cached_tokens == 12


def test_listeners_hear_what_can_be_found(engine):
    heard = []

    class Ear:
        def stored(self, key):
            heard.append(("stored", key))

        def removed(self, key):
            heard.append(("removed", key))

    engine.prefix.listeners.append(Ear())
    engine.add("a", PROMPT[:13], Sampling(max_new_tokens=2))
    assert heard == []
    engine.step()
    keys = engine._requests["a"].sequences[0].chain.keys[:3]
    assert heard == [("stored", key) for key in keys]
    engine.abort("a")
    assert len(heard) == 3
    heard.clear()
    engine.invalidate_cache()
    assert heard == [("removed", key) for key in keys[::-1]]


def test_a_step_without_work_does_nothing(engine):
    assert engine.step() == []
    assert engine.stats().steps == 0
    assert engine.next_event_at is None


def test_a_step_that_only_computes_a_chunk_returns_nothing(model):
    engine = minikv.Engine(model, num_blocks=16, block_size=4, max_batch_tokens=4, attention="reference")
    engine.add("a", PROMPT[:10], GREEDY)
    assert [len(engine.step()) for _ in range(4)] == [0, 0, 1, 1]


def test_a_runner_that_answers_too_little_moves_nothing(fake_runner, drain):
    runner = fake_runner(16, 4)
    engine = minikv.Engine(runner=runner)
    engine.add("a", [1, 2, 3], Sampling(max_new_tokens=3))
    execute = runner.execute
    runner.execute = lambda plan, now: dataclasses.replace(execute(plan, now), tokens=[])
    with pytest.raises(ValueError, match="zip"):
        engine.step()
    engine.check_integrity()
    runner.execute = execute
    assert len(drain(engine)["a", 0].tokens) == 3


DAMAGES = {
    "are alive and": lambda engine: engine._requests.pop("a"),
    "owners by the tables": lambda engine: engine.scheduler.running.pop(),
    "stands in two places": lambda engine: engine.scheduler.running.append(engine.scheduler.running[0]),
    "runs with nothing to do": lambda engine: engine.scheduler.running[0].tokens.pop(),
    "waits and holds": lambda engine: _move_to_waiting(engine),
    "one side only": lambda engine: engine.pool.kept.__setitem__(engine.scheduler.running[0].table.blocks[0], False),
    "more tokens than slots": lambda engine: setattr(engine.scheduler.running[0].table, "num_tokens", 99) or
                              engine.scheduler.running[0].tokens.extend([1] * 99),
}  # fmt: skip


def _move_to_waiting(engine):
    sequence = engine.scheduler.running.pop()
    engine.scheduler.waiting.append(sequence)
    sequence.state = type(sequence.state).WAITING


@pytest.mark.parametrize("complaint", DAMAGES)
def test_the_integrity_check_finds(engine, complaint):
    engine.add("a", PROMPT[:6], GREEDY)
    engine.step()
    engine.check_integrity()
    DAMAGES[complaint](engine)
    with pytest.raises(AssertionError, match=complaint):
        engine.check_integrity()


def test_the_integrity_check_finds_a_leak_when_nobody_is_there(engine):
    engine.generate([PROMPT[:6]], GREEDY)
    engine.pool.allocate()
    with pytest.raises(AssertionError, match="owners"):
        engine.check_integrity()


@pytest.mark.parametrize(("values", "percent", "expected"), [([3, 1, 2], 50, 2), ([1], 99, 1), (range(1, 101), 99, 99), ([1, 2], 100, 2)])
def test_a_percentile_is_one_of_the_values(values, percent, expected):
    assert percentile(values, percent) == expected


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1], 0), ([1], 101)])
def test_a_percentile_of_nothing_is_refused(values, percent):
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, percent)


# ---------------------------------------------------------------- threads

TWO_THREADS = """
import threading
import minikv, torch
shape = minikv.ModelShape(layers=2, hidden=16, heads=4, kv_heads=2, head_dim=6, vocab=32, ffn=24, max_context=128, tied=False)
prompts = [[(5 * i + k) % 32 for i in range(1 + 5 * k)] for k in range(6)]
sampling = minikv.Sampling(max_new_tokens=12)
model = minikv.load(shape=shape, seed=0, dtype=torch.float64)
expected = [minikv.generate_without_cache(model, prompt, 12).tokens for prompt in prompts]
right = []

def serve():
    engine = minikv.Engine(model, num_blocks=24, block_size=4)
    for _ in range(10):
        right.append([out.tokens for out in engine.generate(prompts, sampling)] == expected)
        engine.check_integrity()

threads = [threading.Thread(target=serve) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert right == [True] * 20, right
print("done")
"""


def test_two_threads_with_an_engine_each_do_not_crash_the_process():
    result = subprocess.run([sys.executable, "-c", TWO_THREADS], check=False, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr
