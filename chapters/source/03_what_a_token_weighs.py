# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown] id="title"
# # 3. What a token weighs
#
# [Before: 2. Remember the keys](02_remember_the_keys.ipynb) | [Next: 4. The car park](04_the_car_park.ipynb) | [Glossary](glossary.md)
#
# Chapter 2 bought speed with memory: keep K and V, and nothing is computed twice. How much memory is that, and how fast is "speed"?
# One quantity answers both. **Bytes decide**: how many conversations fit, and how fast each of them can go on.
#
# **You will be able to**
#
# - work out the bytes of K and V that one token leaves behind, for any model, from four numbers of its `config.json`, and check them against real tensors;
# - say how many conversations fit on a GPU beside the weights, and spot the usual mistakes in such a sum;
# - say for a prefill or a decode step whether compute, memory or overhead decides its time, and measure it on your own machine.
#
# **You need** [chapter 1](01_one_token_at_a_time.ipynb) (heads, layers) and [chapter 2](02_remember_the_keys.ipynb) (the KV cache, prefill, decode).
#
# **Time** About 40 minutes to read; half a minute to run.

# %% id="setup"
import math
import subprocess
import sys
from time import perf_counter

import matplotlib.pyplot as plt
import torch

import minikv
from minikv.cache.attention.reference import attend_one
from minikv.cache.contiguous import Contiguous
from minikv.cache.paged import Paged
from minikv.cache.step import Piece
from minikv.classroom.notebook import claim, compare, explore, note, predict, show_source
from minikv.shape.hardware import HARDWARE
from minikv.shape.model_shape import PRESETS, ModelShape, from_config
from minikv.shape.roofline import StepCost, attention_flops, step_cost
from minikv.shape.size import fitting_requests, kv_bytes, with_unit

plt.style.use("minikv.show.course")

# %% [markdown] id="predictions"
# ## Two guesses first
#
# A token of English text is about four letters: four bytes. A *request*, here and below, is one prompt together with the answer that it gets; a step can serve several.

# %% id="predict-weight"
predict(
    "ch3-bytes-a-token",
    "Qwen3-4B has 36 layers. How many bytes of K and V does one token leave in its cache?",
    "bytes",
)

# %% id="predict-batch"
predict(
    "ch3-batch-of-16",
    "A model of 100 million parameters decodes on this machine. One step serves 1 request, or 16 requests at once. "
    "How many times longer is the step with 16?",
    "times",
)

# %% [markdown] id="part-one"
# ## Put a token on the scales
#
# The model hands K and V of every new token to the cache, layer by layer, through one method: `attend`. So a cache that
# notes down what comes in is a pair of scales. It is chapter 2's cache with a few extra lines.


# %% id="scales"
class Scales(Contiguous):
    """Chapter 2's cache; it also adds up the bytes of every K and V that the model hands it."""

    weighed_bytes = 0

    def attend(self, layer, q, k, v):
        self.weighed_bytes += k.nbytes + v.nbytes
        self.last_k = k  # kept for later in this chapter
        return super().attend(layer, q, k, v)


def weigh(model, tokens):
    """Run one prefill of `tokens` on the scales; returns the scales."""
    kv = Scales(model.shape, max_tokens=len(tokens), dtype=model.dtype)
    step = kv.begin([Piece("only", tokens)])
    with torch.inference_mode():
        model(step.token_ids, step.positions, kv)
    return kv


# %% [markdown] id="weigh-first-words"
# First a small random model of the kind that you know: 4 heads, each with its own queries, keys and values.

# %% id="weigh-mha" tags=["nbval-check-output"]
plain = ModelShape(layers=3, hidden=64, heads=4, kv_heads=4, head_dim=16, vocab=100, ffn=128)
kv = weigh(minikv.load(shape=plain, seed=0), tokens=list(range(10)))
print(f"{kv.weighed_bytes:,} bytes for 10 tokens, {kv.weighed_bytes // 10:,} for each")

# %% [markdown] id="derive"
# Where do they come from? In every **layer**, every **head** makes one key and one value for the token. Each is a vector of
# `head_dim` numbers, and a float32 number takes four **bytes**. Key *and* value: that is a factor of 2 which is easily forgotten. So:

# %% id="derive-by-hand" tags=["nbval-check-output"]
k_and_v, layers, heads, head_dim, bytes_a_number = 2, 3, 4, 16, 4
by_hand = k_and_v * layers * heads * head_dim * bytes_a_number
print(f"{k_and_v} x {layers} x {heads} x {head_dim} x {bytes_a_number} = {by_hand:,} bytes")
assert 10 * by_hand == kv.weighed_bytes
print("The formula agrees with the scales.")

# %% [markdown] id="what-does-not-matter"
# This is the weight of a token, its [bytes a token](glossary.md#bytes-a-token). Notice what is *not* in it: neither the width of
# the hidden state, nor the vocabulary, nor the feed-forward network. And it is the same for the first token and for the thousandth, so a
# cache grows by the same step with every token.
#
# Now the model that ships with the course. Its `config.json` says 5 layers, 8 heads, head_dim 32.

# %% id="weigh-bundled" tags=["nbval-check-output"]
model = minikv.load()
kv = weigh(model, model.tokenizer.encode("The capital of France is"))
tokens = kv.lengths["only"]
by_hand, on_scales = 2 * 5 * 8 * 32 * 4, kv.weighed_bytes // tokens
print(f"bytes a token: by hand {by_hand:,}, on the scales {on_scales:,}")
print(f"The formula says {by_hand / on_scales:g} times too much.")

# %% [markdown] id="gqa"
# ## Query heads that share
#
# The scales are right, and the formula was too simple. This model has 8 heads of queries but only **2** heads of keys and values:
# four query heads read the same K and V. The number of heads that the cache has to keep is called
# [KV heads](glossary.md#kv-head) (`num_key_value_heads` in a config.json). Up to here both numbers were the same.
#
# - KV heads = heads: [multi-head attention, MHA](glossary.md#mha), as in chapters 1 and 2;
# - KV heads = 1: [multi-query attention, MQA](glossary.md#mqa);
# - in between: [grouped-query attention, GQA](glossary.md#gqa), what most models of today do.
#
# On one layer it looks like this. Take chapter 1's causal head, and let query head `h` read KV head `h // group`.


# %% id="causal-head"
def causal_head(q, k, v):
    """One head: q, k, v [tokens, head_dim]. Every token sees itself and what is before it."""
    scores = q @ k.T / math.sqrt(q.shape[-1])
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


