"""The compiled product of few rows equals torch's, whatever the sizes, and stays out of the way of gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minikv.compiled.product import few_rows
from minikv.model.transformer import FEW_ROWS, linear

SIZES = [(1, 1), (3, 5), (4, 16), (7, 24), (130, 40), (65, 64), (700, 96), (2048, 33), (70, 1032), (9, 1024)]


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
def test_few_rows_equals_torch(outputs, inputs, dtype, error):
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, dtype=dtype, generator=generator)
    for rows in (1, 2, 3, 4, 12, 50):
        x = torch.randn(rows, inputs, dtype=dtype, generator=generator)
        torch.testing.assert_close(few_rows(x, weight), x @ weight.T, rtol=0, atol=error)


def test_two_threads_share_a_large_matrix():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        weight = torch.randn(3001, 48, dtype=torch.float64)
        for rows in (1, 5, 12):
            x = torch.randn(rows, 48, dtype=torch.float64)
            torch.testing.assert_close(few_rows(x, weight), x @ weight.T)
    finally:
        torch.set_num_threads(before)


def test_rows_that_lie_apart_are_understood():
    wide = torch.randn(5, 64, dtype=torch.float64)
    weight = torch.randn(9, 32, dtype=torch.float64)
    torch.testing.assert_close(few_rows(wide[:, ::2], weight), wide[:, ::2] @ weight.T)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 13, 33, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_is_the_same_product_at_every_number_of_rows(rows, biased):
    x, weight = torch.randn(rows, 24, dtype=torch.float64), torch.randn(50, 24, dtype=torch.float64)
    bias = torch.randn(50, dtype=torch.float64) if biased else None
    before = x.clone()
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(x, before)


@pytest.mark.parametrize("rows", [1, 8, 20, 100])
def test_gradients_go_through_linear(rows):
    weight = torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    x = torch.randn(rows, 6, dtype=torch.float64, requires_grad=True)
    linear(x, weight).square().sum().backward()
    ours = weight.grad.clone(), x.grad.clone()
    weight.grad = x.grad = None
    F.linear(x, weight).square().sum().backward()
    torch.testing.assert_close(ours, (weight.grad, x.grad))


def test_what_is_kept_on_disk_is_named_after_all_sources(monkeypatch):
    from minikv.compiled import cfunction, product

    few_rows(torch.ones(1, 16), torch.ones(4, 16))
    assert product._work.__qualname__ == f"_work_{cfunction.SOURCES}"
    before = cfunction._sources()
    monkeypatch.setattr(cfunction.Path, "read_bytes", lambda file: b"changed")
    assert cfunction._sources() != before == cfunction.SOURCES


@pytest.mark.parametrize("inputs", [16, 64])
def test_sizes_that_do_not_fit_are_refused(inputs):
    with pytest.raises(RuntimeError):
        linear(torch.ones(4, 32), torch.ones(8, inputs))
    with pytest.raises(ValueError, match=r"\(4, 32\) .* \(8, "):
        few_rows(torch.ones(4, 32), torch.ones(8, inputs))


def test_more_dimensions_are_torchs():
    x, weight = torch.randn(2, 3, 16), torch.randn(5, 16)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
