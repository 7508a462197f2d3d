"""CASES.md on the real engine: faults that broke real engines, each with its siblings. The row's number is in the name."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

import minikv
from minikv import RequestError, Sampling
from minikv.cache import prefix

PROMPT = [(5 * i * i + 2 * i + 7) % 32 for i in range(40)]
GREEDY = Sampling(max_new_tokens=8)
SEEDED = Sampling(max_new_tokens=8, temperature=1.0, seed=7)


@pytest.fixture
def make(model):
    def make(num_blocks=16, block_size=4, **options):
        return minikv.Engine(model, num_blocks=num_blocks, block_size=block_size, **{"attention": "reference", **options})

    return make


@pytest.fixture
def same(alone):
    """same(output, prompt, sampling): tokens and log-probabilities are those of the request alone."""

    def same(output, prompt, sampling=GREEDY):
        tokens, logprobs = alone(prompt, sampling)[output.sample]
        assert output.tokens == tokens
        assert output.logprobs == pytest.approx(logprobs, abs=1e-9)

    return same


def baseline(engine):
    """Nobody owns anything: every block is free or cached, and all references are zero."""
    engine.check_integrity()
    return engine.stats().free_blocks == engine.stats().total_blocks and not any(engine.pool.references)


def chunks(engine):
    """Make the engine note (request id, start, tokens) of every piece that it computes."""
    notes, execute = [], engine.runner.execute

    def noting(plan, now):
        notes.append([(piece.sequence.request.request_id, piece.start, len(piece.tokens)) for piece in plan.pieces])
        return execute(plan, now)

    engine.runner.execute = noting
    return notes


# ---------------------------------------------------------------- 7: warm against cold


@pytest.mark.parametrize("attention", ["reference", "cpu"])
def test_case_7_warm_and_cold_are_equal_in_float64(make, same, attention):
    engine = make(attention=attention)
    for cached in (0, 12, 12):
        [out] = engine.generate([PROMPT[:14]], GREEDY)
        assert out.cached_tokens == cached
        same(out, PROMPT[:14])


def test_case_7_warm_and_cold_agree_in_float32_where_the_gap_is_wide(model):
    single = minikv.load(shape=model.shape, seed=0, dtype=torch.float32)
    engine = minikv.Engine(single, num_blocks=16, block_size=4)
    cold, warm = (engine.generate([PROMPT[:14]], GREEDY)[0] for _ in range(2))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 12)
    assert warm.logprobs[0] == pytest.approx(cold.logprobs[0], abs=1e-4)
    for i, (a, b) in enumerate(zip(cold.tokens, warm.tokens, strict=True)):
        best = minikv.logits(single, PROMPT[:14] + cold.tokens[:i])[-1].topk(2).values
        if best[0] - best[1] < 1e-3:
            break  # a near-tie: from here on the texts may differ
        assert a == b


# ---------------------------------------------------------------- 10, 11: whose blocks


def test_case_10_a_newcomer_in_another_ones_place_reads_its_own_blocks(make, same, drain):
    engine = make(num_blocks=12, max_batch_requests=2)
    a, b, c = PROMPT[:3], PROMPT[10:19], PROMPT[20:25]
    engine.add("a", a, dataclasses.replace(GREEDY, max_new_tokens=2))
    engine.add("b", b, GREEDY)
    engine.add("c", c, GREEDY)
    out = drain(engine)
    same(out["a", 0], a, dataclasses.replace(GREEDY, max_new_tokens=2))
    same(out["b", 0], b)
    same(out["c", 0], c)


def test_case_10_the_order_in_the_batch_does_not_matter(make, same, drain):
    prompts = {"a": PROMPT[:3], "b": PROMPT[10:19], "c": PROMPT[20:25]}
    for order in ("abc", "cba", "bca"):
        engine = make(num_blocks=24)
        for name in order:
            engine.add(name, prompts[name], GREEDY)
        out = drain(engine)
        for name in order:
            same(out[name, 0], prompts[name])


def test_case_11_a_partly_filled_tail_is_never_shared_by_two_requests(make, same, drain):
    engine = make(num_blocks=24)
    six = PROMPT[:6]
    engine.add("a", [*six, 1], GREEDY)
    engine.step()
    engine.add("b", [*six, 2], GREEDY)
    engine.add("c", six, GREEDY)
    out = drain(engine)
    assert [out[name, 0].cached_tokens for name in "abc"] == [0, 4, 4]
    same(out["a", 0], [*six, 1])
    same(out["b", 0], [*six, 2])
    same(out["c", 0], six)


@pytest.mark.parametrize("prompt_tokens", [5, 6, 7, 8])
@pytest.mark.parametrize("n", [2, 3])
def test_case_11_forks_copy_the_shared_tail_before_they_write(make, same, prompt_tokens, n):
    engine = make(num_blocks=24)
    sampling = Sampling(max_new_tokens=8, temperature=1.5, seed=3, n=n)
    outs = engine.generate([PROMPT[:prompt_tokens]], sampling)
    assert len({tuple(out.tokens) for out in outs}) == n
    for out in outs:
        same(out, PROMPT[:prompt_tokens], sampling)
    assert [out.sample for out in outs] == list(range(n))
    assert baseline(engine)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_case_11_forks_share_blocks_and_copy_at_most_one_each(make, n):
    engine = make(num_blocks=32)
    engine.add("a", PROMPT[:14], Sampling(max_new_tokens=3, temperature=1.5, seed=3, n=n))
    engine.step()
    assert engine.stats().free_blocks == 32 - 4
    copied, copy = [], engine.runner.kv.copy_blocks
    engine.runner.kv.copy_blocks = lambda pairs: (copied.extend(pairs), copy(pairs))[1]
    engine.step()
    assert len(copied) == n - 1, "the last owner of a tail needs no copy"
    assert engine.stats().free_blocks == 32 - 4 - (n - 1)


def test_case_11_a_copy_is_not_made_again_when_its_source_has_a_new_owner(model, failing_runner, alone, drain):
    """A step fails after the copy, the other fork goes, a newcomer gets its block, and the step fails again."""
    prompt, forks = PROMPT[:6], Sampling(max_new_tokens=6, temperature=1.5, seed=3, n=2)
    runner = failing_runner(model, 6, 4, "reference")
    engine = minikv.Engine(runner=runner, max_batch_requests=3, prefix_caching=False)
    engine.add("forks", prompt, forks)
    [kept, other] = engine.step()
    sequence = engine._requests["forks"].sequences[1]
    runner.fails = ["after"]
    with pytest.raises(RuntimeError, match="lost"):
        engine.step()
    engine.scheduler.finish(sequence)  # the owner of the copied tail leaves, its block is free
    sequence.output.finish_reason = "abort"
    engine.add("newcomer", PROMPT[20:28], GREEDY)
    runner.fails = ["after"]
    with pytest.raises(RuntimeError, match="lost"):
        engine.step()
    out = drain(engine)
    assert kept.tokens == alone(prompt, forks)[0][0]
    assert kept.logprobs == pytest.approx(alone(prompt, forks)[0][1], abs=1e-9)
    assert out["newcomer", 0].tokens == alone(PROMPT[20:28], GREEDY)[0][0]
    assert other.sample == 1


# ---------------------------------------------------------------- 12, 13: full hits, false hits


@pytest.mark.parametrize("prompt_tokens", [4, 8, 12])
def test_case_12_a_full_hit_still_computes_a_token(make, same, prompt_tokens):
    engine = make()
    for cached in (0, prompt_tokens - 4, prompt_tokens - 4):
        [out] = engine.generate([PROMPT[:prompt_tokens]], GREEDY)
        assert out.cached_tokens == cached
        same(out, PROMPT[:prompt_tokens])


def test_case_12_a_full_hit_with_blocks_of_one_token(make, same):
    engine = make(num_blocks=20, block_size=1)
    for cached in (0, 7):
        [out] = engine.generate([PROMPT[:8]], GREEDY)
        assert (out.cached_tokens, out.computed_tokens) == (cached, 8 - cached + 7)
        same(out, PROMPT[:8])


@pytest.mark.parametrize("constant", [False, True])
def test_case_13_another_prompts_kv_is_never_served(model, monkeypatch, constant):
    if constant:
        monkeypatch.setattr(prefix, "block_key", lambda parent, tokens: b"same")
    wide = minikv.load(shape=dataclasses.replace(model.shape, vocab=400), seed=0, dtype=torch.float64)
    engine = minikv.Engine(wide, num_blocks=16, block_size=4)
    a, b = [65] * 4 + [1], [321] * 4 + [1]
    for prompt in (a, b, a, b):
        [out] = engine.generate([prompt], GREEDY)
        assert out.tokens == minikv.generate_without_cache(wide, prompt, 8).tokens
        engine.check_integrity()


# ---------------------------------------------------------------- 15 to 19: the prefix cache in the engine

ONE = Sampling(max_new_tokens=1)


def test_case_15_the_tail_goes_first(make):
    engine = make(num_blocks=3)
    engine.generate([PROMPT[:12]], ONE)
    engine.generate([[9, 9]], ONE)
    assert engine.generate([PROMPT[:12]], ONE)[0].cached_tokens == 8


def test_case_15_after_a_preemption_the_head_is_what_is_left(make, drain):
    """The first needs 7 of 8 blocks: what the second had to give up is evicted from its tail, and its head is found again."""
    computed = []
    for caching in (False, True):
        engine = make(num_blocks=8, prefix_caching=caching)
        engine.add("first", PROMPT[:14], Sampling(max_new_tokens=15))
        engine.add("second", PROMPT[20:34], Sampling(max_new_tokens=6))
        out = drain(engine)["second", 0]
        assert (out.preemptions, len(out.tokens)) == (1, 6)
        computed.append(out.computed_tokens)
    assert computed[1] == computed[0] - 4


def test_case_16_hits_are_not_counted_as_free_blocks_as_well(make, same, drain):
    """4 free blocks, 2 of them this prompt's hits, and 3 new ones needed: deferred, with nothing changed."""
    engine = make(num_blocks=8)
    engine.generate([PROMPT[:8]], ONE)  # two cached blocks
    engine.add("holder", PROMPT[20:34], Sampling(max_new_tokens=3))  # holds four blocks
    engine.step()
    assert (engine.stats().free_blocks, engine.stats().cached_blocks) == (4, 2)
    engine.add("later", PROMPT[:17], ONE)  # five blocks: two hits and three new ones
    before = (list(engine.pool.references), engine.pool.num_free, engine.pool.num_cached, engine.stats().hit_tokens)
    engine.step()
    engine.check_integrity()
    assert engine.stats().waiting == 1
    assert (list(engine.pool.references), engine.pool.num_free, engine.pool.num_cached, engine.stats().hit_tokens) == before
    out = drain(engine)
    assert out["later", 0].cached_tokens == 8
    same(out["later", 0], PROMPT[:17], ONE)


