"""The policy alone, on a runner that computes nothing: who runs when, and that nobody waits for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minikv.cache.blocks import LeastRecentlyUsed, blocks_for
from minikv.engine.engine import Engine
from minikv.model.sampling import Sampling


def add(engine, **prompts):
    """Requests of so many prompt tokens and new tokens; no two share a token."""
    for name, (prompt_tokens, new_tokens) in prompts.items():
        first = 30 * (ord(name[0]) - ord("a"))
        engine.add(name, range(first, first + prompt_tokens), Sampling(max_new_tokens=new_tokens, seed=first))


@pytest.fixture
def make(fake_runner):
    def make(num_blocks=16, block_size=4, **options):
        return Engine(runner=fake_runner(num_blocks, block_size), **options)

    return make


def test_first_come_first_served(make, drain):
    engine = make(max_batch_requests=2)
    add(engine, a=(3, 2), b=(3, 3), c=(3, 2), d=(3, 2))
    drain(engine)
    assert engine.runner.plans == [
        [("a", 0, 3), ("b", 0, 3)],
        [("a", 3, 1), ("b", 3, 1)],
        [("b", 4, 1), ("c", 0, 3)],
        [("c", 3, 1), ("d", 0, 3)],
        [("d", 3, 1)],
    ]


def test_a_small_request_does_not_overtake_a_large_one(make, drain):
    engine = make(num_blocks=5)
    add(engine, holds=(12, 4), large=(12, 1), small=(1, 1))
    drain(engine)
    firsts = [name for plan in engine.runner.plans for name, start, _ in plan if start == 0]
    assert firsts == ["holds", "large", "small"]


def test_decode_comes_first_and_prefill_gets_what_is_left(make, drain):
    engine = make(max_batch_tokens=5)
    add(engine, a=(2, 9), b=(2, 9))
    engine.step()
    add(engine, long=(9, 1))
    drain(engine)
    assert engine.runner.plans[:4] == [
        [("a", 0, 2), ("b", 0, 2)],
        [("a", 2, 1), ("b", 2, 1), ("long", 0, 3)],
        [("a", 3, 1), ("b", 3, 1), ("long", 3, 3)],
        [("a", 4, 1), ("b", 4, 1), ("long", 6, 3)],
    ]


def test_a_prompt_that_is_under_way_goes_before_a_new_one(make, drain):
    engine = make(max_batch_tokens=6)
    add(engine, a=(8, 1), b=(8, 1))
    drain(engine)
    assert engine.runner.plans == [[("a", 0, 6)], [("a", 6, 2), ("b", 0, 4)], [("b", 4, 4)]]


def test_there_are_never_more_sequences_than_tokens_in_a_step(make, drain):
    engine = make(max_batch_tokens=2, max_batch_requests=9)
    add(engine, a=(1, 4), b=(1, 4), c=(1, 4))
    drain(engine)
    assert all(len(plan) <= 2 for plan in engine.runner.plans)


def test_the_latest_admitted_is_preempted_and_comes_back_first(make, drain):
    engine = make(num_blocks=6, prefix_caching=False)
    add(engine, a=(8, 4), b=(8, 4), c=(8, 4), d=(1, 1))
    drain(engine)
    assert engine.runner.plans[0] == [("a", 0, 8), ("b", 0, 8), ("c", 0, 8)]
    assert engine.runner.plans[1] == [("a", 8, 1), ("b", 8, 1)]
    assert engine.stats().preemptions == 1
    order = [name for plan in engine.runner.plans[1:] for name, start, _ in plan if start == 0]
    assert order == ["c", "d"]


def test_who_gave_way_is_not_admitted_in_the_same_step(make):
    engine = make(num_blocks=2, block_size=4)
    add(engine, a=(4, 3), b=(4, 3))
    engine.step()
    engine.step()
    assert (engine.stats().preemptions, engine.stats().waiting, engine.stats().running) == (1, 1, 1)


@pytest.mark.parametrize(("tokens", "requests"), [(0, 4), (4, 0), (-1, 4), (4, -3)])
def test_a_step_without_room_is_refused_with_both_numbers(make, tokens, requests):
    with pytest.raises(ValueError, match=f"max_batch_tokens={tokens}, max_batch_requests={requests}"):
        make(max_batch_tokens=tokens, max_batch_requests=requests)


class OneAtATime:
    """An admission policy that was asked with ``asked`` and admits a request only when nobody runs."""

    def __init__(self):
        self.asked = []

    def admits(self, needed_blocks, available_blocks, running):
        self.asked.append((needed_blocks, available_blocks, running))
        return running == 0


def test_an_admission_policy_may_say_no(make, drain):
    policy = OneAtATime()
    engine = make(admission=policy)
    add(engine, a=(5, 2), b=(9, 2))
    drain(engine)
    assert engine.runner.plans == [[("a", 0, 5)], [("a", 5, 1)], [("b", 0, 9)], [("b", 9, 1)]]
    assert policy.asked[:3] == [(2, 16, 0), (3, 14, 1), (3, 14, 1)]


def test_an_admission_policy_cannot_admit_more_than_there_is(make, drain):
    class Careless:
        def admits(self, needed_blocks, available_blocks, running):
            return True

    engine = make(num_blocks=3, admission=Careless())
    add(engine, a=(8, 2), b=(8, 2))
    drain(engine)


def test_an_eviction_policy_chooses_what_goes(make, drain):
    class Newest(LeastRecentlyUsed):
        def choose(self):
            return self._order.popitem(last=True)[0]

    engines = [make(num_blocks=3, eviction=eviction) for eviction in (None, Newest())]
    for engine in engines:
        add(engine, a=(9, 1))
        drain(engine)
        add(engine, b=(3, 1))
        engine.step()
        add(engine, c=(5, 1))
        engine.step()
    # Least recently used: the free block, then the tail of a. The newest: the head of a, and with it the whole chain.
    assert [engine.stats().cached_blocks for engine in engines] == [2, 1]
    assert [engine.stats().evictions for engine in engines] == [1, 1]


def test_time_is_the_runners(make, drain):
    engine = make()
    add(engine, a=(3, 3))
    engine.runner.clock = 10.0
    engine.add("late", [900], Sampling(max_new_tokens=2), now=7.5)
    out = drain(engine)
    assert out["a", 0].token_times_s == [11.0, 12.0, 13.0]
    assert (out["late", 0].ttft_s, out["late", 0].token_times_s) == (3.5, [3.5, 4.5])


def test_step_can_be_told_when_it_begins(make):
    engine = make()
    engine.add("a", [1], Sampling(max_new_tokens=1), now=100.0)
    [out] = engine.step(now=250.0)
    assert out.token_times_s == [151.0]
    assert engine.next_event_at is None


def test_the_engine_needs_no_torch():
    code = """