def grouped(q, k, v):
    """q [heads, tokens, head_dim]; k, v [kv_heads, tokens, head_dim]."""
    group = len(q) // len(k)
    return torch.stack([causal_head(q[h], k[h // group], v[h // group]) for h in range(len(q))])


# %% [markdown] id="gqa-check-words"
# Sharing is the same as giving every query head a KV head of its own that happens to be a copy of its neighbour's. So
# the copies need not be stored. That is all there is to it:

# %% id="gqa-check" tags=["nbval-check-output"]
torch.manual_seed(0)
q = torch.randn(8, 6, 32)  # 8 query heads, 6 tokens
for kv_heads, name in ((8, "MHA"), (2, "GQA"), (1, "MQA")):
    k, v = torch.randn(kv_heads, 6, 32), torch.randn(kv_heads, 6, 32)
    copies_k, copies_v = (x.repeat_interleave(8 // kv_heads, dim=0) for x in (k, v))
    assert torch.equal(grouped(q, k, v), grouped(q, copies_k, copies_v))
    # The engine's attention shares as well.
    engine = attend_one(q.transpose(0, 1), k, v).transpose(0, 1)
    assert torch.allclose(grouped(q, k, v), engine, atol=1e-6)
    kept, copied = k.nbytes + v.nbytes, copies_k.nbytes + copies_v.nbytes
    print(f"{name}: {kv_heads} KV heads, {kept:>6,} bytes instead of {copied:,}; same result")

# %% [markdown] id="gqa-caution"
# The results of the three differ from each other, of course: a model is trained with the number that it has. GQA gives up some
# freedom in training for a lighter cache ever after. The *work* of attention stays the same: each of the 8 query heads
# still takes its products with every key. Sharing saves bytes, not operations.
#
# With that, the formula is complete: **2 x layers x KV heads x head_dim x bytes a number**.


# %% id="our-formula"
def numbers_a_token(shape):
    """Numbers that one token leaves in the cache."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim


# %% id="our-formula-check" tags=["nbval-check-output"]
assert numbers_a_token(model.shape) * 4 * tokens == kv.weighed_bytes
print(f"bundled model: {numbers_a_token(model.shape) * 4:,} bytes a token, as on the scales")

# %% [markdown] id="models"
# ## The models of today
#
# A cache does not need a model to be weighed: it can be allocated from the shape alone. So let the engine
# (its class `Paged`, which chapter 5 takes apart) make room for exactly one token of each well-known model, with two bytes a number (bf16), and ask the tensor for its size.
#
# A word on units, because half of all confusion comes from there. **KB** and **GB** are decimal: 10³ and 10⁹ bytes, as data sheets use
# them. **KiB**, **MiB** and **GiB** are binary: 2¹⁰, 2²⁰, 2³⁰ bytes. Many programs compute in the second and write the first. At a gigabyte they
# are 7 % apart, and this course always says which it means.

# %% id="table" tags=["nbval-check-output"]
known = [
    shape for shape in PRESETS.values() if shape.mla_latent is None and shape.name != "bench-14m"
]
heads_line = f"{'model':<14}{'layers':>7}{'heads':>7}{'KV heads':>10}{'head_dim':>10}"
print(f"{heads_line}{'':>6}{'bytes':>10}{'KB':>9}{'KiB':>8}")
for shape in known:
    pool = Paged(shape, num_blocks=1, block_size=1, dtype=torch.bfloat16)  # real tensors
    a_token = pool.block_bytes
    assert a_token == 2 * numbers_a_token(shape)
    print(
        f"{shape.name:<14}{shape.layers:>7}{shape.heads:>7}{shape.kv_heads:>10}{shape.head_dim:>10}{shape.attention:>6}"
        f"{a_token:>10,}{a_token / 1000:>9.1f}{a_token / 1024:>8.1f}"
    )
print(f"The formula agrees with the real tensors of all {len(known)} models.")

# %% id="answer-weight"
compare("ch3-bytes-a-token", 2 * numbers_a_token(PRESETS["qwen3-4b"]), "bytes")

# %% [markdown] id="mla"
# ### One more way: keep a summary
#
# DeepSeek-V3 has 128 heads and goes further than sharing. It keeps *one* short vector c for a token and layer, of 512 numbers, and each head
# makes its key and its value from it with a matrix of its own. This is [multi-head latent attention, MLA](glossary.md#mla).
# It even need not make the keys: a score is q · (W c), and that equals (Wᵀ q) · c, so the query goes to the summary instead.

# %% id="mla-by-hand" tags=["nbval-check-output"]
q1 = torch.randn(8, 6, 32, dtype=torch.float64)  # 8 heads, 6 tokens
up = torch.randn(8, 32, 48, dtype=torch.float64)  # each head's matrix: from the summary to a key
c = torch.randn(6, 48, dtype=torch.float64)  # one summary of 48 numbers a token: all that is kept
keys = torch.einsum("hdl,tl->htd", up, c)  # every head's keys, made from it
with_keys = q1 @ keys.transpose(1, 2)
without_keys = (q1 @ up) @ c.T
assert torch.allclose(with_keys, without_keys)
print(f"same scores; kept: {c.numel()} numbers")
print(f"keys and values of 8 heads would be {2 * keys.numel():,}")

# %% [markdown] id="mla-formula-words"
# The position of a token is turned into its keys by a rotation (see the [appendix](appendix_transformer.ipynb)), and that would stand between the two matrices.
# So MLA keeps 64 further numbers, a small key that carries the position and that all heads share. In all:
# **layers x (512 + 64) x bytes a number**. There is no factor 2, since the one vector serves K and V.

# %% id="mla-formula" tags=["nbval-check-output"]
deepseek = PRESETS["deepseek-v3"]
mla_numbers = deepseek.layers * (512 + 64)
print(f"DeepSeek-V3 in bf16: {with_unit(2 * mla_numbers)} a token")
print(f"K and V of {deepseek.head_dim} numbers for each of its {deepseek.heads} heads would be")
print(with_unit(2 * numbers_a_token(deepseek)))
assert 2 * mla_numbers == deepseek.kv_bytes_per_token("bf16")

# %% id="figure-weights" tags=["hide-input"]
shown = sorted([*known, deepseek], key=lambda shape: shape.kv_bytes_per_token("bf16"))
hatches = {"MHA": "", "GQA": "////", "MLA": "...."}
fig, ax = plt.subplots(figsize=(7.5, 3.9))
for row, shape in enumerate(shown):
    kib = shape.kv_bytes_per_token("bf16") / 1024
    color = "#9a9a9a" if shape.attention == "MHA" else "white"
    ax.barh(row, kib, color=color, edgecolor="#1f1f1f", hatch=hatches[shape.attention])
    ax.text(kib + 5, row, f"{round(kib, 1):g} KiB, {shape.attention}", va="center", fontsize=9)
ax.set_yticks(range(len(shown)), [f"{shape.name} ({shape.layers} layers)" for shape in shown])
ax.set_xlim(0, 620)
ax.set_xlabel("KiB of K and V a token, bf16")
ax.set_title("What one token leaves in the cache")
ax.grid(axis="x")
ax.grid(visible=False, axis="y")
plt.show()
old, new, large = PRESETS["llama-2-7b"], PRESETS["llama-3.1-8b"], PRESETS["llama-3.1-70b"]
kib = {shape.name: shape.kv_bytes_per_token() / 1024 for shape in (old, new, large, deepseek)}
note(
    f"**What to see.** The size of a model says little. {large.name} has "
    f"{large.parameters / old.parameters:.0f} times the parameters of {old.name}, yet a token weighs "
    f"{kib[large.name]:g} KiB instead of {kib[old.name]:g}: {large.layers} layers, but "
    f"{large.kv_heads} KV heads instead of {old.kv_heads}. GQA alone made {new.name} "
    f"{kib[old.name] / kib[new.name]:g} times lighter than its forerunner, and DeepSeek-V3, the largest "
    f"of all, is at {kib[deepseek.name]:.1f} KiB."
)

# %% [markdown] id="dtype"
# ## The last factor: bytes a number
#
# The first factors are the model's. The last one is yours: the [dtype of the cache](glossary.md#cache-dtype). What a model
# computes in float32 or bf16 may be *kept* in less. Let us do it to real keys: those of the bundled model's last layer.
#
# Four bits can say 16 values, so int4 needs a **scale**: for every 32 numbers, one 2-byte number that says how large they are.


# %% id="int4"
def to_int4(x):
    """x as 4-bit numbers, two in a byte, and one float16 scale for every 32 of them."""
    groups = x.reshape(-1, 32)
    scale = (groups.abs().amax(1, keepdim=True) / 7).half()
    numbers = ((groups / scale.float()).round().clamp(-8, 7) + 8).to(torch.uint8)
    return numbers[:, ::2] | numbers[:, 1::2] << 4, scale


def from_int4(packed, scale):
    numbers = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    return (numbers.float() - 8) * scale.float()


# %% id="dtypes"
k = kv.last_k.reshape(-1, 32)  # keys as the model computed them: float32
packed, scale = to_int4(k)
stored = {
    "float32": (k.nbytes, k),
    "bf16": (k.to(torch.bfloat16).nbytes, k.to(torch.bfloat16).float()),
    "fp8": (k.to(torch.float8_e4m3fn).nbytes, k.to(torch.float8_e4m3fn).float()),
    "int4": (packed.nbytes + scale.nbytes, from_int4(packed, scale)),
}
print(f"{'dtype':<9}{'bytes a number':>15}{'error of a number, typically':>31}")
for name, (size, back) in stored.items():
    error = ((back - k).square().mean() / k.square().mean()).sqrt()
    print(f"{name:<9}{size / k.numel():>15g}{error:>30.2%}")

# %% [markdown] id="dtype-words"
# A number of 4 bits costs a little more than half a byte, because of its share of the scale. What such errors do to the *answers* is another question, and
# one that has to be tested model by model. Many servers run with an fp8 cache, with or without scales fitted to the model; 4 bits need more care.
# Whoever quotes a weight without its dtype has said half of it. That brings us to the figures that other people publish.

# %% [markdown] id="audit-talk"
# ## Audit: sums that were published
#
# Three widely read sources do this arithmetic in passing. Each figure below is computed again, from the shape. First a talk about serving
# Qwen3-4B (36 layers, 8 KV heads, head_dim 128).

# %% id="audit-72-kb"
qwen = PRESETS["qwen3-4b"]
for dtype in ("bf16", "fp8"):
    print(f"{dtype}: {with_unit(kv_bytes(qwen, 1, kv_dtype=dtype))} a token")
claim("72-kb-a-token", kv_bytes(qwen, 1), source="talk")

# %% id="audit-128"
claim("128-dimensional-embedding", qwen.hidden, source="talk")
note(
    f"{qwen.hidden:,} / {qwen.head_dim} = {qwen.hidden // qwen.head_dim}; and {qwen.heads} heads of "
    f"{qwen.head_dim} are {qwen.heads * qwen.head_dim:,}, so in this model heads x head_dim is not even "
    "the width of the hidden state. Remember that for the war story."
)

# %% id="audit-20000"
for count in (20_000, 22_800):
    print(f"{count:,} tokens in fp8: {with_unit(kv_bytes(qwen, count, kv_dtype='fp8'))}")
claim("20000-tokens-1.6-gb", kv_bytes(qwen, 20_000, kv_dtype="fp8"), source="talk")

# %% [markdown] id="audit-blog"
# Next a blog post, about "a 7B model". With 32 layers, 32 KV heads and head_dim 128, that is Llama-2-7B.

# %% id="audit-half-mb"
llama = PRESETS["llama-2-7b"]
claim("half-a-mb-a-token", kv_bytes(llama, 1), source="blog")

# %% id="audit-1k"
claim("1k-tokens-512-mb", kv_bytes(llama, 1024), source="blog")

# %% id="audit-50-gb"
claim("100-requests-50-gb", kv_bytes(llama, 1024, requests=100), source="blog")

# %% id="audit-a100"
weights = 2 * llama.parameters
print(f"weights in bf16: {with_unit(weights)}")
claim("50-gb-on-an-a100", weights + kv_bytes(llama, 1024, requests=100), source="blog")

# %% [markdown] id="audit-explainer"
# Last an explainer, about Qwen2.5-72B (80 layers, 8 KV heads for 64 heads, head_dim 128) and "32K" tokens, that is 32,768.

# %% id="audit-72b"
qwen72 = PRESETS["qwen2.5-72b"]
print(f"with all {qwen72.heads} heads kept: {with_unit(kv_bytes(qwen72, 32_768) * qwen72.group)}")
claim("qwen-72b-32k", kv_bytes(qwen72, 32_768), source="explainer")

# %% id="audit-weights"
weights72 = 2 * qwen72.parameters
enough = {context: weights72 / kv_bytes(qwen72, context) for context in (32_768, 4_096)}
print(f"weights: {with_unit(weights72)}")
for context, n in enough.items():
    print(f"{n:.1f} requests of {context:,} tokens have as much K and V")
claim("hundreds-exceed-the-weights", math.floor(enough[32_768]) + 1, source="explainer")

# %% id="figure-crossing" tags=["hide-input"]
requests = list(range(1, 161))
fig, ax = plt.subplots()
ax.axhline(weights72 / 1e9, color="#1f1f1f", linewidth=1.5)
ax.text(70, weights72 / 1e9 + 5, f"weights, {weights72 / 1e9:.0f} GB", fontsize=9)
for context, style, place in ((32_768, "-", 28), (8_192, "--", 100), (4_096, ":", 60)):
    line = [kv_bytes(qwen72, context, n) / 1e9 for n in requests]
    ax.plot(requests, line, linestyle=style, color="#1f1f1f", marker="")
    words = f"{context // 1024}K tokens each"
    at = (place, line[place - 1])
    ax.annotate(words, at, xytext=(7, -14), textcoords="offset points", fontsize=9)
ax.set_ylim(0, 360)
ax.set_xlim(0, 160)
ax.set_xlabel("requests at the same time")
ax.set_ylabel("GB (10⁹ bytes)")
ax.set_title("Qwen2.5-72B in bf16: K and V against the weights")
plt.show()
long, short = (math.floor(enough[context]) + 1 for context in (32_768, 4_096))
note(
    "**What to see.** The weights are paid once, K and V by every request. At 32K tokens the cache is "
    f'the larger half from request {long} on, at 4K from {short}. "Hundreds" is right for short requests '
    "only."
)

# %% [markdown] id="fit"
# ## How many fit?
#
# A GPU must hold the weights first. What is left, divided by the weight of a conversation, is how many can be under way at the same time. If all
# of them begin with the same text, its K and V might be stored once for all (chapter 6 shows how): then a conversation weighs only what is its own.


# %% id="fits-by-hand"
def how_many_fit(shape, gpu, tokens, shared=0, dtype_bytes=1):
    """Conversations of `tokens` tokens, of which the first `shared` are stored once, beside the weights (same dtype)."""
    left = gpu.memory_bytes - shape.parameters * dtype_bytes
    room = left // (numbers_a_token(shape) * dtype_bytes)  # in tokens
    return max(0, int((room - shared) // (tokens - shared)))


# %% [markdown] id="fits-words"
# The talk's conversation at its longest: 22,800 tokens, 10,000 of them the same for everyone. Weights and cache in fp8, a byte a number.

# %% id="fits-table" tags=["nbval-check-output"]
print(f"{'GPU':<9}{'GB':>5}{'each on its own':>18}{'sharing 10,000':>17}")
for name, gpu in HARDWARE.items():
    alone, sharing = how_many_fit(qwen, gpu, 22_800), how_many_fit(qwen, gpu, 22_800, shared=10_000)
    print(f"{name:<9}{gpu.memory_bytes / 1e9:>5.0f}{alone:>18}{sharing:>17}")

# %% [markdown] id="fits-command"
# The engine has this as a command. It needs no GPU and no weights, only the shape:

# %% id="size-command" tags=["nbval-check-output"]
command = "-m minikv size qwen3-4b --tokens 22800 --shared-tokens 10000 --kv-dtype fp8"
command += " --weight-dtype fp8"
print("python", command)
run = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, check=True)
print(run.stdout)

# %% [markdown] id="fits-caution"
# Real servers fit fewer: they keep a tenth of the memory or so for themselves, need room for what a step computes on the way (its *activations*), and
# often keep the embedding in 16 bits. Chapter 8 does this for the L4 with care.
#
# ## From bytes to seconds
#
# So bytes decide how many fit. They also decide how fast it goes. A processor does two things in a step: it **moves** bytes from memory
# to where they are computed with, and it **computes** with them. It can do both at the same time, so a step takes at least as long as the slower of
# the two. That simple picture is called the [roofline](glossary.md#roofline).
#
# Count both for one step. A step has some *new* tokens of some *sequences* (a sequence is one text under way: a prompt and its answer so far). Each sequence has a *context*, all tokens that it has by then.
#
# - **Bytes.** Every weight is read once, *however many tokens are in the step*. K and V of every context are read (or, for the new tokens, written) once.
# - **FLOPs** (multiplications and additions). Every new token is multiplied with every matrix: 2 for each number in it. And every query head
#   multiplies with each key that it sees, and adds up as many values: 4 x head_dim for each such pair.
#
# (What a layer hands to the next is small beside these, and left out.)


# %% id="count-by-hand"
def step_bytes(shape, pieces, bytes_a_number=4):
    """pieces: (new tokens, context) of each sequence in the step."""
    contexts = sum(context for _, context in pieces)
    return (shape.parameters + contexts * numbers_a_token(shape)) * bytes_a_number


def step_flops(shape, pieces, rows):
    """rows: tokens whose logits are wanted; a prefill wants those of its last token only."""
    q, k, h = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    layer = h * q + 2 * h * k + q * h  # the matrices of q, of k and v, and behind attention
    layer += 3 * h * shape.ffn  # the three of the feed-forward network
    new = sum(n for n, _ in pieces)
    matrices = 2 * (new * shape.layers * layer + rows * h * shape.vocab)
    # A new token sees all that was there before, and the new ones up to itself: a triangle.
    pairs = sum(n * (context - n) + n * (n + 1) // 2 for n, context in pieces)
    return matrices + 4 * shape.layers * q * pairs


# %% [markdown] id="count-check-words"
# Believe no formula that has not been held against something real. torch can count the operations of the products that it runs,
# and the weights can be asked for their size.

# %% id="count-check" tags=["nbval-check-output"]
from torch.utils.flop_counter import FlopCounterMode

shape, n = model.shape, 100
with FlopCounterMode(display=False) as counter:
    minikv.logits(model, list(range(1, n + 1)))  # one prefill of 100 tokens, logits of all of them
counted = counter.get_flop_counts()["Global"]
attention = attention_flops(shape, n, n)
assert counted[torch.ops.aten.mm] == step_flops(shape, [(n, n)], rows=n) - attention
weights = sum(w.nbytes for _, w in model.named_weights())
assert step_bytes(shape, [(n, n)]) == weights + n * numbers_a_token(shape) * 4
print(f"weights: {counted[torch.ops.aten.mm]:,} FLOPs, counted by torch and by hand")
print(f"attention: {counted[torch.ops.aten.bmm]:,} FLOPs run, {attention:,} needed")

# %% [markdown] id="count-caution"
# The products with the weights agree to the last operation. Attention ran about twice as many as it needs, because this plain version computes
# the whole square of scores and then masks half of it away. A good *kernel* (the routine that does the arithmetic of one such operation) skips that half; we count what is needed.
#
# The number that matters is the ratio: FLOPs for each byte moved, the step's
# [arithmetic intensity](glossary.md#arithmetic-intensity). Take a model of more than 100 million parameters. (Random weights will do: multiplying them takes as long as trained ones.
# The bundled model would mislead, because it is so small that it fits into a processor's own cache, where "memory" is much faster.)

# %% id="big-model"
BIG = ModelShape(
    name="big", layers=8, hidden=1024, heads=16, kv_heads=4, head_dim=64, vocab=8192, ffn=3072
)
big = minikv.load(shape=BIG, seed=0)
millions, megabytes = BIG.parameters / 1e6, step_bytes(BIG, []) / 1e6
print(f"{millions:.0f} million parameters, {megabytes:.0f} MB of weights")

# %% id="steps" tags=["nbval-check-output"]
DECODE = {f"decode {b} x 1": [(1, 64)] * b for b in (1, 4, 8, 16, 32, 64)}
LONG = {"decode 8 x 1, long": [(1, 2048)] * 8}
PREFILL = {f"prefill 1 x {n}": [(n, n)] for n in (16, 64, 256, 512)}
STEPS = DECODE | LONG | PREFILL
print(f"{'step':<20}{'new tokens':>11}{'MB moved':>10}{'GFLOP':>8}{'FLOPs a byte':>14}")
for name, pieces in STEPS.items():
    size, flops = step_bytes(BIG, pieces), step_flops(BIG, pieces, rows=len(pieces))
    count = sum(n for n, _ in pieces)
    print(f"{name:<20}{count:>11}{size / 1e6:>10.0f}{flops / 1e9:>8.1f}{flops / size:>14.1f}")

# %% [markdown] id="steps-words"
# Read the table by columns. From one request to 64, the bytes hardly change while the FLOPs grow 64-fold. And a decode step of 16 requests
# is nearly the same work as a prefill of 16 tokens: the machine does not care whose tokens they are. "Decode" is slow because
# it *has only one token a request*, not because it is decode. In the row "long", eight requests with 2,048 tokens of context each: now K and V weigh in.
#
# ## The roof of this machine
#
# How fast can this machine move, and how fast compute? Measure both in the plainest way, the best of several tries: whatever
# disturbs a measurement only makes it slower.


# %% id="machine"
def best_seconds(function, seconds=0.25):
    best, until = math.inf, perf_counter() + seconds
    while perf_counter() < until:
        start = perf_counter()
        function()
        best = min(best, perf_counter() - start)
    return best


def measure_machine():
    """(bytes read a second, bytes copied a second, float32 operations a second)."""
    data, other = torch.ones(32 * 2**20), torch.zeros(32 * 2**20)  # 134 MB: more than most caches
    rows, vector = data.view(-1, 1024), torch.ones(1024)
    read = data.nbytes / min(best_seconds(data.sum), best_seconds(lambda: rows @ vector))
    copied = 2 * data.nbytes / best_seconds(lambda: other.copy_(data))  # bytes read and written
    # Two products, a square one and one of the model's own: the machine may like one better.
    flops = max(product_rate(1024, 1024, 1024), product_rate(512, BIG.hidden, 2 * BIG.ffn))
    return read, copied, flops


def product_rate(m, k, n):
    x, w = torch.randn(m, k), torch.randn(n, k)
    ways = (lambda: x @ w.T, lambda: w @ x.T)  # the same product, asked for in two ways
    return 2 * m * k * n / min(best_seconds(way) for way in ways)


before = measure_machine()
print(f"read {before[0] / 1e9:.1f} GB/s, copy {before[1] / 1e9:.1f} GB/s")
print(f"matrix products {before[2] / 1e9:.0f} GFLOP/s")

# %% [markdown] id="measure-words"
# Now the steps themselves, on the real engine. `step_times_s` runs a step over the same (new tokens, context) pieces and returns its seconds.
# How the engine puts many sequences into one step is the story of chapters 5 and 7; here it is only timed.

# %% id="measure"
from minikv.lab.this_machine import step_times_s

for name in ("decode 1 x 1", "prefill 1 x 16"):
    step_times_s(big, STEPS[name])  # warm up; a fresh machine compiles its kernels here
seconds = {
    name: min(step_times_s(big, pieces, at_least=1, seconds=1.0 if name in PREFILL else 0.4))
    for name, pieces in STEPS.items()
}
after = measure_machine()  # once more, in case something disturbed the first time


def cost(shape, pieces):
    return step_bytes(shape, pieces), step_flops(shape, pieces, rows=len(pieces))


def ms(value, width, digits=0):
    return f"{value * 1e3:>{width},.{digits}f}"


# The roof is the best that was seen, be it in a measurement or in a step itself.
steps = [(*cost(BIG, pieces), seconds[name]) for name, pieces in STEPS.items()]
MOVE = max(*before[:2], *after[:2], *(size / time for size, _, time in steps))
FLOPS = max(before[2], after[2], *(flops / time for _, flops, time in steps))
print(f"roof: {MOVE / 1e9:.1f} GB/s, {FLOPS / 1e9:.0f} GFLOP/s")
print()
print("milliseconds        moving  computing  at least  measured  of the limit")
for name, (size, flops, time) in zip(STEPS, steps, strict=True):
    move, compute = size / MOVE, flops / FLOPS
    least = max(move, compute)
    times = f"{ms(move, 6)}{ms(compute, 11)}{ms(least, 10)}{ms(time, 10)}"
    print(f"{name:<20}{times}{least / time:>14.0%}")

# %% id="answer-batch"
compare("ch3-batch-of-16", seconds["decode 16 x 1"] / seconds["decode 1 x 1"], "times")

# %% id="figure-time" tags=["hide-input"]
fig, ax = plt.subplots(figsize=(7.5, 3.6))
tokens_a_step = [2 ** (i / 4) for i in range(37)]
once = step_bytes(BIG, []) / MOVE * 1e3
each = step_flops(BIG, [(1, 1)], 0) / FLOPS * 1e3
ink = "#1f1f1f"
ax.plot(tokens_a_step, [once] * 37, linestyle="--", color="#767676", marker="")
ax.text(90, once * 0.8, "all weights moved once", fontsize=9, va="top")
ax.plot(tokens_a_step, [n * each for n in tokens_a_step], linestyle=":", color=ink, marker="")
ax.text(2.6, each * 2.2, "all tokens multiplied", fontsize=9, va="top")
for group, label, marker, face in (
    (DECODE, "decode", "o", ink),
    (PREFILL, "prefill", "s", "white"),
):
    x = [sum(n for n, _ in pieces) for pieces in group.values()]
    y = [seconds[name] * 1e3 for name in group]
    ax.plot(x, y, marker, color=ink, linestyle="none", mfc=face, ms=7, label=f"{label}, measured")
ax.set_xscale("log", base=2)
ax.set_yscale("log")
ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
ax.set_xlabel("new tokens in the step")
ax.set_ylabel("ms a step")
ax.set_title("One step of the 105 M model on this machine")
ax.legend(loc="upper left", bbox_to_anchor=(0.16, 1))
plt.show()
first, four = seconds["decode 1 x 1"], seconds["decode 4 x 1"]
note(
    "**What to see.** To the right of where the lines cross, the points climb along the steeper one. (That "
    "none lies below the higher line proves nothing: the roofs are the best that was seen, these steps "
    "included.) On the left, moving the weights sets the pace and further tokens can ride "
    f"along: 4 times the tokens took {four / first:.1f} times as long on the machine that built this "
    "page. On the right, computing sets it, and every token costs. Circles and squares go together: "
    "what counts is the number of tokens in the step, not its name."
)

# %% [markdown] id="two-bounds"
# Where moving decides, a step is [memory-bound](glossary.md#memory-bound): decode with few requests. Where computing decides, it is
# [compute-bound](glossary.md#compute-bound): the prefill of a long prompt. That is why chapter 2's first token takes so long, and why decoding many requests together
# costs so little: up to the bend, further requests ride along.
#
# ## And when nothing decides
#
# There is a third region. A step also has costs that are neither bytes nor FLOPs: Python, calls, threads that have to be woken; on a GPU, launching
# each kernel. Small models drown in it. Same steps, three models:

# %% id="tiny"
TINY = ModelShape(
    name="tiny", layers=4, hidden=32, heads=2, kv_heads=1, head_dim=16, vocab=256, ffn=64
)
tiny = minikv.load(shape=TINY, seed=0)
small = {}  # (model's name, step's name): seconds
for each in (tiny, model):
    for name in ("decode 1 x 1", "decode 16 x 1", "prefill 1 x 64"):
        small[each.shape.name, name] = min(step_times_s(each, STEPS[name], seconds=0.2, at_least=4))
taken = small | {(BIG.name, name): time for name, time in seconds.items()}
print("milliseconds   parameters            step  at least  measured  the rest")
for shape in (TINY, model.shape, BIG):
    for name in ("decode 1 x 1", "prefill 1 x 64"):
        size, flops = cost(shape, STEPS[name])
        least, time = max(size / MOVE, flops / FLOPS), taken[shape.name, name]
        rest = max(0, 1 - least / time)
        sizes = f"{shape.name:<14}{shape.parameters:>11,}{name:>16}"
        print(f"{sizes}{ms(least, 10, 3)}{ms(time, 10, 2)}{rest:>10.0%}")
smaller = BIG.parameters / TINY.parameters
faster = taken[BIG.name, "decode 1 x 1"] / taken[TINY.name, "decode 1 x 1"]
note(
    f"The tiny model has {smaller:,.0f} times fewer parameters than the big one. If bytes decided, its "
    f"decode step would be {smaller:,.0f} times faster. It is {faster:,.0f} times faster."
)

# %% [markdown] id="overhead"
# "The rest" is what neither bytes nor FLOPs explain. Part of it, in any model, are kernels that do not reach the roof. But when it is nearly everything, as in the
# tiny model, the step is [overhead-bound](glossary.md#overhead-bound): a faster memory would change little, doing fewer and larger things would. Engines on GPUs record a whole decode step once and replay it
# (CUDA graphs) for this reason.
#
# ## The roofline
#
# Put everything into one picture: FLOPs a byte to the right, operations a second upwards. The roof is the slower of the two limits, and every step is
# a point under it.

# %% id="figure-roofline" tags=["hide-input"]
fig, ax = plt.subplots(figsize=(7.5, 4.6))
roof = [0.3, FLOPS / MOVE, 400]
heights = [min(FLOPS, x * MOVE) / 1e9 for x in roof]
ax.loglog(roof, heights, color=ink, linestyle="-", marker="", linewidth=1.8)
ax.text(0.33, 1.5 * MOVE / 1e9, f"memory: {MOVE / 1e9:.0f} GB/s", fontsize=9, va="bottom")
ax.text(390, heights[1] * 1.12, f"compute: {heights[1]:.0f} GFLOP/s", fontsize=9, ha="right")


def points(shape, chosen, marker, face, label):
    at = [cost(shape, STEPS[name]) for name in chosen]
    x = [flops / size for size, flops in at]
    y = [at[i][1] / taken[shape.name, name] / 1e9 for i, name in enumerate(chosen)]
    ax.plot(x, y, marker, color=ink, linestyle="none", mfc=face, ms=7, label=label)
    return zip(x, y, strict=True)


def label(place, words, offset):
    ax.annotate(words, place, xytext=offset, textcoords="offset points", fontsize=8, ha="center")


decodes = points(BIG, DECODE, "o", ink, "105 M, decode")
for place, batch in zip(decodes, (1, 4, 8, 16, 32, 64), strict=True):
    label(place, batch, (-9, 7))
prefills = points(BIG, PREFILL, "s", "white", "105 M, prefill")
for place, count in zip(prefills, (16, 64, 256, 512), strict=True):
    label(place, count, (9, -13))
for place in points(BIG, LONG, "D", "#9a9a9a", "105 M, decode, 2,048 tokens each"):
    label(place, "8", (6, -13))
for shape, marker in ((model.shape, "^"), (TINY, "v")):
    name = "bundled model" if shape is model.shape else "tiny model"
    list(points(shape, ("decode 1 x 1", "decode 16 x 1", "prefill 1 x 64"), marker, "white", name))
ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
ax.set_xlabel("FLOPs for each byte that the step moves")
ax.yaxis.set_minor_formatter(lambda value, _: "")
ax.set_ylabel("GFLOP/s reached")
ax.set_title("This machine's roof, and what the engine makes of it (numbers: tokens in the step)")
ax.set_ylim(top=heights[1] * 2)
ax.legend(loc="lower right", fontsize=8)
plt.show()
ridge = FLOPS / MOVE
(long_size, long_flops), (short_size, short_flops) = (
    cost(BIG, STEPS[name]) for name in ("decode 8 x 1, long", "decode 8 x 1")
)
long_x, short_x = long_flops / long_size, short_flops / short_size
note(
    f"**What to see.** The roof bends at {ridge:.1f} FLOPs a byte. Left of it lies decode with few "
    "requests, right of it prefill. More requests move a step to the right and up. Long contexts move it "
    f"back: with 2,048 tokens each (diamond), the eight requests do {long_x:.1f} FLOPs a byte instead of "
    f"{short_x:.1f}, because their K and V are moved as well and nobody shares them. The tiny model "
    "(triangles pointing down) stays far below the roof: overhead. The bundled model's "
    f"{step_bytes(model.shape, []) / 1e6:.0f} MB can stay in a processor's cache, so this memory roof is "
    "not its own, and it may even stick out of it."
)

# %% [markdown] id="gpus"
# ## The same roof on a GPU
#
# Your machine is small, but the picture scales. For a GPU, take both roofs from its data sheet (dense bf16). The last columns ask how many requests of
# Llama-3.1-8B, weights and cache in bf16, a decode step needs before it is compute-bound. (Each further request adds the same FLOPs and the same bytes, so a division gives the number. `step_cost` is the
# engine's way to count a step, shown below.)


# %% id="needed"
def needed_requests(shape, ridge, context):
    """Requests from which on a decode step has `ridge` FLOPs a byte; None if no number of them is enough."""
    one, two = (step_cost(shape, [(1, context)] * n, n, "bf16") for n in (1, 2))
    flops, more = two.flops - one.flops, two.bytes - one.bytes  # what each further request brings
    if flops <= ridge * more:
        return None
    return math.ceil(ridge * (one.bytes - more) / (flops - ridge * more))


# %% id="gpu-table" tags=["nbval-check-output"]
contexts = (16, 256, 1024, 8192)
print("                          FLOPs   requests needed (that fit), context of")
print("GPU        GB/s TFLOP/s  a byte" + "".join(f"{context:>15,}" for context in contexts))
for gpu in HARDWARE.values():
    gb, tflop = gpu.bytes_per_s / 1e9, gpu.peak_flops_per_s / 1e12
    line = f"{gpu.name:<9}{gb:>6,.0f}{tflop:>8,.0f}{gpu.flops_per_byte:>8.0f}"
    for context in contexts:
        need = needed_requests(new, gpu.flops_per_byte, context)
        fit = fitting_requests(new, int(gpu.memory_bytes - 2 * new.parameters), context)
        words = "never" if need is None else f"{need:,}"
        line += f"{words} ({fit:,})".rjust(15)
    print(line)

# %% [markdown] id="gpu-words"
# With hardly any context, the rule of thumb holds: in bf16 every weight is 2 bytes and 2 FLOPs a token, so a step of *n* tokens has about *n* FLOPs a byte,
# and it takes as many requests as the GPU has FLOPs a byte. But read on to the right. Where fewer fit than are needed, the memory is full first. And then it says never: weights are moved once for all; **K and V are each
# request's own**, and every further request brings its bytes along. With ever more requests the step does not come nearer to the bend of the roof (the *ridge*) than its K and V allow.

# %% id="figure-gpu" tags=["hide-input"]
h100 = HARDWARE["h100"]
fig, ax = plt.subplots(figsize=(7.5, 3.8))
ax.axhline(h100.flops_per_byte, color="#1f1f1f", linewidth=1.5)
ax.text(
    1.1,
    h100.flops_per_byte * 1.1,
    f"compute-bound above {h100.flops_per_byte:.0f}, H100",
    fontsize=9,
)
for context, style in ((16, "-"), (1024, "--"), (8192, "-."), (65_536, ":")):
    fit = fitting_requests(new, int(h100.memory_bytes - 2 * new.parameters), context)
    most = min(fit, 512)
    n = sorted({round(most ** (i / 30)) for i in range(31)})
    costs = [step_cost(new, [(1, context)] * each, each, "bf16") for each in n]
    ratio = [each.flops / each.bytes for each in costs]
    ax.loglog(n, ratio, linestyle=style, color="#1f1f1f", marker="")
    ax.plot(n[-1], ratio[-1], marker="x" if most == fit else "", color="#1f1f1f", markersize=8)
    words = f"{context:,} tokens each"
    words += f", {fit} fit" if most == fit else ""
    ax.annotate(words, (n[-1], ratio[-1]), xytext=(6, -3), textcoords="offset points", fontsize=8)
ax.set_xlim(1, 4000)
ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
ax.set_xlabel("requests in a decode step")
ax.set_ylabel("FLOPs a byte")
ax.set_title("Llama-3.1-8B, bf16: what more requests buy (x: the memory is full)")
plt.show()
limit = max(n for n in range(1, 4096) if needed_requests(new, h100.flops_per_byte, n))
note(
    "**What to see.** Each curve bends and flattens where K and V outweigh the weights, and it ends where "
    "the memory is full. On the H100 no number of requests makes decoding compute-bound once they have more than "
    f"{limit:,} tokens of context. For real conversations with a model like this decode is memory-bound, and "
    "a lighter token (fewer KV heads, fp8) is also a faster one. (MLA is a case apart: all its heads multiply "
    "with the same few bytes, so its attention has far more FLOPs a byte.)"
)

# %% [markdown] id="widget-words"
# ## See it: does it fit, and how fast is it?
#
# Choose a model, a GPU, and how many requests of which length. Above, the memory; below, the decode step on the GPU's roofline. Use Tab and
# the arrow keys. Try:
#
# - double the requests until the memory overflows, then switch K and V to fp8;
# - 512 tokens a request and ever more requests, until the point reaches the bend; then 8,192 tokens: how far does it get?
# - Llama-2-7B (MHA) against Llama-3.1-8B (GQA) with the same requests.
#
# (For the L4 the picture takes a rate that was reached in practice; the table above takes the data sheet's, as for the others.)

# %% id="widget"
from minikv.classroom.explorers import kv_calculator

explore(kv_calculator.draw, **kv_calculator.CONTROLS)

# %% [markdown] id="war-story"
# ## War story: the calculator
#
# You want to plan a server for Qwen3-4B. In its `config.json` you find these sizes, and you know that a head is a slice of the hidden state. Five lines:

# %% id="war-five-lines" tags=["nbval-check-output"]
config = {"num_hidden_layers": 36, "hidden_size": 2560}
config |= {"num_attention_heads": 32, "num_key_value_heads": 8}
head_size = config["hidden_size"] // config["num_attention_heads"]
estimate = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_size * 2
real = Paged(qwen, num_blocks=1, block_size=1, dtype=torch.bfloat16).block_bytes
print(f"estimated {estimate:,} bytes a token, allocated {real:,}")
print(f"the plan has {estimate / real:.1%} of what is needed")

# %% [markdown] id="war-words"
# No error, no crash, only a plan that runs out of memory. The slice is 80 numbers wide if you divide, and 128 in the model: nothing obliges a model to have
# heads x head_dim = hidden, and Qwen3-4B does not. The file says so in a further line, `head_dim`.
#
# Exactly this was in the public KV cache calculator of **LMCache**, a project whose whole subject is the KV cache ([issue 688](https://github.com/LMCache/LMCache/issues/688), May 2025,
# with Qwen3-4B as the example). The fix ([pull request 694](https://github.com/LMCache/LMCache/pull/694)) mended Qwen3, and in the same stroke gave DeepSeek-V3 the formula
# 2 x layers x 512: a factor 2 where the one vector serves K *and* V, and without the 64 numbers of position. Within a week
# [pull request 715](https://github.com/LMCache/LMCache/pull/715) took that back. In numbers:

# %% id="war-mla" tags=["nbval-check-output"]
print(f"after the fix:  {2 * deepseek.layers * 512 * 2:,} bytes a token of DeepSeek-V3")
print(f"put right:      {2 * mla_numbers:,}")
assert 2 * mla_numbers == 70_272  # the figure in pull request 715

# %% [markdown] id="war-more"
# Others had the same or its sister: a memory estimator in Unsloth took half the weight of Qwen3-0.6B for the same reason
# ([pull request 4757](https://github.com/unslothai/unsloth/pull/4757)), and an example script proposed for vLLM took the hidden size as the width of K and V, which was caught in
# review: 4 times too much for a model with GQA such as Llama-3-8B ([pull request 29736](https://github.com/vllm-project/vllm/pull/29736)).
#
# minikv has two answers. A shape has no default for `head_dim`: it is read from the file, and divided only if the file has no such line.
# And what the formula says is tested against `nbytes` of the tensors that are really allocated, as you did above.

# %% id="war-prevented" tags=["nbval-check-output"]
sizes = config | {"head_dim": 128, "vocab_size": 151_936, "intermediate_size": 9728}
assert from_config(sizes).kv_bytes_per_token("bf16") == real
print(f"from the whole config.json: {from_config(sizes).kv_bytes_per_token():,} bytes a token")
try:
    ModelShape(layers=36, hidden=2560, heads=32, kv_heads=8, vocab=151_936, ffn=9728)
except TypeError as wrong:
    print(f"without it: {str(wrong).split('.')[-1]}")

# %% [markdown] id="engine"
# ## The engine's version
#
# The weight of a token is a property of the shape. MLA is the one special case:

# %% id="source-numbers"
show_source(ModelShape.kv_numbers_per_token)

# %% id="source-bytes"
show_source(ModelShape.kv_bytes_per_token)

# %% [markdown] id="engine-step-words"
# And a step's bytes and FLOPs. Read it beside yours: it keeps weights and K and V apart, lets them have different dtypes, and counts the embedding
# more exactly (a model whose output head is a matrix of its own reads only the rows of the embedding that it looks up).

# %% id="source-step-cost"
show_source(step_cost)

# %% id="source-seconds"
show_source(StepCost.seconds)

# %% id="agree" tags=["nbval-check-output"]
for shape in known:
    for dtype, size in (("float32", 4), ("bf16", 2), ("fp8", 1), ("int4", 0.5 + 2 / 32)):
        assert shape.kv_bytes_per_token(dtype) == math.ceil(numbers_a_token(shape) * size)
for pieces in STEPS.values():
    engine = step_cost(BIG, pieces, rows=len(pieces), dtype="float32")
    assert (engine.bytes, engine.flops) == cost(BIG, pieces)
for gpu in HARDWARE.values():
    left = int(gpu.memory_bytes - qwen.parameters)
    engine = fitting_requests(qwen, left, 22_800, shared_tokens=10_000, kv_dtype="fp8")
    assert how_many_fit(qwen, gpu, 22_800, shared=10_000) == engine
print(f"weight of a token: {len(known)} models in 4 dtypes agree")
print(
    f"bytes and FLOPs of a step: all {len(STEPS)} agree; what fits: all {len(HARDWARE)} GPUs agree"
)

# %% [markdown] id="questions"
# ## Questions
#
# **1.** Somebody says that Mistral-7B must have a heavier cache than Llama-2-7B, because it is the newer and better model. What do you look at?
#
# <details><summary>Answer</summary>
#
# At four numbers: layers, KV heads, head_dim and the dtype. Both have 32 layers and head_dim 128, but Mistral-7B has 8 KV heads and Llama-2-7B has 32. A token
# of Mistral weighs a quarter (see the table above).
#
# </details>
#
# **2.** "Q is kept in the cache as well, so the factor should be 3." Is that so? (Think of chapter 2.)
#
# <details><summary>Answer</summary>
#
# No. A token's query is used once, in the step that computes the token, and never again: later tokens ask with queries of their own. What they read of earlier tokens is their keys
# and their values. So it is 2, for K and V; and it is not 1, which would make 72 KiB of Qwen3-4B's 144.
#
# </details>
#
# **3.** You estimate the cache of Qwen2.5-72B with 64 heads instead of 8 KV heads. By how much are you off, and what would you have bought?
#
# <details><summary>Answer</summary>
#
# By 64 / 8 = 8 times, too much. One request of 32K tokens would seem to need 80 GiB, a whole large GPU, where 10 GiB are enough.
#
# </details>
#
# **4.** In GQA, does attention for one token take fewer operations than in MHA with as many query heads? Does it take less time?
#
# <details><summary>Answer</summary>
#
# Not fewer operations: each query head still multiplies with every key that it sees. But fewer bytes, since a group of heads reads the same K and V. Decode is
# memory-bound, so it does take less time.
#
# </details>
#
# **5.** A colleague wants to halve the time of a decode step of one request by buying a GPU with twice the FLOP/s and the same bandwidth. What do you say?
#
# <details><summary>Answer</summary>
#
# It will hardly change. One request does about one FLOP for each byte in bf16, and GPUs have a hundred or more to spare: the step waits for bytes. More bandwidth helps; so do fewer bytes (weights in 8 bits,
# a lighter cache), and so do more requests in the same step, which makes no request faster but all of them together.
#
# </details>
#
# **6.** Is a decode step with a cache O(1), whatever the length of the context?
#
# <details><summary>Answer</summary>
#
# No. Its products with the weights are, but attention reads K and V of the whole context: bytes and FLOPs grow with every token. In our table, eight requests of 2,048 tokens moved much more than eight of 64. For short contexts the
# weights hide it.
#
# </details>

# %% [markdown] id="big-engines"
# ## In the big engines
#
# As of 2026; names move.
#
# | engine | weight of a token | where to look |
# |---|---|---|
# | vLLM | `AttentionSpec.real_page_size_bytes`: K and V of one layer and block; `MLAAttentionSpec` has no factor 2 | `vllm/v1/kv_cache_interface.py` |
# | SGLang | `MHATokenToKVPool` and `MLATokenToKVPool`, `get_kv_size_bytes` | `python/sglang/srt/mem_cache/memory_pool.py` |
# | Hugging Face transformers | `num_key_value_heads` in the config; `repeat_kv` makes the copies for attention kernels that want them, the cache keeps the few | `src/transformers/models/llama/modeling_llama.py`, `src/transformers/cache_utils.py` |
# | llama.cpp | `n_embd_k_gqa`, `n_embd_v_gqa`: numbers of K and of V a layer; the dtype by `--cache-type-k`, `--cache-type-v` | `src/llama-hparams.h`, `src/llama-kv-cache.cpp` |
#
# ## Sources
#
# - N. Shazeer, *Fast Transformer Decoding: One Write-Head is All You Need* (MQA), 2019, [arXiv 1911.02150](https://arxiv.org/abs/1911.02150).
# - J. Ainslie and others, *GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints*, 2023, [arXiv 2305.13245](https://arxiv.org/abs/2305.13245).
# - DeepSeek-AI, *DeepSeek-V2* (MLA), 2024, [arXiv 2405.04434](https://arxiv.org/abs/2405.04434); *DeepSeek-V3 Technical Report*, 2024, [arXiv 2412.19437](https://arxiv.org/abs/2412.19437).
# - S. Williams, A. Waterman, D. Patterson, *Roofline: An Insightful Visual Performance Model for Multicore Architectures*, Communications of the ACM 52 (4), 2009.
# - K. Shams (Momento), *Serving LLMs at Scale: The Hidden KV Cache Advantage*, QCon AI Boston 2026; S. Shubham, *How prompt caching works*, 2025; A. Chawla, *KV Caching in LLMs, clearly explained*.
# - LMCache issue 688, pull requests 694 and 715; Unsloth pull request 4757; vLLM pull request 29736 (all on GitHub).
# - Sizes of models from their `config.json`, rates of GPUs from their data sheets (dense bf16); the L4's effective rate from a published prefill of a 7B model.
#
# ## Next
#
# You can now say how many conversations *should* fit. But a conversation does not say in advance how long it will get, and memory handed out in one piece for each
# is memory that others cannot have. How much of it ends up empty is the question of [chapter 4, the car park](04_the_car_park.ipynb).
