"""Rows of a table, against torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minikv.compiled import gather, threads


def gathered(table: torch.Tensor, numbers: torch.Tensor, team: int = 1) -> torch.Tensor:
    out = table.new_full((len(numbers) + 1, table.shape[1]), 7)
    arguments = np.zeros(gather.FIELDS, np.int64)
    arguments[[gather.ROWS, gather.TABLE_ROWS, gather.WIDTH]] = len(numbers), *table.shape
    arguments[[gather.TABLE, gather.NUMBERS, gather.OUT]] = table.data_ptr(), numbers.data_ptr(), out.data_ptr()
    threads.run(gather.kernel(table.dtype), arguments.ctypes.data, team)
    assert arguments[gather.DONE] == gather.tickets(len(numbers))
    assert (out[-1] == 7).all()
    return out[:-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("team", [1, 3])
def test_rows_by_their_numbers(count, team, dtype):
    generator = torch.Generator().manual_seed(count)
    table, numbers = torch.randn(33, 7, dtype=dtype, generator=generator), torch.randint(0, 33, (count,), generator=generator)
    assert torch.equal(gathered(table, numbers, team), table[numbers])


def test_rows_that_are_not_there_are_nan():
    table = torch.randn(33, 7)
    out = gathered(table, torch.tensor([0, 33, 32, -1, 2**62, -(2**62)]))
    assert torch.equal(out[[0, 2]], table[[0, 32]])
    assert out[[1, 3, 4, 5]].isnan().all()
