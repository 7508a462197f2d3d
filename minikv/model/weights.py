"""Where a model's weights come from: the bundled folder, a Hugging Face folder, or a seed.

A Hugging Face folder is config.json (the sizes), one or several *.safetensors (the weights) and, if it has one, a
tokenizer.json. Weights are read from safetensors only: that format is a table of numbers, whereas a pickle is a program.
Whatever a config asks for that this forward pass does not do is refused by name. A model that loads and is subtly
wrong would be worse than one that does not load.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minikv.errors import ModelError
from minikv.model.transformer import Transformer
from minikv.shape.model_shape import ModelShape

if TYPE_CHECKING:
    from minikv.model.tokenizer import Tokenizer

BUNDLED = Path(__file__).parent / "bundled"

FAMILIES = {"llama": {}, "mistral": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}

# What a config may say besides its sizes. Keys that change nothing in inference, and keys that must have one value.
_HARMLESS = frozenset(
    """_name_or_path _attn_implementation architectures attention_dropout bos_token_id chunk_size_feed_forward dtype eos_token_id
    id2label initializer_range is_decoder is_encoder_decoder is_llama_config label2id max_window_layers model_type output_attentions
    output_hidden_states pad_token_id problem_type return_dict tokenizer_class torch_dtype transformers_version transformers.js_config
    unk_token_id use_cache""".split()  # noqa: SIM905
)
_SIZES = frozenset(
    """head_dim hidden_size intermediate_size max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads
    rms_norm_eps rope_theta rope_parameters rope_scaling tie_word_embeddings vocab_size layer_types sliding_window
    use_sliding_window""".split()  # noqa: SIM905
)
# cos and sin of every position are kept: 2 GiB at most (a million positions of 128 pass).
_MOST_ROTARY_NUMBERS = 2**28
_MUST_BE = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_interleaved": False}


def load(
    path: str | Path | None = None,
    *,
    shape: ModelShape | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> Model:
    """A model, ready to run: the bundled one, one from a Hugging Face folder, or random weights of a shape.

    ``path`` is a folder with config.json and *.safetensors of the Llama, Mistral, Qwen2 or Qwen3 family; ``shape``
    asks for random weights from ``seed`` instead (give one of the two, or none for the bundled model). ``dtype`` is
    float32 unless said otherwise; on a CUDA device bfloat16 where its matrix units have it (compute capability 8.0 and
    later), else float16. Raises ModelError, which says what is wrong with the folder, file, shape or device.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as wrong:  # torch raises each of them here
        raise ModelError(f"cannot compute on the device {device!r}: {str(wrong).splitlines()[0]}") from None
    if shape is not None:
        if path is not None:
            raise ModelError("give a path or a shape, not both: a path has its own weights, a shape gets random ones")
        return Model(shape, random_weights(shape, seed), dtype or default_dtype(device), device)
    folder = BUNDLED if path is None else Path(path)
    shape, stop_tokens = read_config(folder)
    weights = read_weights(folder, shape)
    from minikv.model.tokenizer import Tokenizer  # not above: random weights need no package that reads files

    return Model(shape, weights, dtype or default_dtype(device), device, Tokenizer.from_folder(folder), stop_tokens)


def default_dtype(device: str | torch.device) -> torch.dtype:
    """float32, but on a CUDA device the 16 bits that its matrix units multiply: half the bytes, many times the rate."""
    if torch.device(device).type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


class Model(Transformer):
    """A transformer with what belongs to it: its tokenizer (or None) and the ids that end a text."""

    def __init__(
        self,
        shape: ModelShape,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        tokenizer: Tokenizer | None = None,
        stop_tokens: tuple[int, ...] = (),
    ) -> None:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
            raise ModelError(f"a model computes in a floating-point dtype of at least 16 bits, such as torch.float32, not in {dtype!r}")
        super().__init__(shape, weights, dtype, device)
        self.tokenizer, self.stop_tokens = tokenizer, stop_tokens


def random_weights(shape: ModelShape, seed: int = 0) -> dict[str, Tensor]:
    """Random weights under Hugging Face names, the same for the same seed on every device: float32 on the CPU.

    Projections have a standard deviation of 1/sqrt(inputs), so that activations keep their size from layer to layer;
    the embedding is small, so that what comes out depends on the layers and not only on the last token.
    """
    if shape.mla_latent is not None:
        raise ModelError(f"{shape.name} uses multi-head latent attention, which minikv computes sizes for but does not run")
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(size) if name.endswith("norm.weight") else torch.randn(size, generator=generator) * scale
        for name, size, scale in _tensors(shape)
    }