def test_case_16_hits_that_others_own_cost_nothing(make, drain):
    """The same, but the hits belong to a running request: then the 2 free blocks suffice for 2 new ones."""
    engine = make(num_blocks=6)
    engine.add("owner", PROMPT[:14], Sampling(max_new_tokens=3))  # four blocks
    engine.step()
    assert engine.stats().free_blocks == 2
    engine.add("sharer", [*PROMPT[:12], 1, 2, 3, 4, 5], ONE)  # five blocks: three shared, two new
    engine.step()
    assert engine.stats().waiting == 0
    assert drain(engine).keys() == {("owner", 0)}


def test_case_16_exactly_enough_is_enough(make):
    engine = make(num_blocks=5)
    engine.generate([PROMPT[:8]], ONE)
    assert engine.generate([PROMPT[:17]], ONE)[0].cached_tokens == 8


def test_case_17_the_third_time_hits_like_the_second(make, same):
    engine = make()
    for cached in (0, 12, 12, 12):
        [out] = engine.generate([PROMPT[:13]], GREEDY)
        assert out.cached_tokens == cached
        same(out, PROMPT[:13])


def test_case_17_a_hit_block_survives_others_that_need_blocks(make):
    """Least recently used: what was hit last goes last."""
    engine = make(num_blocks=4)
    a, b = PROMPT[:5], PROMPT[10:15]
    for prompt in (a, b, a):
        engine.generate([prompt], ONE)
    engine.generate([PROMPT[20:32]], ONE)  # three blocks: of the two cached ones, b's goes
    assert engine.generate([a], ONE)[0].cached_tokens == 4
    assert engine.generate([b], ONE)[0].cached_tokens == 0