import runpy, sys
sys.modules["torch"] = None  # importing it would be an error
source = open(sys.argv[1]).read()
namespace = {"__name__": "conftest", "hashlib": __import__("hashlib")}
from minikv.engine.runner import StepResult
from minikv.engine.engine import Engine
from minikv.model.sampling import Sampling
namespace["StepResult"] = StepResult
exec("class FakeRunner:" + source.split("class FakeRunner:")[1].split("@pytest.fixture")[0], namespace)
engine = Engine(runner=namespace["FakeRunner"]())
[out] = engine.generate([[1, 2, 3]], Sampling(max_new_tokens=4))
assert len(out.tokens) == 4
"""
    conftest = Path(__file__).parent / "conftest.py"
    result = subprocess.run([sys.executable, "-c", code, str(conftest)], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------- nothing deadlocks, nothing starves

arrivals = st.lists(
    st.tuples(
        st.integers(1, 14),  # prompt tokens
        st.integers(1, 10),  # new tokens
        st.integers(1, 4),  # samples
        st.integers(0, 3),  # steps before the next one comes
        st.integers(0, 2),  # whose prefix
    ),
    min_size=1,
    max_size=10,
)


@given(
    wishes=arrivals, blocks=st.integers(1, 9), size=st.integers(1, 4), tokens=st.integers(1, 12), requests=st.integers(1, 5),
    caching=st.booleans(), data=st.data(),
)  # fmt: skip
@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_request_ends_in_a_bounded_number_of_steps(fake_runner, wishes, blocks, size, tokens, requests, caching, data):
    runner = fake_runner(blocks, size, vocab=3)
    engine = Engine(runner=runner, max_batch_tokens=tokens, max_batch_requests=requests, prefix_caching=caching)
    ends, expected, work = [], [], 0

    def step():
        ends.extend((output.request_id, output.sample) for output in engine.step() if output.finished)
        engine.check_integrity()

    for name, (prompt_tokens, new_tokens, n, pause, whose) in enumerate(wishes):
        if blocks_for(prompt_tokens + new_tokens - 1, size) > blocks:
            continue
        engine.add(name, [whose] * prompt_tokens, Sampling(max_new_tokens=new_tokens, n=n, seed=name))
        expected += [(name, sample) for sample in range(n)]
        work += n * (prompt_tokens + new_tokens)
        for _ in range(pause):
            step()
    steps = engine.stats().steps
    while engine.has_work:
        step()
        assert engine.stats().steps - steps <= work, "even one sequence after the other, a token a step, would have ended by now"
    assert sorted(ends) == expected
    for plan in runner.plans:
        assert 1 <= sum(count for _, _, count in plan) <= tokens
        assert len(plan) <= min(requests, tokens)
    stats = engine.stats()
    assert stats.computed_tokens == sum(count for plan in runner.plans for _, _, count in plan)
    assert stats.free_blocks == stats.total_blocks


@given(wishes=arrivals, blocks=st.integers(4, 9), tokens=st.integers(1, 12), caching=st.booleans())
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_first_to_come_is_never_preempted(fake_runner, wishes, blocks, tokens, caching):
    engine = Engine(runner=fake_runner(blocks, 4, vocab=3), max_batch_tokens=tokens, prefix_caching=caching)
    engine.add("first", [0] * 5, Sampling(max_new_tokens=8, seed=0))
    for name, (prompt_tokens, new_tokens, n, _, whose) in enumerate(wishes):
        if blocks_for(prompt_tokens + new_tokens - 1, 4) <= blocks:
            engine.add(name, [whose] * prompt_tokens, Sampling(max_new_tokens=new_tokens, n=n, seed=name))
    prefill_steps = -(-5 // tokens)
    for _ in range(prefill_steps + 7):
        outputs = engine.step()
    [first] = [output for output in outputs if output.request_id == "first"]
    assert (first.finished, first.preemptions) == (True, 0)
