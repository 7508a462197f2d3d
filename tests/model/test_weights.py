"""What cannot be loaded is refused by name, with a ModelError and nothing else; random weights are the same for the same seed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import minikv
from minikv.errors import ModelError
from minikv.model.weights import Model, default_dtype, random_weights, save

SHAPE = minikv.ModelShape(layers=2, hidden=16, heads=4, kv_heads=2, head_dim=6, vocab=30, ffn=20, max_context=32, tied=False)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good Llama folder; nobody writes to it."""
    path = tmp_path_factory.mktemp("models") / "good"
    save(minikv.load(shape=SHAPE), path)
    return path


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A good Llama folder to be spoiled."""
    return shutil.copytree(saved, tmp_path / "model")


def edit(folder: Path, **changes: Any) -> Path:
    """Change keys of config.json; None stays a null, a lone ``...`` takes the key out."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return folder


def refused(folder: Path, *words: str, **how: Any) -> None:
    """Loading raises a ModelError that has all of ``words`` in it."""
    with pytest.raises(ModelError) as caught:
        minikv.load(folder, **how)
    for word in words:
        assert word in str(caught.value), f"{word!r} is missing in: {caught.value}"


def works(folder: Path) -> Model:
    model = minikv.load(folder)
    assert minikv.logits(model, [1, 2, 3]).isfinite().all()
    return model


def as_family(folder: Path, family: str, **changes: Any) -> Path:
    """The same sizes as another family, with the tensors that it needs."""
    shape = minikv.ModelShape(**{**SHAPE.__dict__, "qkv_bias": family == "qwen2", "qk_norm": family == "qwen3"})
    save(Model(shape, random_weights(shape), torch.float32), folder)
    return edit(folder, model_type=family, **changes)


def test_a_good_folder_loads(folder: Path) -> None:
    assert torch.equal(minikv.logits(works(folder), [1, 2, 3]), minikv.logits(minikv.load(shape=SHAPE), [1, 2, 3]))
    assert works(folder).shape.name == "model"
    works(edit(folder, tie_word_embeddings=True))  # the head is there a second time, and superfluous
    works(edit(folder, rope_parameters={"rope_type": "default", "rope_theta": 500.0}, rope_theta=...))


# ---------------------------------------------------------------- asked for and not done


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ("rope scaling", "rope_scaling", "linear")),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ("rope scaling", "rope_scaling", "llama3")),
        ({"rope_scaling": {"rope_type": "default", "type": "yarn"}}, ("rope scaling", "yarn")),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, ("rope scaling", "factor")),
        ({"rope_scaling": "linear"}, ("rope scaling", "linear")),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, ("rope scaling", "rope_parameters", "yarn")),
        ({"rope_parameters": {"type": "dynamic"}}, ("rope scaling", "rope_parameters", "dynamic")),
        ({"rope_parameters": {"rope_type": None}}, ("rope scaling", "rope_parameters")),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ("rope scaling", "full_attention")),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ("rope scaling", "partial_rotary_factor")),
        ({"rope_parameters": [1]}, ("rope scaling", "rope_parameters")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
        ({"sliding_window": 4096}, ("sliding window", "4096")),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ("full attention", "sliding_attention")),
        ({"layer_types": "chunked_attention"}, ("full attention", "chunked_attention")),
        ({"layer_types": [["full_attention"], 5]}, ("full attention", "5")),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu")),
        ({"attention_bias": True}, ("attention_bias",)),
        ({"mlp_bias": True}, ("mlp_bias",)),
        ({"pretraining_tp": 2}, ("pretraining_tp", "2")),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ("quantization_config", "gptq")),
        ({"num_local_experts": 8}, ("num_local_experts", "8")),
        ({"final_logit_softcapping": 30.0}, ("final_logit_softcapping",)),
        ({"vision_config": {"depth": 1}}, ("vision_config",)),
    ],
    ids=str,
)
def test_what_minikv_does_not_compute_is_refused_by_name(folder: Path, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(edit(folder, **changes), *words)


@pytest.mark.parametrize(
    ("family", "changes", "window"),
    [
        ("mistral", {"sliding_window": 4096}, True),
        ("mistral", {"sliding_window": 4096, "use_sliding_window": False}, True),  # a switch that Mistral does not have
        ("mistral", {"sliding_window": 4096, "use_sliding_window": None}, True),
        ("mistral", {"sliding_window": None}, False),
        ("mistral", {"sliding_window": ...}, False),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": True}, True),
        ("qwen2", {"sliding_window": None, "use_sliding_window": True}, True),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 1}, False),
        ("qwen2", {"sliding_window": 4096}, False),
        ("qwen3", {"sliding_window": 4096, "use_sliding_window": True}, True),
        ("qwen3", {"sliding_window": 4096, "use_sliding_window": False}, False),
        ("llama", {"sliding_window": 4096}, True),
    ],
    ids=str,
)
def test_a_sliding_window_is_refused_where_it_is_switched_on(folder: Path, family: str, changes: dict[str, Any], window: bool) -> None:
    as_family(folder, family, **changes)
    if window:
        refused(folder, "sliding window")
    else:
        works(folder)