def test_case_18_old_kv_is_not_used_with_new_weights(model):
    changing = minikv.load(shape=model.shape, seed=0, dtype=torch.float64)
    engine = minikv.Engine(changing, num_blocks=16, block_size=4)
    [old] = engine.generate([PROMPT[:14]], GREEDY)
    changing.layers[0].qkv.mul_(1.5)
    engine.invalidate_cache()
    assert engine.stats().cached_blocks == 0
    [new] = engine.generate([PROMPT[:14]], GREEDY)
    assert new.cached_tokens == 0
    assert new.tokens == minikv.generate_without_cache(changing, PROMPT[:14], 8).tokens
    assert new.logprobs != old.logprobs
    changing.layers[0].qkv.div_(1.5)
    engine.invalidate_cache()
    assert engine.generate([PROMPT[:14]], GREEDY)[0].cached_tokens == 0


def test_case_18_requests_that_wait_use_the_new_weights_and_find_each_other(model, drain):
    changing = minikv.load(shape=model.shape, seed=0, dtype=torch.float64)
    engine = minikv.Engine(changing, num_blocks=16, block_size=4)
    engine.generate([PROMPT[:14]], GREEDY)
    engine.add("waits", PROMPT[:14], GREEDY)
    old_space = engine._requests["waits"].namespace
    changing.layers[0].qkv.mul_(1.5)
    engine.invalidate_cache()
    assert engine._requests["waits"].namespace != old_space
    out = drain(engine)["waits", 0]
    assert out.cached_tokens == 0
    assert out.tokens == minikv.generate_without_cache(changing, PROMPT[:14], 8).tokens
    assert engine.generate([PROMPT[:14]], GREEDY)[0].cached_tokens == 12


