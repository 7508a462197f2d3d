"""No step waits for the device in its middle, and no tensor of it is left on the host: shown without a GPU.

The model, the pool and the step lie on torch's ``meta`` device, which knows shapes and no numbers: an operation between it and a
tensor on the CPU fails, and so does asking it for a number. Around that, every operation is watched: one whose result the
host must look at (item, nonzero, a mask as an index, ...) is refused, on whatever device it runs. The Triton kernels themselves are not
started; what they would be handed is looked at instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import minikv
from minikv.cache.blocks import BlockTable, blocks_for
from minikv.cache.paged import Paged
from minikv.cache.step import Piece
from minikv.engine.graph import DecodeGraphs
from minikv.model.sampling import Draw, Sampling, choose
from minikv.model.weights import Model, random_weights

gpu = pytest.importorskip("minikv.cache.attention.gpu")
META = torch.device("meta")
SHAPE = minikv.ModelShape(
    layers=2, hidden=16, heads=4, kv_heads=2, head_dim=8, vocab=32, ffn=24, max_context=2048, tied=False, qk_norm=True, qkv_bias=True
)  # fmt: skip
UPLOADS = {"aten::_to_copy", "aten::copy_", "aten::lift_fresh", "aten::detach", "aten::detach_", "aten::empty", "aten::_pin_memory"}


class Watch(TorchDispatchMode):
    """Refuses operations that make the host wait, and tensors on the host (``uploads``: they may be made and sent away)."""

    def __init__(self, uploads: bool) -> None:
        super().__init__()
        self.uploads, self.operations = uploads, 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = operation._schema.name, tensors_in((args, kwargs))
        self.operations += 1
        if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
            masks = [t for t in tensors_in(args[1]) if t.dtype == torch.bool]
            assert not masks, f"{name} with a mask: how many are picked is known on the device only"
        else:
            asks = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(operation.tags)
            assert not asks, f"{name} needs numbers on the host"
        out = operation(*args, **(kwargs or {}))
        for tensor in given + tensors_in(out):
            assert tensor.device == META or (self.uploads and name in UPLOADS), f"{name} has a tensor on {tensor.device}"
        if name in ("aten::_to_copy", "aten::copy_"):
            assert tensors_in(out)[0].device == META, f"{name} back to the host"
        return out


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the kernels that would have been started; every tensor handed to one must be on the device."""
    started: list[str] = []

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            assert all(type(size) is int and size > 0 for size in grid)

            def launch(*args: Any, **kwargs: Any) -> None:
                assert {tensor.device for tensor in tensors_in((args, kwargs))} == {META}
                started.append(self.name)

            return launch

    for name in ("_store", "_prefill", "_decode", "_join"):
        monkeypatch.setattr(gpu, name, Kernel(name))
    return started


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(SHAPE, random_weights(SHAPE), torch.bfloat16, META)


@pytest.fixture
def kv(model: Model) -> Paged:
    kv = Paged(SHAPE, 200, 16, torch.bfloat16, META, "reference")
    kv.attention = gpu.attend
    return kv


def pieces(*spans: tuple[int, int]) -> list[Piece]:
    out = []
    for i, (start, count) in enumerate(spans):
        table = BlockTable(16)
        table.blocks.extend(range(blocks_for(start + count, 16)))
        out.append(Piece(i, [1] * count, start, table))
    return out


def test_the_model_and_its_attention_stay_on_the_device(model: Model, kv: Paged, launches: list[str]) -> None:
    with torch.no_grad():
        with Watch(uploads=True):
            step = kv.begin(pieces((50, 1), (0, 40), (1500, 1), (7, 3)))
        with Watch(uploads=False) as watch:
            logits = model(step.token_ids, step.positions, kv, step.logit_rows)
    assert logits.shape == (4, SHAPE.vocab)
    assert launches == ["_store", "_prefill", "_decode", "_join"] * SHAPE.layers
    assert watch.operations > 20 * SHAPE.layers


def test_a_decode_step_over_tensors_in_place_stays_on_the_device(model: Model, kv: Paged, launches: list[str]) -> None:
    graphs = DecodeGraphs(model, kv)
    with torch.no_grad(), Watch(uploads=True):
        assert graphs(pieces((50, 1), (3, 1), (1500, 1))).shape == (3, SHAPE.vocab)
        step, captured = next(iter(graphs.steps.values()))
        kv.begin(pieces((51, 1)), into=step)
    with torch.no_grad(), Watch(uploads=False) as watch:
        captured.replay()
    assert watch.operations > 20 * SHAPE.layers
    assert "_prefill" not in launches


@pytest.mark.parametrize(
    "hows",
    [
        [Sampling()] * 3,
        [Sampling(), Sampling(temperature=0.7), Sampling(temperature=1.0, top_k=5)],
        [Sampling(temperature=0.7, top_p=0.9), Sampling(temperature=1.0, top_k=5, top_p=0.5), Sampling()],
    ],
)
@pytest.mark.parametrize("rows", [(0, 1, 2), (1, 1, 0)])
def test_tokens_are_chosen_on_the_device_and_come_back_once(
    hows: list[Sampling], rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    back: list[torch.Size] = []

    def tolist(tensor: torch.Tensor) -> list[list[float]]:
        assert tensor.device == META
        back.append(tensor.shape)
        return [[0.0] * tensor.shape[1] for _ in range(tensor.shape[0])]

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    draws = [Draw(row, how, seed=1, sample=0, index=0) for row, how in zip(rows, hows, strict=True)]
    with torch.no_grad(), Watch(uploads=True):
        choose(torch.empty(3, 50, dtype=torch.bfloat16, device=META), draws)
    assert back == [(2, 3)]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x * torch.tensor(2.0),
        lambda x: x + torch.zeros(2),
        lambda x: torch.empty(2, 2).copy_(x),
    ],
)
def test_the_watch_sees_what_it_is_there_for(wrong: Any) -> None:
    with pytest.raises((AssertionError, RuntimeError)), Watch(uploads=False):
        wrong(torch.ones(2, 2, device=META))