@pytest.mark.parametrize("family", ["gpt2", "qwen2_moe", "LLAMA", "", None, 5, ["llama"], {"llama": 1}, ...], ids=str)
def test_an_architecture_that_is_not_ours_is_refused_with_those_that_are(folder: Path, family: Any) -> None:
    refused(edit(folder, model_type=family), "model_type", "llama, mistral, qwen2, qwen3", "None" if family is ... else repr(family))


def test_keys_that_change_nothing_or_are_empty_are_no_obstacle(folder: Path) -> None:
    works(edit(folder, use_cache=False, torch_dtype="bfloat16", transformers_version="9", attention_dropout=0.1, id2label={"0": "a"}))
    works(edit(folder, something_new=None, quantization_config={}, num_experts=0, rope_scaling=None, layer_types=["full_attention"] * 2))


# ---------------------------------------------------------------- impossible sizes

SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
NEEDED = tuple(key for key in SIZES if key not in ("num_key_value_heads", "head_dim"))


@pytest.mark.parametrize("key", NEEDED)
def test_a_missing_size_is_named(folder: Path, key: str) -> None:
    refused(edit(folder, **{key: ...}), "config.json has no", key)


@pytest.mark.parametrize("value", [0, -4, 1.5, "4", True, [4], {}, 10**12, 10**30, 10**400], ids=lambda value: str(value)[:9])
@pytest.mark.parametrize("key", SIZES)
def test_an_impossible_size_is_refused(folder: Path, key: str, value: Any) -> None:
    refused(edit(folder, **{key: value}), str(folder))


@pytest.mark.parametrize(
    ("key", "value"),
    [("rms_norm_eps", value) for value in (None, -1e-6, 0, "small", float("nan"), float("inf"), [1], True, 10**400)]
    + [("rope_theta", value) for value in (0, -10.0, "10000", float("nan"), float("inf"), [1], True, 10**400)]
    + [("rope_parameters", {"rope_theta": value}) for value in (0, -10.0, "10000", float("nan"))]
    + [("tie_word_embeddings", value) for value in (None, 1, "yes")],
    ids=lambda value: str(value)[:30],
)
def test_an_impossible_number_is_refused(folder: Path, key: str, value: Any) -> None:
    refused(
        edit(folder, **{key: value}), "impossible model", {"rms_norm_eps": "norm_eps", "tie_word_embeddings": "tied"}.get(key, "rope_theta")
    )


