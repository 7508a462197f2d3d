"""Whatever is added, aborted, preempted or lost on the way: every request gets the tokens that it would get alone."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

import minikv
from minikv.cache.blocks import blocks_for

SHARED = [(7 * i * i + 3 * i + 5) % 32 for i in range(24)]  # prompts begin with a part of it

prompts = st.one_of(
    st.integers(1, 20).map(lambda n: SHARED[:n]),
    st.tuples(st.integers(0, 20), st.lists(st.integers(0, 2), min_size=1, max_size=4)).map(lambda parts: SHARED[: parts[0]] + parts[1]),
)
samplings = st.builds(
    minikv.Sampling,
    max_new_tokens=st.integers(1, 10),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 0, 5]),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    seed=st.integers(0, 2),
    stop_tokens=st.sampled_from([(), (), (14,), (4, 16, 9)]),
)


class EngineMachine(RuleBasedStateMachine):
    model = alone = runner_class = None
    attention = "reference"
    prefix_caching = True

    @initialize(
        blocks=st.integers(3, 12), size=st.integers(1, 4), tokens=st.sampled_from([1, 2, 3, 5, 8, 16, 64]), requests=st.integers(1, 6)
    )
    def start(self, blocks, size, tokens, requests):
        self.runner = self.runner_class(self.model, blocks, size, self.attention)
        self.engine = minikv.Engine(
            runner=self.runner, max_batch_tokens=tokens, max_batch_requests=requests, prefix_caching=self.prefix_caching
        )
        self.wishes = {}  # id -> (prompt, sampling)
        self.outputs = {}  # (id, sample) -> Output
        self.streamed = {}  # (id, sample) -> tokens as they came
        self.ended = set()
        self.aborted = set()
        self.most = (min(tokens, requests), tokens)

    def alive(self):
        return [name for name in self.wishes if name not in self.aborted and not self.whole(name)]

    def whole(self, name):
        return all((name, sample) in self.ended for sample in range(self.wishes[name][1].n))

    @rule(prompt=prompts, sampling=samplings, salt=st.sampled_from([None, None, "a", "b"]))
    def add(self, prompt, sampling, salt):
        name = len(self.wishes)
        stored = len(prompt) + sampling.max_new_tokens - 1
        if blocks_for(stored, self.runner.block_size) > self.runner.num_blocks:
            before = self.engine.stats()
            with pytest.raises(minikv.RequestError, match=f"the pool has {self.runner.num_blocks}"):
                self.engine.add(name, prompt, sampling, salt)
            assert self.engine.stats() == before
            return
        self.engine.add(name, prompt, sampling, salt)
        self.wishes[name] = (prompt, sampling)
        self.outputs[name, 0] = self.engine._requests[name].sequences[0].output

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def add_twice(self, data):
        before = self.engine.stats()
        with pytest.raises(minikv.RequestError, match="in use"):
            self.engine.add(data.draw(st.sampled_from(self.alive())), [1], minikv.Sampling(max_new_tokens=1))
        assert self.engine.stats() == before

    @precondition(lambda self: self.wishes)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.wishes)))
        alive = name in self.alive()
        assert self.engine.abort(name) is alive
        assert self.engine.abort(name) is False
        if alive:
            self.aborted.add(name)

    @rule(fail=st.sampled_from(["", "", "", "", "", "before", "after"]))
    def step(self, fail):
        had_work, before = self.engine.has_work, self.engine.stats()
        if fail and had_work:
            self.runner.fails = [fail]
            with pytest.raises(RuntimeError, match="the device is lost"):
                self.engine.step()
            after = self.engine.stats()
            counters = ("computed_tokens", "generated_tokens", "steps")
            assert [after[name] for name in counters] == [before[name] for name in counters]
            return
        given = self.engine.step()
        assert self.engine.stats().steps == before.steps + had_work, "whenever there is work, something runs"
        assert len({id(output) for output in given}) == len(given)
        for output in given:
            key = (output.request_id, output.sample)
            assert key not in self.ended
            assert output.request_id not in self.aborted
            assert self.outputs.setdefault(key, output) is output
            self.streamed.setdefault(key, []).extend(output.new_tokens)
            assert self.streamed[key] == output.tokens
            if output.finished:
                self.ended.add(key)

    @rule()
    def several_steps(self):
        for _ in range(6):
            self.step("")
            self.engine.check_integrity()

    @precondition(lambda self: not self.engine.scheduler.running)
    @rule(really=st.integers(0, 3))
    def invalidate(self, really):
        if not really:
            self.engine.invalidate_cache()
            assert self.engine.stats().cached_blocks == 0

    @invariant()
    def the_books_agree(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.check_integrity()
        stats = engine.stats()
        assert stats.running <= self.most[0]
        assert stats.computed_tokens == sum(output.computed_tokens for output in self.outputs.values())
        assert stats.generated_tokens == sum(len(output.tokens) for output in self.outputs.values())
        assert stats.hit_tokens == sum(output.cached_tokens for (_, sample), output in self.outputs.items() if not sample)
        assert stats.preemptions == sum(output.preemptions for output in self.outputs.values())
        assert engine.has_work == bool(self.alive())

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.step("")
            self.the_books_agree()
        assert not self.engine.has_work, "some request never ends"
        stats = self.engine.stats()
        assert stats.free_blocks == stats.total_blocks
        for name, (prompt, sampling) in self.wishes.items():
            for sample, (tokens, logprobs) in enumerate(self.alone(prompt, sampling)):
                output = self.outputs.get((name, sample))
                if (name, sample) not in self.ended:
                    assert name in self.aborted
                    assert output is None or output.finish_reason == "abort"
                    assert output is None or output.tokens == tokens[: len(output.tokens)]
                    continue
                assert output.tokens == tokens
                assert output.logprobs == pytest.approx(logprobs, abs=1e-9)
                assert output.finish_reason == ("stop" if tokens[-1] in sampling.stop_tokens else "length")
                assert output.cached_tokens <= (len(prompt) - 1) // self.runner.block_size * self.runner.block_size
                assert self.prefix_caching or not output.cached_tokens
                assert output.token_times_s == sorted(output.token_times_s)


@pytest.mark.parametrize(
    ("attention", "prefix_caching", "examples"),
    [("reference", True, 60), ("reference", False, 25), ("cpu", True, 15)],
    ids=["reference", "reference, no prefix cache", "cpu"],
)
def test_any_history_gives_every_request_its_own_tokens(model, alone, failing_runner, attention, prefix_caching, examples):
    fields = {"model": model, "alone": staticmethod(alone), "runner_class": failing_runner}
    machine = type("Machine", (EngineMachine,), {**fields, "attention": attention, "prefix_caching": prefix_caching})
    profile = settings(
        max_examples=examples, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(machine, settings=profile)


@pytest.mark.parametrize("prompt_tokens", [1, 5, 20])
def test_alone_is_what_recomputing_everything_gives(model, alone, prompt_tokens):
    prompt = SHARED[:prompt_tokens]
    [(tokens, logprobs)] = alone(prompt, minikv.Sampling(max_new_tokens=12))
    assert tokens == minikv.generate_without_cache(model, prompt, 12).tokens
    scores = minikv.logits(model, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
    assert logprobs == pytest.approx([float(row[token]) for row, token in zip(scores, tokens, strict=True)], abs=1e-9)
