# %% [markdown] id="title"
# # Appendix. The rest of the transformer
#
# [Back to chapter 1](01_one_token_at_a_time.ipynb) | [Glossary](glossary.md)
#
# Chapter 1 built one attention head and left the rest as a thing to read. Here it is, each part in a few lines: the
# residual stream, RMSNorm, RoPE, SwiGLU, the head that makes logits. At the end the parts are put together and give the
# engine's logits.
#
# **You will be able to** say what each line of minikv's forward pass does, and write it yourself.
#
# **You need** [chapter 1](01_one_token_at_a_time.ipynb). No later chapter needs this one.
#
# **Time** About 25 minutes to read; a few seconds to run.

# %% id="setup"
import math

import matplotlib.pyplot as plt
import torch

import minikv
from minikv.classroom.notebook import note, show_source

plt.style.use("minikv.show.course")
torch.set_grad_enabled(False)
shape = minikv.ModelShape(
    layers=3, hidden=64, heads=4, kv_heads=4, head_dim=16, vocab=200, ffn=160, qk_norm=True
)
model = minikv.load(shape=shape, seed=0, dtype=torch.float64)  # random weights
weights = dict(model.named_weights())
ids = torch.tensor([31, 41, 59, 26, 53, 58, 97, 93])
for name in list(weights)[:12]:
    print(f"{name:50s}", list(weights[name].shape))

# %% [markdown] id="names"
# These are the names that Hugging Face gives to the weights of such a model. The eleven of `model.layers.0` come again
# for each layer. A matrix is stored as `[outputs, inputs]`, so a product with it is `x @ W.T`.
#
# ## The residual stream
#
# A token's number picks a row of the embedding: its first hidden state. After that nothing is ever replaced. Each part
# of a layer *reads* the hidden state and *adds* its answer to it. What runs through the layers like this is called the
# **residual stream**.

# %% id="embedding" tags=["nbval-check-output"]
x = weights["model.embed_tokens.weight"][ids]  # [tokens, hidden]
print("x:", list(x.shape), "= [tokens, hidden]")

# %% [markdown] id="why-residual"
# Adding has two virtues. What one layer wrote, all later layers can still read. And in training the error signal runs
# back along the same sum undiminished, so that dozens of layers can be trained at all.
#
# ## RMSNorm
#
# A sum of many answers grows. So each part reads a rescaled copy: divide the row by its *root mean square*, so that the
# mean of its squares is 1, then multiply each column by a learned weight. A tiny constant keeps a row of zeros from
# dividing by zero. (We check it against the model's own `_norm`, and `_project` below. They are private, which the underscore
# says: look, but build nothing on them.)

# %% id="rms-norm" tags=["nbval-check-output"]
eps = shape.norm_eps


def rms_norm(x, weight):
    """x [..., size] with rows rescaled to a root mean square of 1, times weight [size]."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


learned = torch.linspace(0.5, 1.5, shape.hidden).double()  # any weights will do for the check
torch.testing.assert_close(rms_norm(x, learned), model._norm(x, learned), rtol=0, atol=1e-12)
row, ones = torch.tensor([[3.0, 4.0]]), torch.ones(2)
print("(3, 4) normed:    ", rms_norm(row, ones).numpy().round(3))
print("(300, 400) normed:", rms_norm(100 * row, ones).numpy().round(3))

# %% [markdown] id="rms-norm-said"
# The size of a row is gone, its direction is kept (until the learned weights stretch it). The stream itself is not touched: the norm makes a copy (chapter 1's
# war story is what happens when it does not).
#
# ## Queries, keys, values
#
# Three matrix products, cut into heads. This family of models (Qwen3) also norms each head's q and k, which keeps the
# scores from growing; others leave that step out.

# %% id="project" tags=["nbval-check-output"]
layer = "model.layers.0."
read = rms_norm(x, weights[layer + "input_layernorm.weight"])
q, k, v = (
    (read @ weights[layer + f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, shape.head_dim))
    for name in "qkv"
)  # [tokens, heads, head_dim] each
q = rms_norm(q, weights[layer + "self_attn.q_norm.weight"])
k = rms_norm(k, weights[layer + "self_attn.k_norm.weight"])
print("q:", list(q.shape), " k:", list(k.shape), " v:", list(v.shape))

# %% [markdown] id="rope"
# ## RoPE: where a token stands
#
# So far nothing says *where* a token stands. Shuffle the tokens before the last one, and in the first layer its
# attention gives the same sum. A head should be able to ask for "the word just before me". So each q and k is
# **turned** by an angle that grows with its position. This is rotary position embedding, RoPE.
#
# Take two numbers of a vector as a point in the plane, (a, b), and turn it by an angle t:
#
# (a cos t - b sin t, b cos t + a sin t)
#
# A vector of 16 numbers is 8 such pairs. Pair *i* is made of number *i* and number *i* + 8, and turns by its own speed
# for each position: the first pair by one radian, the last one hardly at all. Slow pairs tell far from near, quick ones
# tell neighbours apart.

# %% id="rotate" tags=["nbval-check-output"]
theta = shape.rope_theta  # 10,000 for all models of this page


def speeds(half):
    """Radians that each of ``half`` pairs turns by for one position: 1, then less and less."""
    return theta ** -(torch.arange(half, dtype=torch.float64) / half)


def rotate(x, positions):
    """x [tokens, heads, head_dim], each token's pairs turned by its position [tokens]."""
    a, b = x.chunk(2, dim=-1)  # pair i is (a[i], b[i])
    angle = positions[:, None, None] * speeds(a.shape[-1])  # [tokens, 1, half]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