def test_sizes_that_do_not_fit_each_other_are_refused_with_both_numbers(folder: Path) -> None:
    refused(edit(folder, num_key_value_heads=3), "4 query heads", "3 KV heads")
    refused(edit(folder, num_key_value_heads=2, head_dim=5), "head_dim is 5", "even")
    refused(edit(folder, head_dim=8), "q_proj", "(24, 16)", "(32, 16)")
    refused(edit(folder, head_dim=6, num_hidden_layers=3), "lacks", "model.layers.2.")
    refused(edit(folder, num_hidden_layers=1), "unexpected", "model.layers.1.")
    refused(edit(folder, num_hidden_layers=10**9), "too few", str(10**9))
    refused(edit(folder, num_hidden_layers=2, max_position_embeddings=10**9), str(10**9), "max_position_embeddings")


@pytest.mark.parametrize("value", ["2", [2, "3"], 2.5, True, {"id": 2}, [[2]]], ids=str)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_end_of_text_that_is_no_token_id_is_refused(folder: Path, file: str, value: Any) -> None:
    (folder / "generation_config.json").write_text("{}")
    config = json.loads((folder / file).read_text()) | {"eos_token_id": value}
    (folder / file).write_text(json.dumps(config))
    refused(folder, file, "eos_token_id", repr(value))


# ---------------------------------------------------------------- folders and files


def test_what_is_no_model_folder_is_refused_by_its_path(saved: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, str(empty), "no model folder", "config.json")
    refused(tmp_path / "nowhere", "nowhere", "no model folder")
    file = tmp_path / "model.safetensors"
    shutil.copy(saved / "model.safetensors", file)
    refused(file, str(file), "it is a file", "folder")
    refused(Path("a\0b"), "config.json")
    refused(Path("x" * 5000), "config.json")


JSON_FILES = ("config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer_config.json", "tokenizer.json")
NO_OBJECT = (b"", b"{", b"[]", b"null", b"7", b'"llama"', b"\xff\xfe\x00", b"{'model_type': 'llama'}", b"[" * 100_000, b'{"a":' * 100_000)


def add_tokenizer(folder: Path) -> None:
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("content", NO_OBJECT, ids=lambda content: str(content[:12]))
@pytest.mark.parametrize("name", JSON_FILES)
def test_a_broken_json_file_is_named(folder: Path, name: str, content: bytes) -> None:
    add_tokenizer(folder)
    (folder / name).write_bytes(content)
    refused(folder, name)


@pytest.mark.parametrize("name", [*JSON_FILES, "model.safetensors"])
def test_a_folder_in_place_of_a_file_is_named(folder: Path, name: str) -> None:
    add_tokenizer(folder)
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    refused(folder, name)


def test_a_folder_with_pickles_only_is_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    refused(folder, str(folder), "no *.safetensors", "pickle")


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 9, 100, -1000, -4, -1])
def test_a_truncated_weight_file_is_named(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refused(folder, str(file), "damaged")


GARBAGE = (b"garbage", b"\0" * 100, b"\xff" * 100, b"\x80\x04pickle" * 20, b"\x02" + b"\0" * 7 + b"{}")


@pytest.mark.parametrize("content", GARBAGE, ids=lambda content: str(content[:8]))
def test_garbage_in_place_of_weights_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, str(folder))


def test_a_damaged_header_is_refused_or_changes_nothing(folder: Path) -> None:
    """Every byte of the header's beginning and many of the rest, with a flipped bit or another digit."""
    file = folder / "model.safetensors"
    good = file.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    expected = minikv.logits(minikv.load(folder), [1, 2, 3])
    draw = random.Random(1)
    outcomes = {True: 0, False: 0}
    for place in [*range(60), *(draw.randrange(60, header) for _ in range(400))]:
        bad = bytearray(good)
        bad[place] = bad[place] ^ (1 << draw.randrange(8)) if draw.random() < 0.5 else ord(draw.choice('0123456789FUI"{}[],: '))
        file.write_bytes(bad)
        try:
            model = minikv.load(folder)
        except ModelError:
            outcomes[False] += 1
        else:
            outcomes[True] += 1
            assert bytes(bad) == good or minikv.logits(model, [1, 2, 3]).shape == expected.shape
    assert outcomes[False] > 300, outcomes