def test_case_18_invalidation_is_refused_while_requests_run(make, same, drain):
    engine = make()
    engine.generate([PROMPT[:14]], ONE)
    engine.add("a", PROMPT[:14], GREEDY)
    engine.step()
    before = engine.stats()
    with pytest.raises(RuntimeError, match="1 sequences are running"):
        engine.invalidate_cache()
    assert engine.stats() == before
    same(drain(engine)["a", 0], PROMPT[:14])


def test_case_19_what_changes_belongs_at_the_end(make):
    twelve = PROMPT[:12]
    first, last = make(), make()
    assert [first.generate([[*clock, *twelve]], ONE)[0].cached_tokens for clock in ([1, 2], [1, 3])] == [0, 0]
    assert [last.generate([[*twelve, *clock]], ONE)[0].cached_tokens for clock in ([1, 2], [1, 3])] == [0, 12]


# ---------------------------------------------------------------- 20 to 22: too large, preempted


def test_case_20_what_can_never_fit_is_refused_at_once(make, same, drain):
    engine = make(num_blocks=16, block_size=1)
    for tokens in (15, 16):
        engine.add(tokens, PROMPT[:tokens], ONE)
    before = engine.stats()
    with pytest.raises(RequestError, match=r"17 prompt tokens and 1 new .* need 17 blocks of 1, the pool has 16"):
        engine.add(17, PROMPT[:17], ONE)
    assert engine.stats() == before
    engine.add(4, PROMPT[:4], ONE)
    out = drain(engine)
    assert {name for name, _ in out} == {15, 16, 4}
    for (name, _), output in out.items():
        same(output, PROMPT[:name], ONE)


