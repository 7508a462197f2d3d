# %% [markdown] id="title"
# # 2. Remember the keys
#
# [Before: 1. One token at a time](01_one_token_at_a_time.ipynb) | [Next: 3. What a token
# weighs](03_what_a_token_weighs.ipynb) | [Glossary](glossary.md)
#
# **You will be able to**
#
# - write a KV cache of your own, plug it into a model that does not change, and prove that the text is the same;
# - tell prefill from decode, time to first token from time per output token, and say what each depends on;
# - judge sentences like "a cache makes it 5 times faster": what they depend on, and where the gain ends.
#
# **You need** [chapter 1](01_one_token_at_a_time.ipynb): tokens, one causal head, the mask, the loop that reads the
# whole text anew for each token.
#
# **Time** About 40 minutes to read; half a minute to run.

# %% id="setup"
import itertools
import math
import time

import matplotlib.pyplot as plt
import numpy as np
import torch

import minikv
from minikv.classroom.notebook import claim, compare, explore, note, predict, show_source

plt.style.use("minikv.show.course")
model = minikv.load()  # float32, as it is used
exact = minikv.load(dtype=torch.float64)  # the same weights, for when rounding would be in the way
prompt = "The capital of France is"
shape = minikv.ModelShape(  # a larger one with random weights, for the clocks
    layers=4, hidden=512, heads=8, kv_heads=8, head_dim=64, vocab=256, ffn=1024, max_context=2048
)

# %% [markdown] id="predictions"
# ## Two guesses first
#
# In chapter 1, writing 50 tokens meant computing a token 1,225 times that had been computed before. This chapter makes
# that 0. Guess what it is worth.

# %% id="predict-five"
predict(
    "five-times-at",
    f"A model of {shape.parameters / 1e6:.0f} million parameters, this machine, 16 tokens of prompt. "
    "How long must the answer be for a cache to make the whole answer 5 times faster?",
    "tokens",
)

# %% id="predict-passes"
predict(
    "passes-50000-500",
    "50,000 tokens of prompt, 500 of answer. "
    "Without a cache, how many times as many tokens go through the model as with one?",
    "times",
)

# %% [markdown] id="head"
# ## One head remembers
#
# Chapter 1 found: the last row needs one query, but all keys and all values. Here is its head again. One thing is
# new: there may be fewer queries than keys. The queries then belong to the *last* tokens, so the mask moves along: query
# number *i* stands at place `before + i`, and sees the keys up to its own place. (The mask can be left out. That is for
# looking at what happens without it.)


# %% id="one-head"
def one_head(q, k, v, mask=True):
    """q [new, head_dim] of the last tokens; k, v [all, head_dim]. Returns [new, head_dim]."""
    scores = q @ k.T / math.sqrt(q.shape[1])  # [new, all]
    if mask:
        before = len(k) - len(q)  # tokens that have a key but no query in this step
        future = torch.ones_like(scores, dtype=torch.bool).triu(diagonal=before + 1)
        scores = scores.masked_fill(future, -math.inf)
    return scores.softmax(-1) @ v


# %% [markdown] id="six-tokens"
# Six hidden states, three small matrices. First as in chapter 1: all rows at once.

# %% id="all-at-once"
generator = torch.Generator().manual_seed(0)
x = torch.randn(6, 8, dtype=torch.float64, generator=generator)  # [tokens, hidden]
Wq, Wk, Wv = torch.randn(3, 8, 4, dtype=torch.float64, generator=generator)  # [hidden, head_dim]
at_once = one_head(x @ Wq, x @ Wk, x @ Wv)  # [tokens, head_dim]

# %% [markdown] id="kept"
# Now one token after the other. Each token makes *its own* key and value, appends them to those that are kept, and asks
# with its own query. Nothing is made twice.

# %% id="one-by-one" tags=["nbval-check-output"]
keys, values, rows = x.new_empty(0, 4), x.new_empty(0, 4), []  # float64, as x is
for token in x:
    token = token[None]  # [1, hidden]
    keys = torch.cat((keys, token @ Wk))
    values = torch.cat((values, token @ Wv))
    rows.append(one_head(token @ Wq, keys, values))
    print(f"1 query, {len(keys)} keys, {len(values)} values")
torch.testing.assert_close(torch.cat(rows), at_once, rtol=0, atol=1e-12)
print("the same six rows as all at once")

# %% [markdown] id="kv-cache"
# The two matrices that grow are the [KV cache](glossary.md#kv-cache): the keys and values of all tokens so far, kept so
# that nobody computes them again.
#
# Why is it not a QKV cache? Ask PyTorch which numbers the last row depends on: those with a gradient.