# ---------------------------------------------------------------- several files, and tensors that do not fit


def shard(folder: Path) -> Path:
    """Cut model.safetensors in two, with an index; returns the index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    where = {name: f"model-0000{1 + (i >= len(names) // 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: weights[name] for name in names if where[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return index


def test_shards_are_read_through_their_index(folder: Path) -> None:
    expected = minikv.logits(minikv.load(folder), [1, 2, 3])
    index = shard(folder)
    assert torch.equal(minikv.logits(minikv.load(folder), [1, 2, 3]), expected)
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "other.safetensors")
    assert torch.equal(minikv.logits(minikv.load(folder), [1, 2, 3]), expected)  # not in the index
    index.unlink()
    refused(folder, "two files")


def test_a_missing_or_truncated_shard_is_named(folder: Path) -> None:
    shard(folder)
    second = folder / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-8])
    refused(folder, second.name, "damaged")
    second.unlink()
    refused(folder, second.name, "missing")


@pytest.mark.parametrize(
    "names",
    [
        {"a": "../model.safetensors"}, {"a": "/etc/passwd"}, {"a": "sub/model.safetensors"}, {"a": ".."}, {"a": "."}, {"a": ""},
        {"a": 5}, {"a": None}, {"a": ["x"]}, {"a": "a\0b"}, {"a": "x" * 5000}, {}, [], None, "model.safetensors",
    ],
    ids=lambda names: str(names)[:30],
)  # fmt: skip
def test_an_index_that_points_out_of_the_folder_or_nowhere_is_refused(folder: Path, names: Any) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent / "model.safetensors")  # so that ../ would be found
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    refused(folder, str(folder))


Spoil = Callable[[dict[str, torch.Tensor]], Any]
NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda w: w.pop(DOWN), ("lacks 1 tensors", DOWN)),
        (lambda w: w.pop("lm_head.weight"), ("lacks 1 tensors", "lm_head.weight")),
        (lambda w: w.clear(), ("too few", "2 layers")),
        (lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(24)}), ("unexpected 1 tensors", "q_proj.bias")),
        (lambda w: w.update({"lora_A.weight": torch.zeros(2)}), ("unexpected 1 tensors", "lora_A.weight")),
        (lambda w: w.update({NORM: torch.zeros(17)}), (NORM, "(17,)", "(16,)")),
        (lambda w: w.update({NORM: torch.zeros(1, 16)}), (NORM, "(1, 16)", "(16,)")),
        (lambda w: w.update({NORM: torch.zeros(0)}), (NORM, "(0,)")),
        (lambda w: w.update({DOWN: w[DOWN].T.contiguous()}), (DOWN, "(20, 16)", "(16, 20)")),
        (lambda w: w.update({DOWN: w[DOWN].to(torch.int8)}), (DOWN, "torch.int8", "quantized")),
        (lambda w: w.update({DOWN: w[DOWN].to(torch.int64)}), (DOWN, "torch.int64")),
        (lambda w: w.update({DOWN: w[DOWN] > 0}), (DOWN, "torch.bool")),
        (lambda w: w.update({DOWN: w[DOWN].to(torch.float8_e4m3fn)}), (DOWN, "float8", "quantized")),
        (lambda w: w.update({DOWN: w[DOWN].to(torch.complex64)}), (DOWN, "complex64")),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_the_config_are_named(folder: Path, spoil: Spoil, words: tuple[str, ...]) -> None:
    weights = load_file(folder / "model.safetensors")
    spoil(weights)
    save_file(weights, folder / "model.safetensors")
    refused(folder, *words)


def test_tensors_of_any_float_dtype_and_superfluous_rotary_speeds_are_read(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    weights = {name: weight.to(dtypes[i % 4]) for i, (name, weight) in enumerate(weights.items())}
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    save_file(weights, folder / "model.safetensors")
    assert {weight.dtype for _, weight in works(folder).named_weights()} == {torch.float32}


# ---------------------------------------------------------------- whatever stands in the config: a working model or a ModelError

NUMBERS = st.one_of(st.integers(-3, 40), st.sampled_from([-1, 2**31, 2**63, 2**64, 10**12, 10**30, 0.0, 1e-6, 0.5, 1e308]), st.floats())
WORDS = st.one_of(st.text(max_size=4), st.sampled_from(["default", "linear", "silu", "llama", "qwen3", "mistral"]))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["rope_type", "rope_theta", "type", "factor", "x"]), inner, max_size=3),
    ),
    max_leaves=4,
)
KEYS = (
    *SIZES, "model_type", "rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling", "tie_word_embeddings", "layer_types",
    "sliding_window", "use_sliding_window", "hidden_act", "attention_bias", "mlp_bias", "eos_token_id", "bos_token_id", "torch_dtype",
    "architectures", "anything",
)  # fmt: skip


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(KEYS), st.one_of(VALUES, st.just(...)), min_size=1, max_size=3))
@example({"rope_theta": 10**299})
@example({"rms_norm_eps": 10**299})
@example({"rope_theta": 1e-300})
@example({"hidden_size": 10**400, "head_dim": None})
@example({"num_attention_heads": 0, "head_dim": None})
@example({"num_attention_heads": 17, "num_key_value_heads": 17, "head_dim": None})
def test_any_config_gives_a_working_model_or_a_model_error(saved: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = tmp_path / "model"
    if not folder.exists():
        folder.mkdir()
        (folder / "model.safetensors").hardlink_to(saved / "model.safetensors")
    shutil.copy(saved / "config.json", folder)
    edit(folder, **changes)
    try:
        model = minikv.load(folder)
    except ModelError as error:
        wrong = str(error)
    else:
        assert minikv.logits(model, [1, 2][: model.shape.max_context]).shape[1] == SHAPE.vocab
        assert all(type(token) is int for token in model.stop_tokens)
        return
    assert str(folder) in wrong
    assert len(wrong) < 2000


# ---------------------------------------------------------------- how it is asked for


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn, "float32"], ids=str)
def test_a_dtype_that_is_no_float_is_refused_by_name(folder: Path, dtype: Any) -> None:
    refused(folder, str(dtype), "floating-point", dtype=dtype)
    with pytest.raises(ModelError, match="floating-point"):
        minikv.load(shape=SHAPE, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_dtype_that_is_asked_for_is_the_logits_dtype(folder: Path, dtype: torch.dtype) -> None:
    for model in (minikv.load(folder, dtype=dtype), minikv.load(shape=SHAPE, dtype=dtype, device="cpu")):
        assert model.dtype == model.head.dtype == minikv.logits(model, [1, 2]).dtype == dtype
        assert model.norm.dtype == torch.promote_types(dtype, torch.float32)
        assert model.device == torch.device("cpu")


def test_a_path_and_a_shape_are_one_too_many(folder: Path) -> None:
    with pytest.raises(ModelError, match="not both"):
        minikv.load(folder, shape=SHAPE)


# ---------------------------------------------------------------- random weights

SHAPES = {
    "tied": {"tied": True},
    "untied": {"tied": False},
    "bias": {"qkv_bias": True},
    "qk-norm": {"qk_norm": True},
    "both": {"qkv_bias": True, "qk_norm": True},
}


@pytest.mark.parametrize("more", SHAPES.values(), ids=SHAPES)
def test_random_weights_are_those_of_the_seed(more: dict[str, bool]) -> None:
    shape = minikv.ModelShape(**{**SHAPE.__dict__, **more})
    one, again, other = (random_weights(shape, seed) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one if not name.endswith("norm.weight"))
    assert sum(weight.numel() for weight in one.values()) == shape.parameters
    assert ("lm_head.weight" in one) == (not shape.tied)
    assert any(name.endswith("q_proj.bias") for name in one) == shape.qkv_bias
    assert any(name.endswith("q_norm.weight") for name in one) == shape.qk_norm
    models = [minikv.load(shape=shape, seed=seed) for seed in (1, 1, 2)]
    rows = [minikv.logits(model, [3, 1, 4]) for model in models]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    assert models[0].fingerprint == models[1].fingerprint != models[2].fingerprint


def test_random_weights_leave_torchs_own_dice_alone() -> None:
    torch.manual_seed(5)
    first = torch.rand(3)
    torch.manual_seed(5)
    random_weights(SHAPE, 1)
    assert torch.equal(torch.rand(3), first)


def test_the_fingerprint_depends_on_every_weight_the_dtype_and_the_shape() -> None:
    weights = random_weights(SHAPE, 1)
    prints = {Model(SHAPE, weights, dtype).fingerprint for dtype in (torch.float32, torch.float64)}
    prints.add(Model(minikv.ModelShape(**{**SHAPE.__dict__, "rope_theta": 5.0}), weights, torch.float32).fingerprint)
    for name in weights:
        changed = {**weights, name: weights[name].clone()}
        changed[name].flatten()[-1] += 1e-3
        prints.add(Model(SHAPE, changed, torch.float32).fingerprint)
    assert len(prints) == 3 + len(weights)
    model = Model(SHAPE, weights, torch.float32)
    before = model.fingerprint
    model.layers[0].out.zero_()
    model.weights_changed()
    assert model.fingerprint != before


def test_mla_is_sized_but_not_run() -> None:
    with pytest.raises(ModelError, match="latent"):
        minikv.load(shape=minikv.ModelShape(**{**SHAPE.__dict__, "mla_latent": 8}))


@pytest.mark.parametrize("more", SHAPES.values(), ids=SHAPES)
def test_a_saved_model_comes_back_bit_for_bit(more: dict[str, bool], tmp_path: Path) -> None:
    shape = minikv.ModelShape(**{**SHAPE.__dict__, **more, "rope_theta": 77.0, "norm_eps": 1e-3})
    model = Model(shape, random_weights(shape, 3), torch.float32, stop_tokens=(1, 7))
    if shape.qkv_bias and shape.qk_norm:
        with pytest.raises(ModelError, match="both"):
            save(model, tmp_path / "new")
        assert not (tmp_path / "new").exists()
        return
    save(model, tmp_path / "new")
    again = minikv.load(tmp_path / "new")
    assert torch.equal(minikv.logits(again, [1, 2, 3]), minikv.logits(model, [1, 2, 3]))
    assert again.stop_tokens == (1, 7)


def test_a_mistral_without_a_word_about_its_window_has_one_of_4096(folder: Path) -> None:
    works(as_family(folder, "mistral", sliding_window=..., max_position_embeddings=4096))
    refused(as_family(folder, "mistral", sliding_window=..., max_position_embeddings=8192), "sliding window of 4096")
    works(as_family(folder, "mistral", sliding_window=None, max_position_embeddings=8192))


def test_the_theta_in_an_old_rope_scaling_counts(folder: Path) -> None:
    edit(folder, rope_theta=..., rope_scaling={"rope_type": "default", "rope_theta": 77.0})
    assert works(folder).shape.rope_theta == 77.0


def test_a_device_that_is_none_is_refused() -> None:
    for device in ("nowhere", 3.5):
        with pytest.raises(ModelError, match="cannot compute on the device"):
            minikv.load(shape=SHAPE, device=device)


def test_a_gpu_gets_the_16_bits_that_its_matrix_units_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_dtype("cpu") is default_dtype("meta") is torch.float32
    for capability, dtype in (((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((8, 9), torch.bfloat16), ((12, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert default_dtype("cuda") is dtype