def _tensors(shape: ModelShape) -> list[tuple[str, tuple[int, ...], float]]:
    """Name, size and random scale of every tensor of a shape, in the order of a forward pass."""
    hidden, ffn, queries, keys = shape.hidden, shape.ffn, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors: list[tuple[str, tuple[int, ...], float]] = [("model.embed_tokens.weight", (shape.vocab, hidden), 0.02)]
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        tensors.append((layer + "input_layernorm.weight", (hidden,), 1.0))
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            tensors.append((layer + f"self_attn.{name}_proj.weight", (rows, hidden), hidden**-0.5))
            if shape.qkv_bias:
                tensors.append((layer + f"self_attn.{name}_proj.bias", (rows,), 0.1))
            if shape.qk_norm and name != "v":
                tensors.append((layer + f"self_attn.{name}_norm.weight", (shape.head_dim,), 1.0))
        tensors.append((layer + "self_attn.o_proj.weight", (hidden, queries), queries**-0.5))
        tensors.append((layer + "post_attention_layernorm.weight", (hidden,), 1.0))
        tensors.append((layer + "mlp.gate_proj.weight", (ffn, hidden), hidden**-0.5))
        tensors.append((layer + "mlp.up_proj.weight", (ffn, hidden), hidden**-0.5))
        tensors.append((layer + "mlp.down_proj.weight", (hidden, ffn), ffn**-0.5))
    tensors.append(("model.norm.weight", (hidden,), 1.0))
    if not shape.tied:
        tensors.append(("lm_head.weight", (shape.vocab, hidden), hidden**-0.5))
    return tensors


def read_config(folder: Path) -> tuple[ModelShape, tuple[int, ...]]:
    """The shape and the end-of-text ids that ``folder``'s config.json describes.

    Raises ModelError when there is none, when a size is missing or impossible, and for everything in it that minikv
    does not compute: other architectures, rope scaling, sliding windows, biases elsewhere than on q, k, v, and keys
    that it does not know.
    """
    config = _read_json(folder / "config.json", f"{folder} is no model folder")
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ModelError(f"{folder}: unsupported architecture {family!r} (model_type); supported are {', '.join(FAMILIES)}")
    for problem in _what_we_do_not_do(config, family):
        raise ModelError(f"{folder}: config.json asks for {problem}, which minikv does not do; it would give wrong results")
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        theta = [
            rope["rope_theta"]
            for rope in (config.get("rope_parameters") or {}, config.get("rope_scaling") or {}, config)
            if rope.get("rope_theta") is not None
        ]
        shape = ModelShape(
            name=folder.name,
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=heads if config.get("num_key_value_heads") is None else config["num_key_value_heads"],
            head_dim=hidden // heads if config.get("head_dim") is None else config["head_dim"],
            vocab=config["vocab_size"],
            ffn=config["intermediate_size"],
            max_context=config["max_position_embeddings"],
            rope_theta=theta[0] if theta else 10_000.0,
            norm_eps=config.get("rms_norm_eps", 1e-6),
            tied=config.get("tie_word_embeddings", False),
            **FAMILIES[family],
        )
    except KeyError as missing:
        raise ModelError(f"{folder}: config.json has no {missing}") from None
    except (ValueError, TypeError, ZeroDivisionError) as wrong:
        raise ModelError(f"{folder}: config.json describes an impossible model: {wrong}") from None
    if shape.max_context * shape.head_dim > _MOST_ROTARY_NUMBERS:
        raise ModelError(
            f"{folder}: config.json asks for {shape.max_context} positions of head_dim {shape.head_dim}; minikv keeps a rotary table of "
            f"all of them, at most {_MOST_ROTARY_NUMBERS} numbers: lower max_position_embeddings to what you need"
        )
    stop_tokens = _end_of_text(folder / "config.json", config)
    generation = folder / "generation_config.json"
    if generation.exists():
        stop_tokens += _end_of_text(generation, _read_json(generation, ""))
    return shape, tuple(dict.fromkeys(stop_tokens))  # each once