positions = torch.arange(len(ids))
cos, sin = model.cos[positions], model.sin[positions]
q_engine, k_engine, v_engine = model._project(model.layers[0], read, cos, sin)
torch.testing.assert_close(rotate(q, positions), q_engine, rtol=0, atol=1e-12)
torch.testing.assert_close(rotate(k, positions), k_engine, rtol=0, atol=1e-12)
torch.testing.assert_close(v, v_engine, rtol=0, atol=1e-12)
print("q, k and v of layer 0 are those of the engine")

# %% [markdown] id="relative"
# ### Why only the distance counts
#
# A score is a product of a turned q and a turned k. The product of two points in the plane depends on their lengths and
# on the angle *between* them, and turning changes no length. Turn q by m steps and k by n steps: the angle between them
# has changed by m - n steps. So the score depends on the two vectors and on the distance **m - n**, not on where the
# two stand.
#
# With complex numbers it is one line. Write a pair as z = a + ib; turning by t multiplies it by exp(it). The product of
# two pairs is the real part of conj(z) w. So
#
# Re( conj(q exp(i m t)) k exp(i n t) ) = Re( conj(q) k exp(i (n - m) t) ).
#
# Try it: the same q and k, at different places, the same distance apart.

# %% id="relative-shown" tags=["nbval-check-output"]
q1, k1 = q[5:6, :1], k[2:3, :1]  # one query, one key, of head 0


def score(m, n):
    """The score of q1 at position m with k1 at position n."""
    return (rotate(q1, torch.tensor([m])) * rotate(k1, torch.tensor([n]))).sum().item()


for m, n in ((5, 2), (105, 102), (3005, 3002), (5, 1)):
    print(f"query at {m:4d}, key at {n:4d}, distance {m - n}: score {score(m, n):.9f}")
assert abs(score(5, 2) - score(3005, 3002)) < 1e-9
assert abs(score(5, 2) - score(5, 1)) > 1e-3

# %% [markdown] id="relative-figure"
# How does a score move with the distance? Take a key that equals the query, and look at all pairs together, at the
# first and at the last pair.

# %% id="figure-rope" tags=["hide-input"]
distance, speed = torch.arange(0, 65), speeds(shape.head_dim // 2)
pairs = (distance[:, None] * speed).cos()  # [distances, half]: the score of equal unit pairs
fig, ax = plt.subplots()
ax.plot(distance, pairs[:, 0], marker="", label="first pair (quickest)")
ax.plot(distance, pairs[:, -1], marker="", label="last pair (slowest)")
ax.plot(distance, pairs.mean(-1), marker="", label="mean of all pairs")
ax.set(xlabel="distance between query and key, in tokens", ylabel="score (1 = at the same place)")
ax.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.2))
plt.show()
turn = 2 * math.pi / speed
note(
    f"**What to see.** The first pair has turned round once after {turn[0]:.1f} tokens, the last one only "
    f"after {turn[-1]:,.0f}. For a key that equals the query the mean is largest at distance 0, "
    f"{pairs.mean(-1)[1]:.2f} at 1 and {pairs.mean(-1)[64]:.2f} at 64. The weights that make q and k decide "
    "how much of each pair a head uses."
)

# %% [markdown] id="rope-cache"
# One thing matters for the chapters to come: a key is turned *once*, by its own position, and never again. It can
# therefore be kept as it is.
#
# ## Attention, all heads
#
# Chapter 1's head, for each head; the results side by side, then one more matrix product, which mixes the heads and
# brings the row back to the width of the stream. (In some models, the bundled one for example, several heads share a
# key and a value. That is chapter 3; the line with `group` below is all it takes.)