@pytest.mark.parametrize(
    ("prompt_tokens", "new_tokens", "fits"), [(16, 1, True), (13, 4, True), (1, 16, True), (17, 1, False), (13, 5, False)]
)
def test_case_20_the_last_generated_token_needs_no_slot(make, same, prompt_tokens, new_tokens, fits):
    engine, sampling = make(num_blocks=4), Sampling(max_new_tokens=new_tokens)
    if fits:
        [out] = engine.generate([PROMPT[:prompt_tokens]], sampling)
        same(out, PROMPT[:prompt_tokens], sampling)
    else:
        with pytest.raises(RequestError, match="5 blocks of 4, the pool has 4"):
            engine.generate([PROMPT[:prompt_tokens]], sampling)
    assert baseline(engine)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("row", [(21, GREEDY), (22, SEEDED)], ids=["21 greedy", "22 seeded"])
def test_case_21_and_22_preempted_requests_get_the_same_tokens(make, same, drain, row, caching):
    _, sampling = row
    engine = make(num_blocks=5, block_size=2, prefix_caching=caching)
    prompts = {name: PROMPT[10 * name : 10 * name + 3] for name in range(3)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, sampling)
    out = drain(engine)
    assert engine.stats().preemptions > 0
    for name, prompt in prompts.items():
        same(out[name, 0], prompt, sampling)
        assert (len(out[name, 0].tokens), out[name, 0].finish_reason) == (8, "length")


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["21 greedy", "22 seeded"])
def test_case_21_and_22_preempted_after_three_tokens_twice(make, same, drain, sampling):
    engine = make(num_blocks=16)
    engine.add("a", PROMPT[:5], sampling)
    for tokens in (3, 5):
        while len(engine._requests["a"].sequences[0].output.tokens) < tokens:
            engine.step()
        engine.scheduler._preempt(engine.scheduler.running[0])
        engine.check_integrity()
    out = drain(engine)["a", 0]
    same(out, PROMPT[:5], sampling)
    assert out.preemptions == 2
    assert out.cached_tokens == 0, "recomputation is no hit of the prompt"
    assert (engine.stats().prompt_tokens, engine.stats().hit_tokens) == (5, 0)


def test_case_21_a_request_preempted_in_the_middle_of_its_prompt_starts_over(make, same, drain):
    engine = make(num_blocks=16, max_batch_tokens=3, prefix_caching=False)
    engine.add("a", PROMPT[:10], GREEDY)
    engine.step()
    engine.scheduler._preempt(engine.scheduler.running[0])
    out = drain(engine)["a", 0]
    same(out, PROMPT[:10])
    assert out.computed_tokens == 3 + 10 + 7


def test_case_21_preempted_forks_get_the_same_tokens(make, same, drain):
    engine = make(num_blocks=7, block_size=2)
    sampling = Sampling(max_new_tokens=8, temperature=1.5, seed=5, n=3)
    engine.add("a", PROMPT[:5], sampling)
    out = drain(engine)
    assert engine.stats().preemptions > 0
    for sample in range(3):
        same(out["a", sample], PROMPT[:5], sampling)


def test_case_22_a_seed_means_the_same_alone_and_in_a_batch(make, same, drain):
    engine = make(num_blocks=40)
    for name in range(4):
        engine.add(name, PROMPT[: 3 + name], SEEDED)
    out = drain(engine)
    for name in range(4):
        same(out[name, 0], PROMPT[: 3 + name], SEEDED)


