"""What a token weighs, for the models that everybody knows, and shapes that cannot be."""

from __future__ import annotations

import math
from typing import Any

import pytest

import minikv
from minikv.model.weights import random_weights
from minikv.shape.model_shape import BYTES_PER_NUMBER, PRESETS, ModelShape, preset

# layers, hidden, heads, KV heads, head_dim, vocab, ffn, KiB per token in bf16
PUBLISHED = {
    "Llama-2-7B": (32, 4096, 32, 32, 128, 32_000, 11_008, 512),
    "Llama-3.1-8B": (32, 4096, 32, 8, 128, 128_256, 14_336, 128),
    "Llama-3.1-70B": (80, 8192, 64, 8, 128, 128_256, 28_672, 320),
    "Qwen2.5-72B": (80, 8192, 64, 8, 128, 152_064, 29_568, 320),
    "Qwen3-0.6B": (28, 1024, 16, 8, 128, 151_936, 3072, 112),
    "Qwen3-4B": (36, 2560, 32, 8, 128, 151_936, 9728, 144),
    "Qwen3-8B": (36, 4096, 32, 8, 128, 151_936, 12_288, 144),
    "Mistral-7B": (32, 4096, 32, 8, 128, 32_000, 14_336, 128),
    "SmolLM2-135M": (30, 576, 9, 3, 64, 49_152, 1536, 22.5),
    "GPT-2": (12, 768, 12, 12, 64, 50_257, 3072, 36),
    "DeepSeek-V3": (61, 7168, 128, None, None, 129_280, 18_432, 68.6),
}
SMALL: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 6, "vocab": 30, "ffn": 20}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_known_model_has_its_published_sizes_and_weight_per_token(name: str) -> None:
    layers, hidden, heads, kv_heads, head_dim, vocab, ffn, kib = PUBLISHED[name]
    shape = preset(name)
    assert (shape.layers, shape.hidden, shape.heads, shape.vocab, shape.ffn) == (layers, hidden, heads, vocab, ffn)
    if kv_heads is not None:
        assert (shape.kv_heads, shape.head_dim) == (kv_heads, head_dim)
    within = 0.05 if name == "DeepSeek-V3" else 0  # 68.6 is rounded: 61 x 576 x 2 bytes = 68.625 KiB
    assert abs(shape.kv_bytes_per_token() / 1024 - kib) <= within


def test_every_preset_is_published_or_the_one_for_benchmarks() -> None:
    assert set(PRESETS) == {name.lower() for name in PUBLISHED} | {"bench-14m"}
    assert PRESETS["bench-14m"].parameters == pytest.approx(14.2e6, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.74), ("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.6), ("mistral-7b", 7.25), ("smollm2-135m", 0.1345),
        ("qwen2.5-72b", 72.7), ("qwen3-0.6b", 0.596), ("qwen3-4b", 4.02), ("qwen3-8b", 8.19),
    ],
)  # fmt: skip
def test_parameters_add_up_to_what_the_model_cards_say(name: str, billions: float) -> None:
    assert preset(name).parameters / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize("more", [{}, {"tied": False}, {"qkv_bias": True}, {"qk_norm": True}], ids=str)
def test_parameters_are_those_of_the_tensors(more: dict[str, Any]) -> None:
    shape = ModelShape(**SMALL, **more)
    assert shape.parameters == sum(weight.numel() for weight in random_weights(shape).values())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "latent", "attention", "numbers", "group"),
    [
        (8, 8, None, "MHA", 2 * 2 * 8 * 6, 1),
        (8, 2, None, "GQA", 2 * 2 * 2 * 6, 4),
        (8, 1, None, "MQA", 2 * 2 * 6, 8),
        (8, 8, 10, "MLA", 2 * 10, 1),
    ],
)
def test_the_four_designs_differ_in_one_product(
    heads: int, kv_heads: int, latent: int | None, attention: str, numbers: int, group: int
) -> None:
    shape = ModelShape(**SMALL | {"heads": heads, "kv_heads": kv_heads}, mla_latent=latent)
    assert (shape.attention, shape.kv_numbers_per_token, shape.group) == (attention, numbers, group)
    for dtype, size in BYTES_PER_NUMBER.items():
        assert shape.kv_bytes_per_token(dtype) == math.ceil(numbers * size)


def test_neither_hidden_size_nor_query_heads_weigh_in_the_cache() -> None:
    shape = ModelShape(**SMALL)
    for change in ({"hidden": 999}, {"heads": 40}, {"vocab": 9}, {"ffn": 9}, {"max_context": 9}, {"tied": False}):
        assert ModelShape(**SMALL | change).kv_bytes_per_token() == shape.kv_bytes_per_token()


@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, "4", None, True, 2**40], ids=str)
@pytest.mark.parametrize("field", ["layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "ffn", "max_context"])
def test_an_impossible_size_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"small: {field} must be a whole number") as caught:
        ModelShape(**SMALL | {"name": "small", field: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field in ("rope_theta", "norm_eps") for value in (0, -1.0, float("nan"), float("inf"), "1", None, True)]
    + [(field, value) for field in ("qk_norm", "qkv_bias", "tied") for value in (None, 1, "yes")]
    + [("mla_latent", value) for value in (0, -5, 1.5, "8")],
    ids=str,
)
def test_any_other_impossible_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        ModelShape(**SMALL | {field: value})


def test_heads_that_cannot_be_shared_out_and_an_odd_head_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"4 query heads.*3 KV heads.*multiple"):
        ModelShape(**SMALL | {"kv_heads": 3})
    with pytest.raises(ValueError, match="4 query heads"):
        ModelShape(**SMALL | {"kv_heads": 8})
    with pytest.raises(ValueError, match="head_dim is 5"):
        ModelShape(**SMALL | {"head_dim": 5})


def test_unknown_names_are_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'gpt-9'.*llama-2-7b.*qwen3-4b"):
        preset("gpt-9")
    with pytest.raises(ValueError, match=r"unknown KV dtype 'int3'.*bf16.*fp8"):
        preset("gpt-2").kv_bytes_per_token("int3")
    with pytest.raises(ValueError, match="deepseek-v3"):
        _ = preset("deepseek-v3").parameters


def test_a_shape_is_a_value() -> None:
    assert ModelShape(**SMALL) == ModelShape(**SMALL)
    assert len({ModelShape(**SMALL), ModelShape(**SMALL), ModelShape(**SMALL | {"layers": 3})}) == 2
    with pytest.raises(AttributeError):
        ModelShape(**SMALL).layers = 3  # type: ignore[misc]
    assert minikv.ModelShape is ModelShape