def _end_of_text(file: Path, config: dict[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise ModelError(f"{file}: eos_token_id is {value!r}; it must be a token id, a list of them, or null")
    return tuple(ids)


def _what_we_do_not_do(config: dict[str, Any], family: str) -> list[str]:
    problems = []
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key) or {}
        plain = isinstance(rope, dict) and set(rope) <= {"rope_type", "type", "rope_theta"}
        if not plain or any(rope.get(kind, "default") != "default" for kind in ("rope_type", "type")):
            problems.append(f"rope scaling ({key}: {json.dumps(rope)})")
    # Qwen writes a window into the file and switches it off with a second key; for Mistral, the second one means nothing.
    if config.get("use_sliding_window"):
        problems.append(f"a sliding window (use_sliding_window: {json.dumps(config['use_sliding_window'])})")
    elif config.get("sliding_window") is not None and not family.startswith("qwen"):
        problems.append(f"a sliding window (sliding_window: {config['sliding_window']})")
    elif family == "mistral" and "sliding_window" not in config and not _is_at_most(config.get("max_position_embeddings"), 4096):
        problems.append("a sliding window of 4096 (what a Mistral config means that has no sliding_window; null means none)")
    layers = config.get("layer_types") or []
    if not isinstance(layers, list) or any(kind != "full_attention" for kind in layers):
        problems.append(f"layers other than full attention (layer_types: {json.dumps(layers)})")
    for key, value in _MUST_BE.items():
        if key in config and config[key] not in (value, None):
            problems.append(f"{key}: {config[key]!r}")
    unknown = sorted(set(config) - _HARMLESS - _SIZES - set(_MUST_BE))
    return problems + [f"{key}: {config[key]!r} (a key that minikv does not know)" for key in unknown if config[key]]


def _is_at_most(value: Any, most: int) -> bool:
    return isinstance(value, int) and value <= most


def _read_json(path: Path, otherwise: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{otherwise}: there is no {path.name}") from None
    except NotADirectoryError:
        raise ModelError(f"{otherwise}: it is a file; give the folder that holds config.json and *.safetensors") from None
    except (OSError, ValueError, RecursionError) as wrong:
        raise ModelError(f"{path} cannot be read as JSON: {wrong}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} should hold a JSON object, not a {type(content).__name__}")
    return content


def read_weights(folder: Path, shape: ModelShape) -> dict[str, Tensor]:
    """All tensors of ``folder``'s *.safetensors, checked against ``shape``.

    Raises ModelError, naming the file or tensor, when a file is missing, truncated or no safetensors, and when a
    tensor is missing, unexpected, given twice or of another size or no float.
    """
    from safetensors import SafetensorError, safe_open

    weights: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (not a dict)
                    if name in weights:
                        raise ModelError(f"{file}: tensor {name} stands in two files")
                    weights[name] = handle.get_tensor(name)
        except (SafetensorError, OSError) as wrong:
            raise ModelError(f"{file} is damaged or no safetensors file: {wrong}") from None
    if shape.tied:
        weights.pop("lm_head.weight", None)  # some files store the tied head a second time
    for name in [name for name in weights if name.endswith("rotary_emb.inv_freq")]:
        del weights[name]  # old files store the rotary speeds, which follow from rope_theta
    if shape.layers > len(weights):  # a layer has many tensors; and nobody waits until a billion names are listed
        raise ModelError(f"{folder} has {len(weights)} tensors, too few for the {shape.layers} layers of its config.json")
    wanted = {name: size for name, size, _ in _tensors(shape)}
    for problem, names in (("lacks", wanted.keys() - weights.keys()), ("has unexpected", weights.keys() - wanted.keys())):
        if names:
            some = ", ".join(sorted(names)[:3])
            raise ModelError(f"{folder} {problem} {len(names)} tensors for its config.json, among them {some}")
    for name, size in wanted.items():
        if tuple(weights[name].shape) != size:
            raise ModelError(f"{folder}: {name} has the size {tuple(weights[name].shape)}, config.json says {size}")
        if not weights[name].dtype.is_floating_point or weights[name].element_size() < 2:
            raise ModelError(f"{folder}: {name} is stored as {weights[name].dtype}: quantized weights are not supported")
    return weights


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = _read_json(index, "").get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ModelError(f"{index} has no usable weight_map from tensor names to file names")
        there = {file.name for file in folder.iterdir()}  # a name that leads out of the folder is none of these
        for missing in sorted(set(names.values()) - there):
            raise ModelError(f"{folder}: {missing[:200]!r} is named by {index.name} and missing")
        return [folder / name for name in sorted(set(names.values()))]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no *.safetensors (other formats are not read: a pickle can run code)")
    return files


def save(model: Transformer, folder: str | Path) -> None:
    """Write ``model`` as a Hugging Face folder: config.json and model.safetensors, in the model's dtype."""
    from safetensors.torch import save_file

    folder, shape = Path(folder), model.shape
    plain = "llama" if shape.hidden % shape.heads == 0 else "mistral"  # the same sums, but transformers wants a llama to divide evenly
    family = "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else plain
    if shape.qk_norm and shape.qkv_bias:
        raise ModelError("no Hugging Face family of ours has both normalised q, k and a bias on them")
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family, "hidden_act": "silu", "hidden_size": shape.hidden, "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "vocab_size": shape.vocab, "max_position_embeddings": shape.max_context,
        "rope_theta": shape.rope_theta, "rms_norm_eps": shape.norm_eps, "tie_word_embeddings": shape.tied,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
        "eos_token_id": list(getattr(model, "stop_tokens", ())) or None, "sliding_window": None,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {name: weight.detach().to(device="cpu", dtype=model.dtype).contiguous().clone() for name, weight in model.named_weights()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