def test_case_22_without_a_seed_two_requests_differ_but_preemption_changes_neither(make):
    sampling = Sampling(max_new_tokens=16, temperature=2.0)
    engine = make(num_blocks=32)
    a, b = engine.generate([PROMPT[:5]] * 2, sampling)
    assert a.tokens != b.tokens


# ---------------------------------------------------------------- 23: chunks


def test_case_23_a_chunked_prefill_advances_4_4_2(make, same, drain):
    engine = make(max_batch_tokens=4, prefix_caching=False)
    notes = chunks(engine)
    engine.add("a", PROMPT[:10], Sampling(max_new_tokens=2))
    same(drain(engine)["a", 0], PROMPT[:10], Sampling(max_new_tokens=2))
    assert notes == [[("a", 0, 4)], [("a", 4, 4)], [("a", 8, 2)], [("a", 10, 1)]]


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 9, 10, 11])
@pytest.mark.parametrize("caching", [True, False])
def test_case_23_any_budget_gives_the_same_tokens(make, same, drain, budget, caching):
    engine = make(max_batch_tokens=budget, prefix_caching=caching)
    engine.add("a", PROMPT[:10], GREEDY)
    engine.step()
    engine.add("b", [*PROMPT[:8], 3, 1, 2], SEEDED)
    out = drain(engine)
    same(out["a", 0], PROMPT[:10])
    same(out["b", 0], [*PROMPT[:8], 3, 1, 2], SEEDED)


def test_case_23_chunks_begin_behind_the_hits(make, drain):
    engine = make(max_batch_tokens=4)
    engine.generate([PROMPT[:8]], ONE)
    notes = chunks(engine)
    engine.add("a", PROMPT[:14], ONE)
    drain(engine)
    assert notes == [[("a", 8, 4)], [("a", 12, 2)]]


def test_case_23_those_who_decode_go_on_during_a_long_prefill(make, drain):
    engine = make(max_batch_tokens=4)
    engine.add("short", PROMPT[:2], GREEDY)
    engine.step()
    engine.add("long", PROMPT[10:22], ONE)
    notes = chunks(engine)
    drain(engine)
    assert notes[:4] == [[("short", 2 + i, 1), ("long", 3 * i, 3)] for i in range(4)]


# ---------------------------------------------------------------- 24, 25: ids and empty wishes


def test_case_24_a_second_request_of_the_same_id_is_refused_and_the_first_lives(make, same, drain):
    engine = make()
    engine.add("a", PROMPT[:5], GREEDY)
    for steps in (0, 1):
        for _ in range(steps):
            engine.step()
        with pytest.raises(RequestError, match="'a' is in use"):
            engine.add("a", PROMPT[:3], ONE)
    same(drain(engine)["a", 0], PROMPT[:5])
    engine.add("a", PROMPT[:3], GREEDY)  # finished: the id is free
    same(drain(engine)["a", 0], PROMPT[:3])


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_case_24_abort_and_add_again_and_the_new_one_lives(make, same, drain, steps):
    engine = make()
    engine.add("a", PROMPT[:5], GREEDY)
    for _ in range(steps):
        engine.step()
    assert engine.abort("a") is True
    engine.add("a", PROMPT[20:29], GREEDY)
    same(drain(engine)["a", 0], PROMPT[20:29])


def test_case_24_a_late_abort_finds_nobody(make, drain):
    engine = make()
    engine.add("a", PROMPT[:5], ONE)
    drain(engine)
    assert engine.abort("a") is False
    assert engine.abort("never there") is False


