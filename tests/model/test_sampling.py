"""Sampling against a plain oracle of the distribution; noise that depends on (seed, sample, index) and on nothing else."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import minikv
from minikv.errors import RequestError
from minikv.model.sampling import Draw, Sampling, best_of, choose, uniform

INF = math.inf


def oracle(logits: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """The distribution, token by token in plain Python: softmax, then only the top_k, then the fewest with top_p."""
    largest = max(logits)
    weights = [math.exp((x - largest) / temperature) for x in logits]
    if top_k:
        least = sorted(logits)[-min(top_k, len(logits))]
        weights = [w if x >= least else 0.0 for w, x in zip(weights, logits, strict=True)]
    p = np.array(weights) / sum(weights)
    kept, total = np.zeros_like(p), 0.0
    for token in sorted(range(len(p)), key=lambda token: (-p[token], token)):
        if total >= top_p:
            break
        kept[token] = p[token]
        total += p[token]
    return kept / kept.sum()


def sample(logits: list[float], draws: int, seed: int = 0, **how: Any) -> np.ndarray:
    """How often each token comes in ``draws`` output tokens of one request whose logits are always the same."""
    sampling = Sampling(**({"temperature": 1.0} | how))
    tokens, _ = choose(torch.tensor([logits], dtype=torch.float64), [Draw(0, sampling, seed, 0, index) for index in range(draws)])
    return np.bincount(tokens, minlength=len(logits))


LOGITS = [1.0, -0.5, 2.0, 0.3, -3.0, 1.9, 0.0, -INF, 1.1, 0.7]
WAYS = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 3.0},
    "top_k-1": {"top_k": 1},
    "top_k-3": {"top_k": 3},
    "top_k-all": {"top_k": 10},
    "top_k-more-than-the-vocabulary": {"top_k": 10_000},
    "top_p-tiny": {"top_p": 1e-9},
    "top_p-half": {"top_p": 0.5},
    "top_p-most": {"top_p": 0.95},
    "both": {"top_k": 5, "top_p": 0.8},
    "both-other": {"top_k": 2, "top_p": 0.99},
    "all-three": {"temperature": 0.7, "top_k": 6, "top_p": 0.9},
}


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_tokens_come_as_often_as_the_distribution_says(how: dict[str, Any]) -> None:
    draws = 4000
    expected = oracle(LOGITS, **how)
    counts = sample(LOGITS, draws, seed=11, **how)
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(expected)), "a token outside the support was sampled"
    likely = expected > 5e-3
    assert (counts[likely] > 0).all()
    deviation = np.abs(counts - draws * expected) / np.sqrt(draws * expected * (1 - expected) + 1e-9)
    assert deviation[likely & (expected < 1)].max(initial=0) < 4.5  # standard deviations


@settings(max_examples=300)
@given(
    logits=st.lists(st.integers(-6, 6).map(lambda x: x / 2) | st.just(-INF), min_size=1, max_size=9).filter(lambda row: max(row) > -INF),
    top_k=st.integers(0, 11),
    top_p=st.floats(0.01, 1.0),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    index=st.integers(0, 10**6),
)
def test_the_token_is_where_the_number_falls_in_the_oracles_distribution(
    logits: list[float], top_k: int, top_p: float, temperature: float, index: int
) -> None:
    """In the order of the vocabulary; near an edge, where rounding decides, the neighbour is as good."""
    expected = oracle(logits, temperature, top_k, top_p)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    token = choose(torch.tensor([logits], dtype=torch.float64), [Draw(0, sampling, 5, 0, index)])[0][0]
    sums = np.cumsum(expected)
    number = uniform(5, 0, index)
    if np.abs(np.append(sums, 0) - number).min() < 1e-9 or near_the_cut(logits, temperature, top_k, top_p):
        return
    assert token == int(np.searchsorted(sums, number, side="right"))


def near_the_cut(logits: list[float], temperature: float, top_k: int, top_p: float) -> bool:
    """Two ways to sum up may differ in the last bit, and top_p may lie between them."""
    ordered = np.sort(oracle(logits, temperature, top_k))[::-1]
    return top_p < 1 and np.abs(np.cumsum(ordered) - top_p).min() < 1e-9


def test_ties_at_the_kth_logit_are_all_kept_and_top_p_takes_the_first_of_them() -> None:
    counts = sample([1.0, 2.0, 1.0, 1.0, 0.0], 2000, top_k=2)
    assert np.flatnonzero(counts).tolist() == [0, 1, 2, 3]
    counts = sample([0.0, 0.0, 0.0, 0.0], 2000, top_p=0.5)
    assert np.flatnonzero(counts).tolist() == [0, 1]


def test_greedy_is_the_first_of_the_largest_and_the_seed_does_not_matter() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-INF, -INF, -1e30, -INF], [5.0, 5.0, 5.0, 5.0]])
    for seed in range(3):
        draws = [Draw(row, Sampling(temperature=0.0, top_k=2, top_p=0.1), seed, seed, seed) for row in range(3)]
        assert choose(logits, draws)[0] == [1, 2, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_infinite_and_huge_logits_give_no_nan(dtype: torch.dtype) -> None:
    big = 1e4
    logits = torch.tensor([[-INF, big, -big, -INF, 0.0], [0.0, -INF, -INF, -INF, -INF]], dtype=dtype)
    ways = [{"temperature": value} for value in (0.5, 1e-300, 5e-324, 1e300)] + [{"top_k": 2}, {"top_p": 0.3}, {"top_k": 4, "top_p": 0.9}]
    for how in ways:
        sampling = Sampling(**({"temperature": 0.5} | how))
        tokens, logprobs = choose(logits, [Draw(row, sampling, 3, 0, index) for row in range(2) for index in range(20)])
        assert all(math.isfinite(value) and value <= 0 for value in logprobs)
        allowed = {1, 2, 4} if how.get("temperature") == 1e300 else {1}
        assert set(tokens[:20]) <= allowed
        assert set(tokens[20:]) == {0}


def test_a_tiny_temperature_is_greedy_and_a_huge_one_is_even() -> None:
    assert np.flatnonzero(sample(LOGITS, 50, temperature=1e-310)).tolist() == [2]
    counts = sample(LOGITS, 9000, temperature=1e12)
    assert counts[7] == 0, "-inf is never sampled"
    assert np.abs(counts[np.arange(10) != 7] - 1000).max() < 150


# ---------------------------------------------------------------- noise


def test_noise_is_even_in_0_to_1_and_differs_by_seed_sample_and_index() -> None:
    numbers = np.array([uniform(seed, n, index) for seed in range(10) for n in range(10) for index in range(100)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert len(set(numbers)) == len(numbers)
    assert np.abs(np.histogram(numbers, 20, (0, 1))[0] - 500).max() < 110  # five standard deviations
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05


WRITTEN = (0.8685104080500939, 0.5871543756790254, 0.8521122107816362)


def test_noise_is_the_same_on_every_machine() -> None:
    """Values that were written down once: a seed means the same text tomorrow."""
    assert uniform(0, 0, 0) == pytest.approx(WRITTEN[0], abs=1e-15)
    assert uniform(7, 1, 2) == pytest.approx(WRITTEN[1], abs=1e-15)
    assert uniform(-1, 0, 5) == uniform(2**64 - 1, 0, 5) == pytest.approx(WRITTEN[2], abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_token_depends_on_neither_its_batch_nor_its_row(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(12, 40, generator=generator, dtype=dtype) * 2
    ways = list(WAYS.values())
    draws = [Draw(i, Sampling(**({"temperature": 1.0} | ways[i])), seed=i % 3, sample=i % 2, index=i) for i in range(12)]
    draws[5] = Draw(5, Sampling(), 0, 0, 0)  # a greedy one among them
    together = choose(rows, draws)
    for i, draw in enumerate(draws):
        alone = choose(rows[i : i + 1], [Draw(0, draw.sampling, draw.seed, draw.sample, draw.index)])
        assert alone[0][0] == together[0][i]
        assert alone[1][0] == pytest.approx(together[1][i], abs=1e-5)
    order = torch.randperm(12, generator=generator).tolist()
    shuffled = choose(rows, [draws[i] for i in order])
    assert shuffled[0] == [together[0][i] for i in order]
    moved = choose(rows[order], [Draw(place, *fields(draws[i])) for place, i in enumerate(order)])
    assert moved[0] == [together[0][i] for i in order]


def fields(draw: Draw) -> tuple[Sampling, int, int, int]:
    return draw.sampling, draw.seed, draw.sample, draw.index


def test_several_draws_from_one_row_are_different_samples_of_it() -> None:
    logits = torch.zeros(1, 1000)
    tokens, _ = choose(logits, [Draw(0, Sampling(temperature=1.0), 3, n, 0) for n in range(50)])
    assert len(set(tokens)) > 40


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_the_log_probability_is_the_models_own(how: dict[str, Any], dtype: torch.dtype) -> None:
    """Temperature 1 and nothing cut off, however the token was chosen."""
    logits = torch.tensor([LOGITS, [3 * x for x in LOGITS]], dtype=dtype)
    own = logits.double().log_softmax(-1)
    for sampling in (Sampling(**({"temperature": 1.0} | how)), Sampling(**how | {"temperature": 0.0})):
        tokens, logprobs = choose(logits, [Draw(row, sampling, 1, 0, index) for row in (0, 1, 0) for index in range(10)])
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            assert logprob == pytest.approx(own[(0, 1, 0)[place // 10], token].item(), abs=1e-5)


# ---------------------------------------------------------------- values that make no sense

SENSELESS = {
    "max_new_tokens": (0, -1, 1.0, "5", None, True, math.nan),
    "temperature": (-0.1, math.nan, INF, -INF, "1", None, True, 1j),
    "top_k": (-1, 2.0, "3", None, True),
    "top_p": (0, 0.0, -0.5, 1.01, math.nan, INF, "1", None, True),
    "n": (0, -2, 1.5, None, True, "2"),
    "seed": (1.0, "7", True, 2**64, -(2**63) - 1, math.nan),
    "stop_tokens": (("a",), (1.0,), (True,), (None,), "12", 5, None),
    "stop": (("",), ("a", ""), (5,), (b"a",), "", 5, None),
    "ignore_eos": (None, 1, "no"),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in SENSELESS.items() for value in values])
def test_a_value_that_makes_no_sense_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match="stop string" if name == "stop" else name):
        Sampling(**{name: value}).check()


@pytest.mark.parametrize(
    "how",
    [
        {}, {"temperature": 0}, {"temperature": 2}, {"top_p": 1}, {"top_p": 1e-9}, {"top_k": 10**9}, {"n": 5}, {"ignore_eos": True},
        {"seed": 0}, {"seed": -(2**63)}, {"seed": 2**64 - 1}, {"stop_tokens": [1, 2]}, {"stop_tokens": {3}}, {"stop": "one"},
        {"stop": ["a", "b"]},
    ],
    ids=str,
)  # fmt: skip
def test_values_that_make_sense_pass(how: dict[str, Any]) -> None:
    sampling = Sampling(**how)
    sampling.check()
    assert hash(sampling) == hash(Sampling(**how)), "what describes a request can be compared and kept in a set"
    assert isinstance(sampling.stop, tuple)
    assert isinstance(sampling.stop_tokens, tuple)


def test_senseless_sampling_is_refused_when_a_request_is_added_and_nothing_else_is_touched() -> None:
    shape = minikv.ModelShape(layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, vocab=20, ffn=8, max_context=32)
    engine = minikv.Engine(minikv.load(shape=shape), num_blocks=4, block_size=4)
    engine.add("good", [1, 2, 3], Sampling(max_new_tokens=2))
    for name, values in SENSELESS.items():
        for value in values:
            with pytest.raises(RequestError):
                engine.add("bad", [1], Sampling(**{name: value}))
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert engine.stats().generated_tokens == 2


def test_a_greedy_draw_does_not_see_that_its_neighbour_samples() -> None:
    """To the last bit, also where what is known of the best tokens was rounded otherwise."""
    logits = 100 * torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    best = best_of(logits)
    best = best._replace(logprobs=best.logprobs + 1e-3)
    greedy, sampled = Sampling(), Sampling(temperature=1.0)
    _, alone = choose(logits, [Draw(row, greedy, 0, 0, 0) for row in range(3)], best)
    _, beside = choose(logits, [Draw(row, sampled if row == 1 else greedy, 0, 0, 0) for row in range(3)], best)
    assert alone == best.logprobs.tolist()
    assert (beside[0], beside[2]) == (alone[0], alone[2])
    assert beside[1] < 0


def test_no_draws_are_no_tokens() -> None:
    assert choose(torch.randn(2, 5), []) == ([], [])