# %% id="why-not-q" tags=["nbval-check-output"]
q, k, v = ((x @ W).requires_grad_() for W in (Wq, Wk, Wv))
one_head(q, k, v)[-1].sum().backward()
for name, matrix in zip("QKV", (q, k, v), strict=True):
    used = matrix.grad.abs().sum(1) > 0
    print(f"{name}: the last row reads rows", used.nonzero().flatten().tolist())

# %% [markdown] id="why-not-q-said"
# A query is used for one row, its own, in the step in which its token is new. Later rows never read it. A key and a
# value are read by every token that comes after. So K and V are kept, and Q is not.

# %% [markdown] id="seam"
# ## A whole model remembers
#
# minikv's model asks one thing of whatever looks after K and V:
#
#     out = kv.attend(layer, q, k, v)
#
# It hands over q, k and v of the tokens in this *step*, and wants attention for q. (A step is one pass of the model over
# some tokens. In a round of chapter 1 these were all tokens of the text; from now on they need not be.) In chapter 1 `NoCache` answered. What
# changes from chapter to chapter is only **where K and V live; the model never knows**.
#
# First, your head for all heads. (The bundled model has fewer heads of K and V than of Q: four queries share one. Why,
# is chapter 3's question. Here `share` takes care of it, and for a model with as many of each it is 1.)


