"""The same weights in minikv and in Hugging Face transformers give the same logits and the same text.

Random tiny Llama, Mistral, Qwen2 and Qwen3 models, some of odd shapes, are written with ``save_pretrained`` and loaded by us.
Their weights, norms and biases are random and large, so that no logits are near zero and nothing that is left out goes unseen.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import minikv
from minikv.model.weights import Model, random_weights, save

transformers = pytest.importorskip("transformers")

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ODD = {  # hidden, heads, KV heads, head_dim, tied
    "heads-times-head_dim-is-not-hidden": (24, 4, 2, 10, False),
    "one-kv-head": (32, 4, 1, 8, True),
    "five-heads": (40, 5, 5, 8, False),
    "five-heads-one-kv-head-narrow": (35, 5, 1, 2, True),
    "hidden-that-heads-do-not-divide": (30, 4, 2, 16, True),
}


def config_of(family: str, case: str | int) -> Any:
    """A configuration of ``family``: an odd shape by name, or a random one by number."""
    draw = random.Random(f"{family} {case}")
    if isinstance(case, str):
        hidden, heads, kv_heads, head_dim, tied = ODD[case]
    else:
        kv_heads, group, head_dim = draw.choice((1, 2, 3)), draw.choice((1, 2, 4)), draw.choice((4, 6, 8, 16))
        heads, tied = kv_heads * group, draw.random() < 0.5
        hidden = draw.choice((heads * head_dim, 4 * draw.randint(4, 12)))
    more: dict[str, Any] = {"sliding_window": None} if family == "mistral" else {}
    kind = {"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}[family]
    return getattr(transformers, kind)(
        hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, tie_word_embeddings=tied,
        intermediate_size=draw.randint(20, 60), num_hidden_layers=draw.randint(1, 3), vocab_size=draw.randint(50, 120),
        max_position_embeddings=128, rms_norm_eps=draw.choice((1e-6, 1e-5, 1e-3, 1e-2)), bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": draw.choice((100.0, 10_000.0, 500_000.0, 1e6))}, **more,
    )  # fmt: skip


def random_hf(config: Any) -> Any:
    """A transformers model whose weights, norms and biases are all random and none is small."""
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(config.vocab_size)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(1 + 0.4 * noise)
            elif "embed" in name or name.endswith("bias"):
                weight.copy_(0.7 * noise)
            else:
                weight.copy_(1.2 * noise * weight.shape[1] ** -0.5)
    return model


def in_float64(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model in float64, its norms and rotary angles too: transformers computes these in float32 whatever the dtype."""

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rotary(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        width, theta = self.config.head_dim, self.config.rope_parameters["rope_theta"]
        speed = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angle = torch.cat((position_ids[..., None] * speed,) * 2, -1)
        return angle.cos(), angle.sin()

    patched = set()
    for module in model.modules():
        for ending, forward in (("RMSNorm", norm), ("RotaryEmbedding", rotary)):
            if type(module).__name__.endswith(ending):
                monkeypatch.setattr(type(module), "forward", forward)
                patched.add(ending)
    assert patched == {"RMSNorm", "RotaryEmbedding"}, "transformers has renamed what is patched here"
    return model.double()


def hf_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def tokens_of(model: Any, length: int = 40) -> list[int]:
    return random.Random(length).choices(range(model.config.vocab_size), k=length)


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor, within: float) -> None:
    assert theirs.std() > 0.5, "these logits are too small for the comparison to mean anything"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=within)