def test_case_24_while_one_fork_lives_the_id_is_in_use(make, drain):
    engine = make()
    sampling = Sampling(max_new_tokens=12, n=2, temperature=1.5, seed=1)
    tokens = [out.tokens for out in make().generate([PROMPT[:5]], sampling)]
    stop = next(token for token in tokens[0] if token not in tokens[1])
    engine.add("a", PROMPT[:5], dataclasses.replace(sampling, stop_tokens=(stop,)))
    while not any(output.finished for output in engine.step()):
        pass
    with pytest.raises(RequestError, match="in use"):
        engine.add("a", [1], ONE)
    drain(engine)
    engine.add("a", [1], ONE)


@pytest.mark.parametrize(
    ("prompt", "sampling", "complaint"),
    [([], GREEDY, "empty"), (PROMPT[:5], Sampling(max_new_tokens=0), "max_new_tokens .* not 0"), ([1], Sampling(n=0), "n must")],
)
def test_case_25_empty_wishes_get_an_error_and_their_neighbours_finish(make, same, drain, prompt, sampling, complaint):
    engine = make()
    engine.add("before", PROMPT[:5], GREEDY)
    engine.step()
    before = engine.stats()
    with pytest.raises(RequestError, match=complaint):
        engine.add("bad", prompt, sampling)
    assert engine.stats() == before
    engine.add("after", PROMPT[20:26], GREEDY)
    out = drain(engine)
    same(out["before", 0], PROMPT[:5])
    same(out["after", 0], PROMPT[20:26])
    engine.add("bad", [1, 2], ONE)  # the id was not used up


# ---------------------------------------------------------------- 26: abort


def test_case_26_abort_while_waiting(make, same, drain):
    engine = make(max_batch_requests=1)
    engine.add("runs", PROMPT[:5], GREEDY)
    engine.add("waits", PROMPT[:9], GREEDY)
    engine.add("next", PROMPT[20:24], GREEDY)
    engine.step()
    assert engine.abort("waits") is True
    assert engine.abort("waits") is False
    out = drain(engine)
    assert out.keys() == {("runs", 0), ("next", 0)}
    same(out["next", 0], PROMPT[20:24])
    assert baseline(engine)


def test_case_26_abort_before_the_first_step(make):
    engine = make()
    engine.add("a", PROMPT[:5], GREEDY)
    assert engine.abort("a") is True
    assert not engine.has_work
    assert engine.step() == []
    assert baseline(engine)


def test_case_26_abort_in_the_middle_of_a_chunked_prompt(make, same):
    engine = make(max_batch_tokens=5)
    engine.add("a", PROMPT[:14], GREEDY)
    engine.step()
    assert engine.abort("a") is True
    assert baseline(engine)
    [out] = engine.generate([PROMPT[:14]], GREEDY)
    assert out.cached_tokens == 4, "only what was computed can be found"
    same(out, PROMPT[:14])


@pytest.mark.parametrize("first", ["a", "b"])
def test_case_26_abort_on_a_shared_prefix_leaves_the_other_alone(make, same, drain, first):
    engine = make()
    engine.add("a", PROMPT[:13], GREEDY)
    engine.step()
    engine.add("b", [*PROMPT[:12], 3, 4], GREEDY)
    engine.step()
    assert max(Counter(engine.pool.references).keys()) == 2
    assert engine.abort(first) is True
    engine.check_integrity()
    out = drain(engine)
    other = "b" if first == "a" else "a"
    assert (other, 0) in out
    same(out[other, 0], {"a": PROMPT[:13], "b": [*PROMPT[:12], 3, 4]}[other])
    assert baseline(engine)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("requests", [2, 8])
def test_case_26_abort_of_forks(make, same, drain, steps, requests):
    engine = make(max_batch_requests=requests)
    engine.add("other", PROMPT[20:25], GREEDY)
    engine.add("forks", PROMPT[:6], Sampling(max_new_tokens=8, n=3, temperature=1.0, seed=1))
    for _ in range(steps):
        engine.step()
    assert engine.abort("forks") is True
    engine.check_integrity()
    same(drain(engine)["other", 0], PROMPT[20:25])
    assert baseline(engine)