# %% id="attention"
def attention(q, k, v, mask=True):
    """q [new, heads, head_dim]; k, v [all, heads of K and V, head_dim]. Returns q's shape."""
    share = q.shape[1] // k.shape[1]
    heads = range(q.shape[1])
    return torch.stack(
        [one_head(q[:, h], k[:, h // share], v[:, h // share], mask) for h in heads], dim=1
    )


# %% [markdown] id="class"
# And here is the whole cache: for each layer a K and a V, and a step's rows are appended to the rows that are there.


# %% id="my-cache"
class MyCache:
    def __init__(self):
        self.kept = {}  # layer -> (k, v), each [tokens so far, heads of K and V, head_dim]

    def __len__(self):
        return len(self.kept[0][0]) if self.kept else 0

    def append(self, layer, k, v):
        old_k, old_v = self.kept.get(layer, (k[:0], v[:0]))
        self.kept[layer] = torch.cat((old_k, k)), torch.cat((old_v, v))
        return self.kept[layer]

    def attend(self, layer, q, k, v):
        return attention(q, *self.append(layer, k, v))


# %% [markdown] id="positions"
# The model also wants the *positions* of the step's tokens, because it turns q and k by an angle that depends on them
# before it hands them over. A kept key stays turned as it is, for its position never changes. A step that begins after
# 5 kept tokens begins at position 5, not at 0.


# %% id="my-step"
@torch.inference_mode()
def step(model, tokens, kv):
    """One forward pass over ``tokens``, which come after those in ``kv``. Logits [tokens, vocab]."""
    start = len(kv)
    positions = torch.arange(start, start + len(tokens))
    return model(torch.tensor(tokens), positions, kv)


def generate(model, prompt, n, kv):
    """Always the best token: ``n`` tokens, the logits that chose each, and how many tokens each step computed."""
    new, tokens, rows, computed = model.tokenizer.encode(prompt), [], [], []
    while len(tokens) < n:
        rows.append(step(model, new, kv)[-1])
        computed.append(len(new))
        tokens.append(int(rows[-1].argmax()))
        new = tokens[-1:]  # from now on, only the token that was just chosen
    return tokens, torch.stack(rows), computed


# %% id="same-tokens" tags=["nbval-check-output"]
mine, rows, computed = generate(model, prompt, 50, MyCache())
plain = minikv.generate_without_cache(model, prompt, 50)
assert mine == plain.tokens
print("all 50 tokens are the same:", repr(model.tokenizer.decode(mine[:12])), "...")
print("tokens through the model, without a cache:", f"{plain.computed_tokens:,}")
print("tokens through the model, with my cache:  ", sum(computed))

# %% [markdown] id="same-logits"
# Equal tokens could hide small errors in the logits. So compare those too, every number of them, with one uncached pass
# over the finished text. Computers round, and a different order of sums rounds differently; a real mistake would not
# shrink when the numbers get more digits.

# %% id="compare-logits"
for name, each in (("float32", model), ("float64", exact)):
    tokens, rows, _ = generate(each, prompt, 50, MyCache())
    whole = minikv.logits(each, each.tokenizer.encode(prompt) + tokens[:-1])[-50:]
    difference = float((rows - whole).abs().max())
    print(f"{name}: {rows.numel():,} logits, largest difference {difference:.0e}")
    assert difference < (1e-3 if name == "float32" else 1e-10)

# %% [markdown] id="offset"
# So a different token could only win where two logits are no further apart than twice that. And the positions? Let a step lie about them: the sixth token, told that it is the first.

# %% id="wrong-offset"
ids = exact.tokenizer.encode("The capital of France is Paris")
truth = minikv.logits(exact, ids)[-1]
for start in (5, 0):
    kv = MyCache()
    step(exact, ids[:5], kv)
    with torch.inference_mode():
        told = exact(torch.tensor(ids[5:]), torch.tensor([start]), kv)[-1]
    error = float((told - truth).abs().max())
    print(f"told position {start}: logits are off by {error:.1g}")
    assert (error < 1e-10) == (start == 5)

# %% [markdown] id="names"
# ## Two kinds of steps
#
# Look at what each step computed:

# %% id="two-kinds" tags=["nbval-check-output"]
before = 0
for number, new in enumerate(computed[:4]):
    print(f"step {number}: {before} rows kept, {new} new -> 1 token of answer")
    before += new
print("...")

# %% [markdown] id="prefill-decode"
# The first step takes in the whole prompt at once. It is called [prefill](glossary.md#prefill): it fills the cache. All
# further steps take one token, the one chosen last. They are called [decode](glossary.md#decode). Same model, same
# `attend`; but one is a crowd and the other a single file, and they will need very different things of a machine.
#
# Who waits for the answer notices both:
#
# - [time to first token](glossary.md#ttft) (TTFT): until the first token is there. It cannot come before the whole
#   prefill is done, because the last row of the prompt reads all keys.
# - [time per output token](glossary.md#tpot) (TPOT): from each token to the next, one decode step.

# %% [markdown] id="causal-only"
# ## Why the kept rows stay right
#
# A cache is only right if what it keeps never changes. Watch the keys that each layer makes for the first six tokens,
# once alone and once with a seventh after them. With the mask, and, for comparison, without.


# %% id="keys-change" tags=["nbval-check-output"]
class Watching:
    """Keeps nothing between steps, but notes the keys of each layer."""

    def __init__(self, mask):
        self.mask, self.keys = mask, []

    def __len__(self):
        return 0

    def attend(self, layer, q, k, v):
        self.keys.append(k)
        return attention(q, k, v, self.mask)


for mask in (True, False):
    short, long = Watching(mask), Watching(mask)
    step(exact, ids, short)
    step(exact, [*ids, *exact.tokenizer.encode(" which")], long)
    changed = [
        float((b[:6] - a).abs().max()) > 1e-10 for a, b in zip(short.keys, long.keys, strict=True)
    ]
    verdict = ["changed" if each else "same" for each in changed]
    print("with the mask:   " if mask else "without the mask:", verdict)
    assert not any(changed) if mask else all(changed[1:])

# %% [markdown] id="causal-only-said"
# With the mask, every layer's keys for old tokens stay what they were. Without it only the first layer's do, since
# nothing has been mixed yet; from the second layer on, each old token has heard of the new one. That is why a KV cache
# is for *causal* models. A model such as BERT reads in both directions: append a word, and every row of every later
# layer is another. There is nothing to append to.

# %% [markdown] id="stateless"
# ## The cache is the state
#
# A language model has no memory of its own. Its weights do not change while it answers. Give the same model the same
# token at the same position twice:

# %% id="same-token-two-caches" tags=["nbval-check-output"]
for country in ("France", "Japan"):
    kv = MyCache()
    step(model, model.tokenizer.encode(f"The capital of {country}"), kv)
    logits = step(model, model.tokenizer.encode(" is"), kv)
    print(f"' is' at position {len(kv) - 1}: ->", repr(model.tokenizer.decode([logits.argmax()])))

# %% [markdown] id="stateless-said"
# Nothing differs but the cache. Whatever a conversation "knows" is in its tokens, and the KV cache is those tokens,
# digested. Lose it and nothing is lost but time: it can always be computed again from the text.

# %% [markdown] id="widget-intro"
# ## See it: one step, with and without
#
# The picture shows one head in one step. At the left, a row is a query and a column a key; each filled square is a score
# that this step computes, and its letter says where the key came from. At the right, the rows of K and V. Hatched is what
# the mask forbids. Use Tab and the arrow keys. Try:
#
# - `tokens before` from 0 upwards with one new token, cache on: one row of scores, ever longer. Then switch the cache off.
# - several new tokens after a few old ones: where does the mask begin? (You will need it for the war story.)
# - `tokens before` at 0: is there any difference between on and off?

# %% id="widget"
from minikv.classroom.explorers import growing_cache

explore(growing_cache.draw, **growing_cache.CONTROLS)

# %% [markdown] id="measure"
# ## Measure it
#
# The bundled model is so small that fixed costs hide everything else. So we take the larger one with random weights, and
# the engine's own two loops. `generate_without_cache` and `generate_with_cache` note when each token came. As in chapter
# 1 we generate only a few tokens, after prompts of different lengths.

# %% id="time-lengths"
large = minikv.load(shape=shape, seed=0)
lengths = [16, 32, 64, 128, 256, 512, 1024]
minikv.generate_with_cache(large, range(16), 3)  # the first call may compile something
full_s, ttft_s, tpot_s = [], [], []
for n in lengths:
    text = [(7 * i) % shape.vocab for i in range(n)]
    repeats = 4 if n < 256 else 2 if n < 512 else 1
    plain = [minikv.generate_without_cache(large, text, 1) for _ in range(repeats)]
    cached = [minikv.generate_with_cache(large, text, 9) for _ in range(repeats)]
    full_s.append(min(run.token_times_s[0] for run in plain))  # one more token without a cache
    ttft_s.append(min(run.token_times_s[0] for run in cached))
    tpot_s.append(min(np.median(np.diff(run.token_times_s)) for run in cached))
print("tokens before   one more without a cache      TTFT      TPOT   (ms)")
for n, full, ttft, tpot in zip(lengths, full_s, ttft_s, tpot_s, strict=True):
    print(f"{n:13,d} {1e3 * full:26.1f} {1e3 * ttft:9.1f} {1e3 * tpot:9.1f}")

# %% id="figure-ttft" tags=["hide-input"]
fig, ax = plt.subplots()
ax.plot(lengths, [1e3 * s for s in ttft_s], label="TTFT (prefill)")
ax.plot(lengths, [1e3 * s for s in tpot_s], label="TPOT (decode)")
ax.set(xscale="log", yscale="log", xlabel="tokens of prompt", ylabel="ms")
ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
ax.xaxis.set_minor_locator(plt.NullLocator())
ax.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
ax.legend()
plt.show()

# %% id="figure-ttft-note"
grown, grown_each = ttft_s[-1] / ttft_s[0], tpot_s[-1] / tpot_s[0]
note(
    f"**What to see.** From {lengths[0]} to {lengths[-1]:,} tokens of prompt, the time to first "
    f"token grew {grown:.0f} times on the machine that built this page (to "
    f"{1e3 * ttft_s[-1]:,.0f} ms), the time for each further token {grown_each:.1f} times (to "
    f"{1e3 * tpot_s[-1]:.1f} ms). And compare two columns of the table: TTFT is about the time of "
    "*one* step without a cache. A cache does nothing for the first token; it has nothing to "
    "remember yet."
)

# %% [markdown] id="speed-up"
# ### The speed-up of a whole answer
#
# Without a cache, an answer of *m* tokens takes a full pass for every one of them. With it, one prefill and *m* - 1
# decode steps. Add up the sampled times, with straight lines between the samples. To see that the sum is no fiction, one
# short answer is really generated both ways.

# %% id="sum-up"
n = lengths[0]
m = np.arange(1, lengths[-1] - n + 2)  # tokens of answer
before = n + m - 1  # tokens in front of the last of them
without_s = np.interp(before, lengths, full_s).cumsum()
with_s = ttft_s[0] + np.interp(before, lengths, tpot_s).cumsum() - tpot_s[0]
speed_up = without_s / with_s
counted = m * (n + (m - 1) / 2) / (n + m - 1)  # tokens through the model, without / with

really, took_s = 32, {}
for _ in range(2):  # each way twice, and the shorter time counts, as in the samples
    run_plain = minikv.generate_without_cache(large, range(n), really)
    run_cached = minikv.generate_with_cache(large, range(n), really)
    for way, run in (("plain", run_plain), ("cached", run_cached)):
        took_s[way] = min(took_s.get(way, math.inf), run.token_times_s[-1])
assert run_plain.tokens == run_cached.tokens
assert run_plain.computed_tokens / run_cached.computed_tokens == counted[really - 1]
really_faster = took_s["plain"] / took_s["cached"]

# %% id="figure-speed-up" tags=["hide-input"]
five = int(m[speed_up >= 5][0]) if (speed_up >= 5).any() else int(m[-1])
fig, ax = plt.subplots(figsize=(7.5, 3.6))
black, grey = "#1f1f1f", "#767676"
ax.plot(m, counted, "--", color=grey, marker="", label="tokens through the model: times fewer")
ax.plot(m, speed_up, "-", color=black, marker="", label="time: times faster (summed)")
ax.plot(really, really_faster, "^", color=black, markersize=9, label="really run both ways")
ax.axhline(5, color=grey, linestyle=":", linewidth=1)
ax.plot(five, 5, "o", color=black)
ax.annotate('"5x"', (five, 5), xytext=(-6, 8), textcoords="offset points", ha="right")
ax.set(xscale="log", yscale="log", xlabel=f"tokens of answer, after {n} of prompt", ylabel="times")
for axis in (ax.xaxis, ax.yaxis):
    axis.set_major_formatter(lambda value, _: f"{value:,g}")
ax.legend(loc="upper left")
plt.show()

# %% id="figure-speed-up-note"
in_a_crowd, alone = ttft_s[-1] / lengths[-1], tpot_s[-1]  # seconds for one token
reached = "reaches 5 at" if speed_up.max() >= 5 else "does not reach 5, not even at"
note(
    f"**What to see.** Two curves that rise, not one number. The measured one (solid) {reached} "
    f"an answer of {five} tokens and is at {speed_up[-1]:.0f} for {m[-1]:,}. The answer of {really} tokens "
    f"that was really run was {really_faster:.1f} times faster, beside {speed_up[really - 1]:.1f} "
    f"from the sum. The time saved is less than the tokens saved ({counted[-1]:.0f} times fewer at "
    f"the end): a token in a decode step cost {1e3 * alone:.1f} ms here, one among {lengths[-1]:,} "
    f"in a prefill {1e3 * in_a_crowd:.1f} ms. Why a token alone is so dear, chapter 3 will tell."
)

# %% id="compare-five"
compare("five-times-at", five, "tokens")

# %% [markdown] id="not-constant"
# ### A cached step is not free
#
# "With a cache, a token costs the same however long the text is" is a common mistake. A decode step computes *one* row of
# K and V, but it **reads all of them**. Count scores, in one head of one layer, for a text of *n* tokens written from its
# first token on:

# %% id="count-scores" tags=["nbval-check-output"]
print("  tokens   scores with a cache   times     without   times")
last = None
for tokens in (100, 200, 400, 800):
    cached = sum(range(1, tokens + 1))  # the last row only, in each step
    plain = sum(n * (n + 1) // 2 for n in range(1, tokens + 1))  # all rows, in each step
    grew = "" if last is None else f"{cached / last[0]:.1f}"
    grew_plain = "" if last is None else f"{plain / last[1]:.1f}"
    print(f"{tokens:8,d} {cached:21,d} {grew:>7s} {plain:11,d} {grew_plain:>7s}")
    last = cached, plain

# %% [markdown] id="not-constant-said"
# Twice the text, four times the scores: with a cache, attention is still quadratic over a whole answer (without one it is
# cubic). So one step must grow in a line. Time the attention of a single query, alone, against what it has to read:

# %% id="time-attention"
from minikv.cache.attention.reference import attend_one

kept = [256, 512, 1024, 2048, 4096, 8192, 16384]
query = torch.randn(1, shape.heads, shape.head_dim)
k, v = torch.randn(2, shape.kv_heads, kept[-1], shape.head_dim)
attend_s = []
for rows_kept in kept:
    tries = []
    for _ in range(15):
        started = time.perf_counter()
        attend_one(query, k[:, :rows_kept], v[:, :rows_kept])
        tries.append(time.perf_counter() - started)
    attend_s.append(min(tries))

# %% id="figure-attention" tags=["hide-input"]
fig, ax = plt.subplots()
ax.plot(kept, [1e3 * s for s in attend_s], label="measured, one layer")
line = [1e3 * attend_s[-1] * rows_kept / kept[-1] for rows_kept in kept]
ax.plot(kept, line, marker="", label="in proportion to the rows read")
ax.set(xscale="log", yscale="log", xlabel="rows of K and V that one query reads", ylabel="ms")
ax.set_xticks(kept, [f"{rows_kept:,}" for rows_kept in kept])
ax.xaxis.set_minor_locator(plt.NullLocator())
ax.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
ax.legend()
plt.show()

# %% id="figure-attention-note"
numbers = 2 * kept[-1] * shape.kv_heads * shape.head_dim
note(
    f"**What to see.** {kept[-1] // kept[2]} times as many rows ({kept[2]:,} to {kept[-1]:,}) took "
    f"{attend_s[-1] / attend_s[2]:.0f} times as long. With few rows, the fixed cost of starting each "
    "operation hides the growth; where the dots climb more steeply than the dashed line, K and V "
    "have outgrown the processor's own small memory and come from further away. At the right end "
    f"one query reads {numbers:,} numbers in each layer, and the next token reads them all again."
)

# %% [markdown] id="audit"
# ## Audit
#
# **"5 times faster."** Of what model, at which length, on which machine? Here is the value at the longest answer of our
# curve. It would be another for any other end of the axis.

# %% id="claim-five"
claim("5x-faster", float(speed_up[-1]), source="explainer")

# %% [markdown] id="audit-ratio"
# **"The more input for each token of output, the more a cache helps."** Count tokens through the model, for *n* in and
# *m* out. Without a cache the steps have *n*, *n* + 1, ... *n* + *m* - 1 tokens; with one, every token goes through once,
# except the last, which is never read.


# %% id="token-passes" tags=["nbval-check-output"]
def times_fewer(n, m):
    """Tokens through the model without a cache / with one: ``n`` of prompt, ``m`` of answer."""
    return m * (n + (m - 1) / 2) / (n + m - 1)


for ins, outs in ((1, 50), (5, 50), (300, 7), (50_000, 500)):
    without, once = sum(ins + i for i in range(outs)), ins + outs - 1
    assert times_fewer(ins, outs) == without / once
    print(f"{ins:6,d} in, {outs:3d} out: {without:10,d} / {once:6,d} = {without / once:.1f}")

# %% id="figure-ratio" tags=["hide-input"]
inputs = np.logspace(0, 5, 101)
fig, ax = plt.subplots(figsize=(7.5, 3.4))
for outputs, dashes in ((1, "-."), (10, ":"), (100, "--"), (500, "-")):
    ax.plot(inputs, times_fewer(inputs, outputs), marker="", color="#1f1f1f", linestyle=dashes)
    place = (inputs[-1], outputs)
    ax.annotate(f"{outputs} out", place, xytext=(6, -3), textcoords="offset points", fontsize=9)
ax.plot(50_000, times_fewer(50_000, 500), "o", color="#1f1f1f")
ax.set(xscale="log", yscale="log", xlabel="tokens of prompt", ylabel="times fewer tokens computed")
for axis in (ax.xaxis, ax.yaxis):
    axis.set_major_formatter(lambda value, _: f"{value:,g}")
plt.show()

# %% id="figure-ratio-note"
at = {n: times_fewer(n, 500) for n in (500, 5_000, 50_000)}
note(
    "**What to see.** Each line rises with the prompt only until it meets its own ceiling, the "
    f"number of tokens in the answer. With 500 out, {at[500]:.0f} at 500 in, {at[5_000]:.0f} at "
    f"5,000 and {at[50_000]:.1f} at 50,000. With 1 out there is nothing to gain at all. More input "
    "does not help without end; more output does."
)

# %% id="claim-ratio"
claim("input-to-output-ratio", times_fewer(50_000, 500), source="blog")

# %% id="compare-passes"
compare("passes-50000-500", times_fewer(50_000, 500), "times")

# %% [markdown] id="audit-said"
# In fairness: K and V that are kept *between* requests are another cache, the subject of chapter 6, and for that one a
# long prompt does pay. And these are tokens, not seconds: the prefill costs its time with or without a cache.

# %% [markdown] id="war-story"
# ## War story: a mask that "is not needed any more"
#
# In a decode step there is one query, the last, and it may see everything. You have just looked at such a step: nothing
# is masked. So why compute a mask once there is a cache?


# %% id="hasty"
class Hasty(MyCache):
    def attend(self, layer, q, k, v):
        return attention(q, *self.append(layer, k, v), mask=False)


# %% [markdown] id="hasty-test"
# A careful author tests it: nine tokens, one at a time, against the uncached pass.

# %% id="hasty-passes" tags=["nbval-check-output"]
nine = exact.tokenizer.encode("The capital of France is Paris which has the")
truth = minikv.logits(exact, nine)
kv = Hasty()
one_by_one = torch.cat([step(exact, [token], kv) for token in nine])
torch.testing.assert_close(one_by_one, truth, rtol=0, atol=1e-10)
print("all 9 rows right")

# %% [markdown] id="hasty-ship"
# It passes. Now users send prompts:

# %% id="hasty-text" tags=["nbval-check-output"]
for text in ("The capital of France is", "HAMLET:\nTo be,"):
    for cache in (MyCache, Hasty):
        tokens, rows, _ = generate(model, text, 10, cache())
        print(f"{cache.__name__:8s}{text!r} ->", repr(model.tokenizer.decode(tokens)))
    print()

# %% id="hasty-error"
ids = exact.tokenizer.encode(prompt)
error = float((step(exact, ids, Hasty())[-1] - minikv.logits(exact, ids)[-1]).abs().max())
note(
    "For some prompts the text is right by luck, for others it is another text, and a fluent one. "
    f"But already after `{prompt}` the logits of the first token are off by {error:.1f}, where a "
    "right cache is off by a rounding error. Compare logits, not texts."
)

# %% [markdown] id="hasty-why"
# A prefill has many queries, and all but the last have a future to be kept from. Find the leak: run six tokens, then
# three more after them; change the *last* token of a step and see which of its rows notice. Only its own may.


# %% id="hasty-leak" tags=["nbval-check-output"]
def rows_that_notice(cache, old, new):
    """Rows of the step ``new`` (after ``old``) that change when its last token does, by position."""
    results = []
    for last in (new[-1], exact.tokenizer.encode(" King")[0]):
        kv = cache()
        if old:
            step(exact, old, kv)
        results.append(step(exact, [*new[:-1], last], kv))
    changed = (results[0] - results[1]).abs().amax(-1) > 1e-9
    return [len(old) + row for row in changed.nonzero().flatten().tolist()]


for cache in (MyCache, Hasty):
    print(cache.__name__)
    print("  prefill of 6, token 5 changed: rows", rows_that_notice(cache, [], nine[:6]))
    print("  3 more,       token 8 changed: rows", rows_that_notice(cache, nine[:6], nine[6:]))

# %% [markdown] id="hasty-public"
# Rows 0 to 4 know of token 5, which comes after them. Their keys in the next layer are spoilt, and the spoilt keys stay
# in the cache for the rest of the answer.
#
# This happened to TinyLLM ([issue 17](https://github.com/Mikyx-1/TinyLLM/issues/17), mended in [pull request
# 18](https://github.com/Mikyx-1/TinyLLM/pull/18), 2026): the mask was applied only `if cache is None`. Training ran
# without a cache and was right, and the finished model wrote garbage. A cousin lived in Meta's own reference code for
# Llama 2 ([issue 899](https://github.com/meta-llama/llama/issues/899), 2023): its mask had the shape of the new tokens
# alone, so several tokens that met a filled cache did not even run. The repository's own loop never noticed: each of its
# steps was a first prefill or a single token.
#
# minikv does not ask whether there is a cache. Its mask always comes from positions (`attend_one`, below), so there is
# no branch to get wrong. And its tests do not stop at one token a step. Here are all ways to cut five tokens into steps:

# %% id="all-splits" tags=["nbval-check-output"]
from minikv.cache.contiguous import Contiguous
from minikv.cache.step import Piece

five_tokens, checked = nine[:5], 0
for cuts in itertools.product((False, True), repeat=4):
    ends = [i + 1 for i in range(4) if cuts[i]] + [5]
    kv, start, rows = Contiguous(exact.shape, 5, exact.dtype), 0, []
    for end in ends:
        packed = kv.begin([Piece("text", five_tokens[start:end], start, logits="all")])
        with torch.inference_mode():
            rows.append(exact(packed.token_ids, packed.positions, kv))
        start = end
    torch.testing.assert_close(torch.cat(rows), truth[:5], rtol=0, atol=1e-10)
    checked += 1
print(checked, "ways to cut 5 tokens into steps, all rows right in each")

# %% [markdown] id="engine"
# ## The engine's version
#
# The class is called `Contiguous`, because a text's rows lie one after the other in one piece of memory. This is the
# method that the model calls:

# %% id="source-attend"
show_source(Contiguous.attend)

# %% [markdown] id="engine-read"
# Read it beside `MyCache.attend`:
#
# - **It writes, you copied.** `torch.cat` makes a new tensor and copies every kept row into it, in each step. The engine
#   reserves a buffer for `max_tokens` at the start and writes the new rows into their places.
# - **Several texts at once.** A step may hold pieces of more than one text; `first` and `last` cut the packed rows apart.
#   (When that is useful, chapter 7.)
# - **Positions are said, not guessed.** `begin` was told where each piece starts, and refuses one that does not go on
#   where its text ended.
#
# The mask is in the function that it calls for each piece:

# %% id="source-attend-one"
show_source(attend_one)

# %% [markdown] id="engine-mask"
# `position` is where each query stands: the last `queries` places of the text so far (`context`). A key further on is `future`. With one
# query that row is all `False`; no special case. And the loop around it, which is your `generate`:

# %% id="source-generate"
show_source(minikv.generate_with_cache)

# %% [markdown] id="agree-intro"
# The engine's version against yours, and what the copying costs. For each layer, `torch.cat` writes all rows so far, in
# every step:

# %% id="agree" tags=["nbval-check-output"]
engine = minikv.generate_with_cache(model, prompt, 50)
assert engine.tokens == mine
assert engine.computed_tokens == sum(computed)
print("same 50 tokens, the same", engine.computed_tokens, "tokens computed")
print("rows of K written in a layer, MyCache:   ", f"{sum(itertools.accumulate(computed)):,}")
print("rows of K written in a layer, Contiguous:", sum(computed))

# %% [markdown] id="agree-said"
# You have seen the larger number before: it is the count of tokens that went through the model without a cache. `cat`
# does its own "all over again", only with copies, which are cheap. Reserving avoids it, at a price: somebody has to know
# beforehand how long the answer will be. That price is the whole of [chapter 4](04_the_car_park.ipynb).

# %% [markdown] id="questions"
# ## Questions
#
# **1.** Should the queries be cached too? It would be symmetrical.
#
# <details><summary>Answer</summary>
#
# No. A query is read once, in the step in which its token is new, to make that token's row. No later row depends on it
# (the gradient above is zero for all old rows of Q). Keeping it would cost memory, and nobody would read it.
#
# </details>
#
# **2.** A colleague's cache passes every test in which tokens are decoded one by one. Which single test would you add?
#
# <details><summary>Answer</summary>
#
# Several new tokens in one step: once into an empty cache, once into a filled one. With one query nothing is masked,
# so a missing mask cannot show. Change the last token of the step: no other row may move.
#
# </details>
#
# **3.** Chapter 1 computed 1,225 tokens again for a text of 50. Where did the number 1,225 go?
#
# <details><summary>Answer</summary>
#
# It became reads. Token *i* is computed once, but its key and value are read by each of the 50 - *i* tokens after it:
# 49 + 48 + ... + 1 = 1,225 reads of kept rows, in each head and layer. The cache turned work that pushes a token
# through all weights of the model into reading a row of K and one of V. That is far less, but it is not nothing.
#
# </details>
#
# **4.** PyTorch's own attention has a switch `is_causal=True`. The cell below gives it one query and five keys. What
# went wrong?

# %% id="top-left" tags=["nbval-check-output"]
one, five_keys = torch.zeros(1, 1, 4), torch.zeros(1, 5, 4)  # equal scores: equal weights
places = torch.eye(5)[None]  # value j has a 1 in place j, so the result shows the weights
out = torch.nn.functional.scaled_dot_product_attention(one, five_keys, places, is_causal=True)
print("the new token looks at:", out.flatten().tolist())

# %% [markdown] id="questions-rest"
# <details><summary>Answer</summary>
#
# The new token sees only the *first* key. When there are fewer queries than keys, this switch aligns the triangle at the
# top left: it takes query 0 for token 0. A cache needs it at the bottom right, where the queries are the last tokens.
# Many have met this (pytorch issues [144858](https://github.com/pytorch/pytorch/issues/144858) and
# [108108](https://github.com/pytorch/pytorch/issues/108108)). For one query, leave the switch off; for several that meet a
# filled cache, pass a mask (or `torch.nn.attention.bias.causal_lower_right`).
#
# </details>
#
# **5.** A service reads 50,000 tokens and answers with one word, yes or no. What does a KV cache within the request gain?
#
# <details><summary>Answer</summary>
#
# Nothing, if the word is one token: *m* = 1, and the formula gives 1. The time is all prefill, and the first token has to
# wait for the whole of it. What would help is not to compute the same 50,000 tokens again for the *next* question; that
# is chapter 6.
#
# </details>
#
# **6.** "With a cache, each decode step costs the same." What is constant in it, and what grows?
#
# <details><summary>Answer</summary>
#
# Constant: one token goes through all weights, one row of K and V is computed in each layer. Growing: the query is
# compared with all kept keys and mixes all kept values. So a step is a constant plus a line, and a whole answer a line
# plus a square. At a few hundred tokens you hardly see the line; at 100,000 it can weigh more than the constant.
#
# </details>

# %% [markdown] id="big-engines"
# ## In the big engines
#
# All of them keep K and V, by default. Names and files as of 2026; files move.
#
# | engine | what it calls it | where |
# |---|---|---|
# | vLLM | `KVCacheManager` decides who has room; the attention backend writes and reads | `vllm/v1/core/kv_cache_manager.py`, `vllm/v1/attention/backends/flash_attn.py` |
# | SGLang | `MHATokenToKVPool`; a prefill is called `EXTEND`, beside `DECODE` | `python/sglang/srt/mem_cache/memory_pool.py`, `python/sglang/srt/model_executor/forward_batch_info.py` |
# | Hugging Face transformers | `past_key_values`; `DynamicLayer` grows by `torch.cat` as yours does, `StaticLayer` reserves as the engine's does | `src/transformers/cache_utils.py` |
# | llama.cpp | `llama_kv_cache`; `cpy_k` and `cpy_v` store, `set_input_kq_mask` makes the mask | `src/llama-kv-cache.h`, `src/llama-kv-cache.cpp` |

# %% [markdown] id="sources"
# ## Sources
#
# - A. Vaswani and others, *Attention Is All You Need*, 2017, arXiv 1706.03762: masked self-attention in the decoder.
# - J. Devlin and others, *BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding*, 2018, arXiv
#   1810.04805: attention in both directions.
# - Sankalp Shubham, *How prompt caching works*, 2025, parts 2 and 3 ("the blog"): input against output.
# - Avi Chawla, *KV Caching in LLMs, clearly explained* ("the explainer"): "5 times faster".
# - TinyLLM issue 17 and pull request 18; llama issue 899; pytorch issues 144858 and 108108: the masks.

# %% [markdown] id="next"
# ## Next
#
# Every decode step reads all that is kept, for one token of answer. How much is that, in bytes? How many conversations
# fit on a GPU, and why does a token alone cost so much more than a token in a crowd? [Chapter 3: What a token
# weighs](03_what_a_token_weighs.ipynb).