# %% id="attention" tags=["nbval-check-output"]
from minikv.cache.attention.reference import attend_one


def one_head(q, k, v):
    """Causal attention of one head, from chapter 1; q, k, v [tokens, head_dim]."""
    scores = q @ k.T / math.sqrt(q.shape[1])
    future = torch.ones_like(scores, dtype=torch.bool).triu(diagonal=1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ v


def all_heads(q, k, v):
    """[tokens, heads * head_dim]: the heads' outputs side by side."""
    group = q.shape[1] // k.shape[1]  # 1, unless heads share
    heads = range(q.shape[1])
    return torch.cat([one_head(q[:, h], k[:, h // group], v[:, h // group]) for h in heads], -1)


q, k = rotate(q, positions), rotate(k, positions)
engine = attend_one(q, k.transpose(0, 1), v.transpose(0, 1)).flatten(1)
torch.testing.assert_close(all_heads(q, k, v), engine, rtol=0, atol=1e-12)
x = x + all_heads(q, k, v) @ weights[layer + "self_attn.o_proj.weight"].T  # into the stream
print("attention agrees; x:", list(x.shape))

# %% [markdown] id="swiglu"
# ## SwiGLU: each token by itself
#
# The second half of a layer is a small network that sees one row at a time. Two matrices make two wide rows, *gate* and
# *up*. The gate goes through a smooth switch, silu(g) = g / (1 + exp(-g)): nearly 0 for very negative numbers, nearly g
# for large ones. The product says how much of each number of *up* passes. A third matrix, *down*, brings it back to the
# width of the stream.

# %% id="swiglu-made" tags=["nbval-check-output"]
g = torch.tensor([-5.0, -1.0, 0.0, 1.0, 5.0])
print("silu of", g.numpy(), "is", (g / (1 + (-g).exp())).numpy().round(2))


def swiglu(x, gate, up, down):
    """x [tokens, hidden] -> [tokens, hidden]; gate, up [ffn, hidden], down [hidden, ffn]."""
    g, u = x @ gate.T, x @ up.T  # [tokens, ffn]
    return (g / (1 + (-g).exp()) * u) @ down.T


read = rms_norm(x, weights[layer + "post_attention_layernorm.weight"])
mlp = [weights[layer + f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")]
answer = swiglu(read, *mlp)
shuffled = [3, 0, 7, 1, 6, 2, 5, 4]
torch.testing.assert_close(swiglu(read[shuffled], *mlp), answer[shuffled], rtol=0, atol=1e-12)
print("shuffle the tokens, and the answers are shuffled likewise: no token sees another")
x = x + answer

# %% [markdown] id="lm-head"
# That was one layer. After the last one, a last RMSNorm, and the **LM head**: one row of weights for each entry of the
# vocabulary, whose product with the hidden state is that entry's logit. Many small models, this one too, use the
# embedding itself as the head ("tied"): a token fits next when the hidden state points the way of its embedding.
#
# ## All together

# %% id="forward" tags=["nbval-check-output"]
no_bias = 0.0


def project(x, weights, name, shape):
    """x through a projection, with its bias if it has one, cut into heads."""
    out = x @ weights[name + "_proj.weight"].T + weights.get(name + "_proj.bias", no_bias)
    out = out.unflatten(-1, (-1, shape.head_dim))
    normed = name + "_norm.weight"
    return rms_norm(out, weights[normed]) if normed in weights else out


def forward(model, ids):
    """Logits [tokens, vocab] of a whole model, by hand."""
    shape, w, positions = model.shape, dict(model.named_weights()), torch.arange(len(ids))
    x = w["model.embed_tokens.weight"][ids]
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        read = rms_norm(x, w[layer + "input_layernorm.weight"])
        q, k, v = (project(read, w, layer + "self_attn." + name, shape) for name in "qkv")
        mixed = all_heads(rotate(q, positions), rotate(k, positions), v)
        x = x + mixed @ w[layer + "self_attn.o_proj.weight"].T
        read = rms_norm(x, w[layer + "post_attention_layernorm.weight"])
        mlp = (w[layer + f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = x + swiglu(read, *mlp)
    head = w["model.embed_tokens.weight"] if shape.tied else w["lm_head.weight"]
    return rms_norm(x, w["model.norm.weight"]) @ head.T


ours = forward(model, ids)
torch.testing.assert_close(ours, minikv.logits(model, ids.tolist()), rtol=0, atol=1e-10)
print(list(ours.shape), "logits, all equal to the engine's to 10 decimals")

# %% [markdown] id="families"
# The same function for the other families (Llama without the norms on q and k; Qwen2 with a bias on q, k, v), and for
# the bundled model:

# %% id="families-agree" tags=["nbval-check-output"]
from dataclasses import replace

llama = replace(shape, qk_norm=False)
for other in (llama, replace(llama, tied=False), replace(llama, qkv_bias=True)):
    tried = minikv.load(shape=other, seed=1, dtype=torch.float64)
    engine = minikv.logits(tried, ids.tolist())
    torch.testing.assert_close(forward(tried, ids), engine, rtol=0, atol=1e-10)
print("llama, llama with a head of its own, and qwen2 agree")

bundled = minikv.load(dtype=torch.float64)
assert bundled.shape.rope_theta == theta
text = bundled.tokenizer.encode("The capital of France is Paris which has the")
ours, engine = forward(bundled, torch.tensor(text)), minikv.logits(bundled, text)
torch.testing.assert_close(ours, engine, rtol=0, atol=1e-10)
print("the bundled model agrees:", repr(bundled.tokenizer.decode([int(ours[-1].argmax())])))

# %% [markdown] id="engine"
# ## The engine's version
#
# Now minikv's own forward pass should read like prose. It differs from ours in form only: q, k and v come from one
# fused product (so do gate and up), the sine carries the sign of the turn, `kv.attend` stands where we called
# `all_heads`, and `linear` chooses a quick way to do the product.

# %% id="source-forward"
from minikv.model.transformer import Transformer

show_source(Transformer.__call__)

# %% id="source-project"
show_source(Transformer._project)

# %% [markdown] id="where-weights"
# Where are the weights? Count them in the bundled model.

# %% id="count-weights" tags=["nbval-check-output"]
counts = {"embedding (and head)": 0, "attention": 0, "SwiGLU": 0, "norms": 0}
for name, weight in bundled.named_weights():
    if "norm" in name:
        counts["norms"] += weight.numel()
    elif "embed" in name:
        counts["embedding (and head)"] += weight.numel()
    else:
        counts["SwiGLU" if "mlp" in name else "attention"] += weight.numel()
for part, count in counts.items():
    print(f"{part:22s}{count:12,d}{count / bundled.shape.parameters:8.1%}")
assert sum(counts.values()) == bundled.shape.parameters

# %% [markdown] id="questions"
# ## Questions
#
# **1.** Which of these parts would notice if you swapped two tokens of the text?
#
# <details><summary>Answer</summary>
#
# Only attention, and there two things: the mask (who may look at whom) and RoPE (how far apart they are). Embedding,
# norms, SwiGLU and the LM head treat each row by itself.
#
# </details>
#
# **2.** Somebody keeps the keys of a text and later cuts out its first ten tokens. Are the kept keys of the rest still
# right?
#
# <details><summary>Answer</summary>
#
# No, for two reasons. Each key was turned by its old position, though since only distances count, that alone would do
# no harm as long as all queries and keys keep counting from the old start. The real harm is the other one: from the
# second layer on, the keys were made from hidden states into which the ten tokens had been mixed.
#
# </details>
#
# **3.** Why are v and the output of SwiGLU not turned as well?
#
# <details><summary>Answer</summary>
#
# Position has to decide *how much* one token takes from another, and that is the score, which is made of q and k. What
# is handed over, v, is added up after that. If it were turned by its position, the sum would depend on where in the
# text the two tokens stand, not only on their distance (unless it were turned back at the end).
#
# </details>

# %% [markdown] id="sources"
# ## Sources
#
# - K. He and others, *Deep Residual Learning for Image Recognition*, 2015, arXiv 1512.03385: adding instead of
#   replacing.
# - B. Zhang and R. Sennrich, *Root Mean Square Layer Normalization*, 2019, arXiv 1910.07467.
# - J. Su and others, *RoFormer: Enhanced Transformer with Rotary Position Embedding*, 2021, arXiv 2104.09864.
# - N. Shazeer, *GLU Variants Improve Transformer*, 2020, arXiv 2002.05202: SwiGLU.
# - O. Press and L. Wolf, *Using the Output Embedding to Improve Language Models*, 2016, arXiv 1608.05859: the tied
#   head.
# - H. Touvron and others, *LLaMA: Open and Efficient Foundation Language Models*, 2023, arXiv 2302.13971: these parts
#   in one model.
# - Qwen team, *Qwen3 Technical Report*, 2025, arXiv 2505.09388: norms on q and k.
#
# Back to [chapter 1](01_one_token_at_a_time.ipynb), or on to [chapter 2: Remember the
# keys](02_remember_the_keys.ipynb).
