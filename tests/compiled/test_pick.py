"""The compiled argmax and logsumexp against torch's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from minikv.compiled import pick, threads
from minikv.model.sampling import Best


def best_of(logits: torch.Tensor, team: int = 1) -> Best:
    count, width = logits.shape
    best = Best(torch.full((count,), -1), logits.new_empty(count), logits.new_empty(count))
    arguments = np.zeros(pick.FIELDS, np.int64)
    arguments[[pick.ROWS, pick.WIDTH, pick.LOGITS]] = count, width, logits.data_ptr()
    arguments[[pick.TOKENS, pick.LOGPROBS, pick.SUMS]] = [tensor.data_ptr() for tensor in best]
    threads.run(pick.kernel(logits.dtype), arguments.ctypes.data, team)
    assert arguments[pick.DONE] == count
    return best


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 7), (3, 33), (5, 4096), (40, 1000)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-6), (torch.float64, 1e-13)], ids=str)
def test_picks_as_torch_does(rows, width, dtype, error):
    logits = 20 * torch.randn(rows, width, dtype=dtype, generator=torch.Generator().manual_seed(width))
    tokens, logprobs, sums = best_of(logits)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1), rtol=error, atol=error)
    torch.testing.assert_close(sums, logits.logsumexp(-1), rtol=error, atol=error)


def test_the_first_of_equals_counts_and_infinities_do_no_harm():
    logits = torch.tensor([[1.0, 3.0, 3.0], [-math.inf, -2.0, -math.inf], [1e30, -1e30, 0.0]])
    tokens, _, sums = best_of(logits)
    assert tokens.tolist() == [1, 1, 0]
    torch.testing.assert_close(sums, logits.logsumexp(-1))


def test_nan_stays_in_its_row():
    tokens, logprobs, sums = best_of(torch.tensor([[1.0, math.nan, 3.0], [1.0, 2.0, 3.0], [math.nan] * 3]))
    assert sums.isnan().tolist() == logprobs.isnan().tolist() == [True, False, True]
    assert tokens.tolist() == [2, 2, 0]  # always one that there is


def test_two_threads_share_many_rows():
    for seed in range(20):
        logits = torch.randn(50, 64, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(best_of(logits, team=3).tokens, logits.argmax(-1))
