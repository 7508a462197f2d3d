"""The compiled argmax and logsumexp against torch's."""

from __future__ import annotations

import math

import pytest
import torch

from minikv.compiled import pick


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 7), (3, 33), (5, 4096), (40, 1000)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-6), (torch.float64, 1e-13)], ids=str)
def test_picks_as_torch_does(rows, width, dtype, error):
    logits = 20 * torch.randn(rows, width, dtype=dtype, generator=torch.Generator().manual_seed(width))
    largest, tokens, sums = pick.largest_and_logsumexp(logits)
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(largest, logits.amax(-1))
    assert sums.dtype == dtype
    torch.testing.assert_close(sums, logits.logsumexp(-1), rtol=error, atol=error)


def test_the_first_of_equals_counts_and_infinities_do_no_harm():
    logits = torch.tensor([[1.0, 3.0, 3.0], [-math.inf, -2.0, -math.inf], [1e30, -1e30, 0.0]])
    _, tokens, sums = pick.largest_and_logsumexp(logits)
    assert tokens.tolist() == [1, 1, 0]
    torch.testing.assert_close(sums, logits.logsumexp(-1))


def test_numbers_that_lie_apart_are_understood():
    logits = torch.randn(9, 5, dtype=torch.float64).T
    torch.testing.assert_close(pick.largest_and_logsumexp(logits), (*logits.max(-1), logits.logsumexp(-1)))


def test_nan_stays_in_its_row():
    _, tokens, sums = pick.largest_and_logsumexp(torch.tensor([[1.0, math.nan, 3.0], [1.0, 2.0, 3.0]]))
    assert sums[0].isnan()
    assert sums[1].isfinite()
    assert tokens[1] == 2


def test_two_threads_share_many_rows(monkeypatch):
    monkeypatch.setattr(pick, "ALONE_NUMBERS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for seed in range(20):
        logits = torch.randn(50, 64, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(pick.largest_and_logsumexp(logits)[1], logits.argmax(-1))