CASES = [(family, case) for family in FAMILIES for case in [*ODD, *range(5)]]
CASES.remove(("llama", "hidden-that-heads-do-not-divide"))  # transformers refuses it


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A transformers model and the folder that it was saved to."""
    model = random_hf(config_of(*request.param))
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return model, folder


def test_float32_logits_agree(pair: tuple[Any, Path]) -> None:
    theirs, folder = pair
    tokens = tokens_of(theirs)
    assert_equal(minikv.logits(minikv.load(folder), tokens), hf_logits(theirs, tokens), within=1e-4)


def test_greedy_tokens_are_equal(pair: tuple[Any, Path]) -> None:
    theirs, folder = pair
    ours = minikv.load(folder)
    for length in (1, 7, 20):
        prompt = tokens_of(theirs, length)
        ids = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=15, attention_mask=torch.ones(1, length))[0].tolist()
        assert minikv.generate_with_cache(ours, prompt, 15).tokens == ids[length:]
        assert minikv.generate_without_cache(ours, prompt, 15).tokens == ids[length:]


def test_float64_logits_agree_to_rounding_once_their_norm_and_rotary_are_float64_too(
    pair: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, folder = pair
    tokens = tokens_of(theirs)
    ours = minikv.logits(minikv.load(folder, dtype=torch.float64), tokens)
    assert ours.dtype == torch.float64
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    assert_equal(ours, hf_logits(theirs, tokens), within=1e-5)
    assert_equal(ours, hf_logits(in_float64(theirs, monkeypatch), tokens), within=1e-9)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_many_files_is_the_model_in_one(family: str, tied: bool, tmp_path: Path) -> None:
    theirs = random_hf(config_of(family, "five-heads"))
    theirs.config.tie_word_embeddings = tied
    theirs = random_hf(theirs.config)
    theirs.save_pretrained(tmp_path, max_shard_size="8KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = tokens_of(theirs)
    assert_equal(minikv.logits(minikv.load(tmp_path), tokens), hf_logits(theirs, tokens), within=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_are_read_as_they_are_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    random_hf(config_of("qwen3", 0)).to(dtype).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = tokens_of(theirs)
    assert_equal(minikv.logits(minikv.load(tmp_path), tokens), hf_logits(theirs, tokens), within=1e-4)
    half = minikv.load(tmp_path, dtype=dtype)
    assert half.dtype == half.embedding.dtype == dtype
    assert (minikv.logits(half, tokens).float() - hf_logits(theirs, tokens)).abs().max() < 0.5


@pytest.mark.parametrize("old", ["rope_theta", "rope_scaling"])
def test_configs_of_older_transformers_mean_the_same(old: str, tmp_path: Path) -> None:
    """rope_theta stood at the top level, beside rope_scaling: null."""
    theirs = random_hf(config_of("llama", 1))
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    if old == "rope_scaling":
        config |= {"rope_scaling": None, "torch_dtype": "float32", "_name_or_path": "x"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = tokens_of(theirs)
    assert_equal(minikv.logits(minikv.load(tmp_path), tokens), hf_logits(theirs, tokens), within=1e-4)


def test_end_of_text_tokens_are_those_of_both_config_files(tmp_path: Path) -> None:
    config = config_of("llama", 0)
    config.eos_token_id = 3
    theirs = random_hf(config)
    theirs.generation_config.eos_token_id = [5, 3]
    theirs.save_pretrained(tmp_path)
    assert minikv.load(tmp_path).stop_tokens == (3, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_what_we_save_is_what_transformers_loads(family: str, tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Plain models are written as llama, unless heads do not divide hidden: transformers takes that from mistral only."""
    shape = minikv.ModelShape(
        layers=2, hidden=40 if family == "mistral" else 48, heads=6, kv_heads=2, head_dim=10, vocab=70, ffn=50, max_context=64,
        rope_theta=3000.0, norm_eps=1e-4, qkv_bias=family == "qwen2", qk_norm=family == "qwen3", tied=tied,
    )  # fmt: skip
    weights = {name: weight + 0.3 * torch.randn(weight.shape) for name, weight in random_weights(shape, seed=1).items()}
    ours = Model(shape, weights, dtype, stop_tokens=(3, 5))
    save(ours, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert theirs.config.model_type == family
    tokens = tokens_of(theirs)
    again = minikv.load(tmp_path)
    assert_equal(minikv.logits(again, tokens), hf_logits(theirs, tokens), within=1e-4)
    assert again.stop_tokens == (3, 5)
    if dtype == torch.float32:
        assert torch.equal(minikv.logits(again, tokens), minikv.logits(ours, tokens))