@pytest.mark.parametrize("victim", ["itself", "its neighbour"])
def test_case_26_abort_inside_the_loop_over_a_steps_outputs(make, same, victim):
    engine = make()
    engine.add("a", PROMPT[:5], GREEDY)
    engine.add("b", PROMPT[20:26], GREEDY)
    done = {}
    aborted = False
    while engine.has_work:
        for output in engine.step():
            if output.request_id == "a" and len(output.tokens) == 3 and not aborted:
                assert engine.abort("a" if victim == "itself" else "b") is True
                aborted = True
            if output.finished:
                done[output.request_id] = output
            engine.check_integrity()
    gone, lives = ("a", "b") if victim == "itself" else ("b", "a")
    assert done[lives].finish_reason == "length"
    same(done[lives], {"a": PROMPT[:5], "b": PROMPT[20:26]}[lives])
    assert gone not in done or done[gone].finish_reason == "abort"
    assert baseline(engine)


@pytest.mark.parametrize("victim", ["a", "forks", "b"])
def test_case_26_abort_while_the_step_is_computed(make, same, drain, victim):
    """Whatever calls abort in the middle of a step (a signal, another thread): nobody else's blocks are touched."""
    wishes = {
        "a": (PROMPT[:13], GREEDY),
        "forks": (PROMPT[:6], Sampling(max_new_tokens=8, n=2, temperature=1.0, seed=1)),
        "b": (PROMPT[20:26], GREEDY),
    }
    engine = make(num_blocks=32)
    for name, (prompt, sampling) in wishes.items():
        engine.add(name, prompt, sampling)
    execute = engine.runner.execute

    def interrupted(plan, now):
        result = execute(plan, now)
        assert engine.abort(victim) is True
        engine.add(victim, PROMPT[30:38], GREEDY)  # a new owner of the id
        engine.runner.execute = execute
        return result

    engine.runner.execute = interrupted
    out = drain(engine)
    same(out[victim, 0], PROMPT[30:38])
    for name, (prompt, sampling) in wishes.items():
        if name != victim:
            same(out[name, 0], prompt, sampling)
    assert baseline(engine)


# ---------------------------------------------------------------- 27: nobody is lost


@pytest.mark.parametrize("budget", [1, 2, 7, 64])
@pytest.mark.parametrize("blocks", [5, 7, 40])
def test_case_27_every_request_ends_exactly_once(make, same, budget, blocks):
    engine = make(num_blocks=blocks, block_size=2, max_batch_tokens=budget, max_batch_requests=4)
    prompts = {name: PROMPT[name : name + 1 + name % 3] for name in range(8)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, GREEDY)
    ends = Counter()
    while engine.has_work:
        for output in engine.step():
            if output.finished:
                ends[output.request_id] += 1
                same(output, prompts[output.request_id])
        engine.check_integrity()
    assert ends == dict.fromkeys(prompts, 1)
    assert baseline(engine)


@pytest.mark.parametrize("fail", ["before", "after"])
def test_case_27_a_step_that_fails_loses_nobody(model, failing_runner, alone, drain, fail):
    runner = failing_runner(model, 6, 2, "reference")
    engine = minikv.Engine(runner=runner, max_batch_tokens=6, max_batch_requests=3)
    prompts = {name: PROMPT[name : name + 4] for name in range(4)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, GREEDY)
    ends = {}
    step = 0
    while engine.has_work:
        step += 1
        if step % 3 == 0:
            runner.fails = [fail]
            with pytest.raises(RuntimeError, match="lost"):
                engine.step()
        else:
            for output in engine.step():
                if output.finished:
                    assert output.request_id not in ends
                    ends[output.request_id] = output.tokens
        engine.check_integrity()
    assert ends == {name: alone(prompt, GREEDY)[0][0] for name, prompt in prompts.items()}
