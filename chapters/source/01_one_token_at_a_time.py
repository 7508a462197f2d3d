# %% [markdown] id="title"
# # 1. One token at a time
#
# [Before: 0. Start here](00_start_here.ipynb) | [Next: 2. Remember the keys](02_remember_the_keys.ipynb) |
# [Glossary](glossary.md)
#
# **You will be able to**
#
# - compute one attention head by hand, from scores to output, and say what its mask forbids;
# - explain why only the last row of a model's output decides the next token, and what that row still needs from all the
#   others;
# - say exactly how much work is done again when a model writes an answer token by token, in tokens and in operations.
#
# **You need** Python, NumPy and matrix products. You have seen PyTorch. You need not have seen the inside of a
# transformer.
#
# **Time** About 40 minutes to read; half a minute to run.

# %% id="setup"
import math
import time

import matplotlib.pyplot as plt
import numpy as np
import torch

import minikv
from minikv.classroom.notebook import claim, compare, note, predict, show_source

plt.style.use("minikv.show.course")
torch.set_grad_enabled(False)
model = minikv.load(dtype=torch.float64)  # small, and in float64 so that rounding hides nothing

# %% [markdown] id="predictions"
# ## Two guesses first
#
# A language model writes one piece of text, called a *token*, at a time. To choose each one, the plain way is to read
# the whole text anew. Guess what that costs. Nothing waits for your answer, and nobody else sees it.

# %% id="predict-recomputed"
predict(
    "recomputed-50",
    "A model starts from 1 token and writes 50, reading the whole text anew for each. "
    "How many times in all does it compute a token that it has computed before?",
    "times",
)

# %% id="predict-twice"
predict(
    "twice-as-long",
    "You ask the same model for 2,048 tokens instead of 1,024. How many times as long do you wait?",
    "times",
)

# %% [markdown] id="tokens"
# ## Text in, numbers out
#
# A model reads numbers. A *tokenizer* cuts text into pieces from a fixed list and gives each its number. A piece is a
# [token](glossary.md#token); the list is the [vocabulary](glossary.md#vocabulary). Frequent words are one token, rare
# words are several. A space belongs to the word that follows it.

# %% id="tokens-cut" tags=["nbval-check-output"]
tokenizer = model.tokenizer
sentence = "The capital of France is Paris which has the"
ids = tokenizer.encode(sentence)
words = tokenizer.pieces(sentence)
for token_id, word in zip(ids, words, strict=True):
    print(f"{token_id:5d}  {word!r}")
print(len(sentence.split()), "words,", len(ids), "tokens; the vocabulary has", tokenizer.vocab_size)
print("a rarer word:", tokenizer.pieces(" indivisible"))

# %% [markdown] id="logits"
# The model takes these numbers and gives back one row for each token. A row has one score for every entry of the
# vocabulary: how well that entry would fit *next*, after this token. The scores are called
# [logits](glossary.md#logits). A softmax turns a row of them into probabilities.

# %% id="logits-last" tags=["nbval-check-output"]
logits = minikv.logits(model, ids)  # [tokens, vocab]
print("shape:", list(logits.shape))


def best_word(row):
    """The text of the token with the largest logit; row [vocab]."""
    return repr(tokenizer.decode([int(row.argmax())]))


best = logits[-1].softmax(-1).topk(3)
for probability, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
    print(f"{probability:6.1%}  {tokenizer.decode([token])!r}")

# %% [markdown] id="logits-rows"
# The last row continues the sentence. The other rows are there too: each is the model's answer to a shorter question.

# %% id="logits-every-row" tags=["nbval-check-output"]
for row, word in enumerate(words):
    print(f"row {row}: after ...{word:9s} comes {best_word(logits[row])}")

# %% [markdown] id="head"
# ## One head, by hand
#
# Between tokens and logits the numbers pass through a few [layers](glossary.md#layer), five in this model, built alike
# but with weights of their own. On the way every token is a row of numbers, its [hidden
# state](glossary.md#hidden-state). At first it says only "this is the token `which`". In each layer it may take
# something over from the tokens before it. That is *attention*, and it is the only place in a transformer where one
# token learns of another.
#
# Attention happens in several [heads](glossary.md#head) side by side. In one head, every token makes three short
# vectors out of its hidden state, by three matrix products (the *projections*):
#
# - a [query](glossary.md#query) q: what this token looks for,
# - a [key](glossary.md#key) k: what this token can be found by,
# - a [value](glossary.md#value) v: what this token hands over when it is found.
#
# Take four tokens and vectors of two numbers, small enough to follow with a pencil.

# %% id="tiny-vectors" tags=["nbval-check-output"]
q = torch.tensor([[1, 0], [0, 2], [1, 1], [2, 0]]).double()  # [tokens, head_dim]
k = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 2]]).double()
v = torch.tensor([[10, 0], [0, 10], [5, 5], [0, 0]]).double()
scores = q @ k.T / math.sqrt(q.shape[1])  # [queries, keys]
print(scores.numpy().round(2))

# %% [markdown] id="scores"
# Row *i*, column *j* is the **score** of token *i*'s query with token *j*'s key: large when they point the same way.
# Dividing by the root of how many numbers a vector has keeps the scores about as large in large heads as in small ones.
#
# Now the **mask**. Token 1 must not look at tokens 2 and 3: when it was written, they did not exist. So every score
# above the diagonal becomes minus infinity. This is the [causal mask](glossary.md#causal-mask).

# %% id="tiny-mask" tags=["nbval-check-output"]
future = torch.ones(4, 4, dtype=torch.bool).triu(diagonal=1)  # the key comes after the query
masked = scores.masked_fill(future, -math.inf)
print(masked.numpy().round(2))

# %% [markdown] id="softmax"
# The **softmax** makes weights of each row: e to the power of the score, divided by the row's sum. Minus infinity
# becomes exactly 0. Every row adds up to 1.

# %% id="tiny-softmax" tags=["nbval-check-output"]
weights = masked.exp() / masked.exp().sum(-1, keepdim=True)
print(weights.numpy().round(2))
print("row sums:", weights.sum(-1).tolist())

# %% [markdown] id="weighted-sum"
# Last, the **weighted sum of values**: each token gets a mixture of the values it may see, in these proportions. Token
# 0 sees only itself, so it gets its own value.

# %% id="tiny-output" tags=["nbval-check-output"]
out = weights @ v
print(out.numpy().round(2))
assert torch.equal(out[0], v[0])
print("the first token got its own value, unchanged")

# %% [markdown] id="head-function"
# Four lines in two functions. Everything that this course is about happens to their arguments `k` and `v`.

# %% id="one-head" tags=["nbval-check-output"]
minus_infinity = -math.inf  # a score that softmax turns into exactly 0


def attention_weights(q, k):
    """How much each token takes from each: [queries, keys]; q, k [tokens, head_dim]."""
    scores = q @ k.T / math.sqrt(q.shape[1])
    future = torch.ones_like(scores, dtype=torch.bool).triu(diagonal=1)
    return scores.masked_fill(future, minus_infinity).softmax(-1)


def one_head(q, k, v):
    """Causal attention of one head; q, k, v [tokens, head_dim]."""
    return attention_weights(q, k) @ v


torch.testing.assert_close(one_head(q, k, v), out, rtol=0, atol=1e-12)
print("same as step by step")

# %% [markdown] id="real-head"
# ## The same head in a real model
#
# minikv's model hands its q, k and v to an object and asks for the attention. The simplest such object, `NoCache`,
# computes it and keeps nothing. Ours does the same and writes down what passes through. (`begin` is told which tokens
# are coming; a `Piece` is a run of tokens of one text, here the whole sentence. Later chapters need both; here you can
# take the two lines as they are.)

# %% id="recorder" tags=["nbval-check-output"]
from minikv.cache.no_cache import NoCache
from minikv.cache.step import Piece


class Recorder(NoCache):
    def __init__(self):
        super().__init__()
        self.seen = {}

    def attend(self, layer, q, k, v):
        out = super().attend(layer, q, k, v)
        self.seen[layer] = q, k, v, out
        return out


def run(model, ids, kv):
    """Logits [tokens, vocab] of a forward pass whose attention is computed by ``kv``."""
    step = kv.begin([Piece("sentence", ids, logits="all")])
    return model(step.token_ids, step.positions, kv)


recorder = Recorder()
assert torch.equal(run(model, ids, recorder), logits)
q, k, v, engine_out = recorder.seen[4]  # the last of the five layers
print("q", list(q.shape), "= [tokens, heads, head_dim]: the queries of all heads of layer 4")

# %% [markdown] id="real-head-check"
# Head 0, its key and its value, through our four lines, against what the engine computed for that head:

# %% id="real-head-agrees" tags=["nbval-check-output"]
ours = one_head(q[:, 0], k[:, 0], v[:, 0])  # [tokens, head_dim]
torch.testing.assert_close(ours, engine_out[:, 0], rtol=0, atol=1e-10)
print(f"{ours.numel()} numbers, all equal to the engine's to 10 decimals")

# %% [markdown] id="all-heads"
# One head of one model could be luck. So: every head of every layer of another model, with random weights.

# %% id="all-heads-agree" tags=["nbval-check-output"]
shape = minikv.ModelShape(layers=3, hidden=48, heads=4, kv_heads=4, head_dim=12, vocab=100, ffn=96)
random_model = minikv.load(shape=shape, seed=1, dtype=torch.float64)
watch = Recorder()
run(random_model, [3, 14, 15, 92, 65, 35, 89], watch)
checked = 0
for q1, k1, v1, out1 in watch.seen.values():
    for head in range(shape.heads):
        by_hand = one_head(q1[:, head], k1[:, head], v1[:, head])
        torch.testing.assert_close(by_hand, out1[:, head], rtol=0, atol=1e-10)
        checked += 1
print(checked, "heads checked, all equal")

# %% [markdown] id="heat-map"
# What do real weights look like? Two heads of the bundled model, over our sentence. (Numbers are per cent; below 10
# they are left out. In this model four heads share one key and one value, so both of these look at the same keys;
# chapter 3 says why.)

# %% id="figure-weights" tags=["hide-input"]
chosen = [(2, 3), (4, 0)]  # (layer, head)
fig, axes = plt.subplots(1, 2, figsize=(8.6, 4.3))
maps, rows = [], np.arange(len(words))
masked_look = {"facecolor": "none", "edgecolor": "#b0b0b0", "hatch": "////", "linewidth": 0}
for ax, (layer, head) in zip(axes, chosen, strict=True):
    q1, k1, *_ = recorder.seen[layer]
    weights = attention_weights(q1[:, head], k1[:, 0]).numpy()  # k1[:, 0] is the key of both heads
    maps.append(weights)
    ax.imshow(weights, vmin=0, vmax=1)
    for (row, column), weight in np.ndenumerate(weights):
        if weight >= 0.1:
            style = {"ha": "center", "va": "center", "color": "white" if weight > 0.5 else "black"}
            ax.text(column, row, f"{100 * weight:.0f}", fontsize=8, **style)
    ax.barh(rows, len(words) - 1 - rows, left=rows + 0.5, height=1, **masked_look)
    ax.set_xticks(rows, [word.strip() for word in words], rotation=60)
    ax.set_yticks(rows, [word.strip() for word in words])
    ax.set_xlim(-0.5, len(words) - 0.5)
    ax.set(title=f"layer {layer}, head {head}", xlabel="key (looked at)", ylabel="query (looking)")
    ax.grid(False)
plt.show()

# %% id="figure-weights-note"
told = []
for (layer, head), weights in zip(chosen, maps, strict=True):
    for row in (4, 8):
        column = int(weights[row].argmax())
        share = f"`{words[row].strip()}` gives {100 * weights[row, column]:.0f} %"
        told.append(f"in layer {layer}, head {head}, {share} to `{words[column].strip()}`")
note(
    "**What to see.** Each row adds up to 100; the hatched triangle is what the mask forbids. "
    f"The first row can only look at itself. Look for the dark squares: {'; '.join(told)}. "
    "These two heads were picked because they can be read; most cannot. "
    "But attention is where `is` learns that this sentence is about France."
)

# %% [markdown] id="mask-means"
# ## What the mask buys
#
# The mask is more than tidiness. It means that **nothing that comes later can change a row**. Change the last token,
# and look at all rows before it.

# %% id="later-changes-nothing" tags=["nbval-check-output"]
other = minikv.logits(model, [*ids[:-1], tokenizer.encode(" King")[0]])
change = (other - logits).abs().amax(-1)  # [tokens]
print("rows that changed:", [row for row in range(len(ids)) if change[row] > 1e-9])
assert change[:-1].max() < 1e-10
assert change[-1] > 1

# %% [markdown] id="rest"
# ## The rest of the transformer, to read
#
# You have now built the part where tokens meet. What is left works on each token alone:
#
# 1. **Embedding**: the token's number picks a row of a table. That is its first hidden state.
# 2. **In each layer**: attention as above, then a small network (*SwiGLU*). Each reads a rescaled copy of the hidden
#    state (*RMSNorm*) and *adds* its answer to it.
# 3. Before attention, q and k are turned by an angle that depends on the token's position (*RoPE*), so that a head can
#    see how far apart two tokens are.
# 4. **At the end**: the hidden state of a row times a table of the vocabulary gives that row's logits.
#
# The [appendix](appendix_transformer.ipynb) derives each of these in a few lines and puts the whole pass together by
# hand. You do not need it to go on. Two facts are enough: *only attention mixes tokens, and it only looks back*.

# %% [markdown] id="last-row"
# ## Only the last row speaks
#
# The next token is the best entry of the last row. Fill all earlier rows with noise:

# %% id="noise-in-earlier-rows" tags=["nbval-check-output"]
spoilt = logits.clone()
spoilt[:-1].normal_(generator=torch.Generator().manual_seed(0))
print("before:", best_word(logits[-1]), " after:", best_word(spoilt[-1]))
assert spoilt[-1].argmax() == logits[-1].argmax()

# %% [markdown] id="one-query"
# So what does that one row need? Look at a head again. The last row of the output is made from the last query only, but
# from *all* keys and *all* values. So instead of a matrix of queries we need one vector; K and V stay whole.

# %% id="one-query-is-enough" tags=["nbval-check-output"]
q_last, keys, values = q[-1, 0], k[:, 0], v[:, 0]  # head 0 of layer 4


def last_row(q_last, k, v):
    """The last token's row of a head; q_last [head_dim]. It may look at everything, so there is no mask."""
    return (k @ q_last / math.sqrt(q_last.shape[0])).softmax(-1) @ v


row = last_row(q_last, keys, values)
torch.testing.assert_close(row, one_head(q[:, 0], keys, values)[-1], rtol=0, atol=1e-12)
print("one query, all keys, all values: the same last row")
shorter = last_row(q_last, keys[1:], values[1:])
print("leave out the first key and value: the row moves by", f"{(shorter - row).abs().max():.3f}")

# %% [markdown] id="other-rows"
# Careful: this does not mean that the earlier rows are useless. A layer's output for an earlier token becomes that
# token's key and value in the *next* layer. Try it: throw away what attention gave to all rows but the last, once in
# the last layer and once in the first.

# %% id="which-layer-needs-rows" tags=["nbval-check-output"]
last_layer, first_layer = 4, 0


class LastRowOnly(NoCache):
    """Gives every row but the last nothing (zeros), in one layer."""

    def __init__(self, in_layer):
        super().__init__()
        self.in_layer = in_layer

    def attend(self, layer, q, k, v):
        out = super().attend(layer, q, k, v)
        if layer == self.in_layer:
            out[:-1] = 0
        return out


for layer in (last_layer, first_layer):
    moved = (run(model, ids, LastRowOnly(layer))[-1] - logits[-1]).abs().max()
    print(f"earlier rows thrown away in layer {layer}: the last row's logits move by {moved:.3f}")

# %% [markdown] id="other-rows-said"
# In the last layer nobody misses them. In the first layer they are missed, and only for one reason: keys and values of
# the layers above were to be made from them. Keep this in mind. It is the whole question of chapter 2.

# %% [markdown] id="loop"
# ## The loop that writes
#
# Writing is a loop: compute the logits, take the best token of the last row, append it to the text, start again.
# (Taking the best is called *greedy*. Drawing a token by its probability, *sampling*, would change one line.)

# %% id="write" tags=["nbval-check-output"]
prompt = tokenizer.encode("The capital of France is")


def write(model, ids, n):
    """n greedy tokens after ``ids``. Also returns how often each token went through the model."""
    ids, times = list(ids), []
    for _ in range(n):
        times = [count + 1 for count in times] + [1] * (len(ids) - len(times))
        ids.append(int(minikv.logits(model, ids)[-1].argmax()))
    return ids, times


text, times = write(model, prompt, 12)
print(tokenizer.decode(text))

# %% [markdown] id="stateless"
# Between two rounds **the model remembers nothing**. A language model is *stateless*: a function from a text to logits,
# the same text giving the same logits. All memory of the conversation is the text itself, handed in again each time.
# Hand in only the newest token, and France is gone:

# %% id="stateless-shown" tags=["nbval-check-output"]
assert torch.equal(minikv.logits(model, ids), logits)
alone = minikv.logits(model, ids[-1:])
print("the whole text, then:  ", best_word(logits[-1]))
print(f"only {words[-1]!r}, then:    ", best_word(alone[-1]))

# %% [markdown] id="waste"
# ## The same work, again and again
#
# Watch four rounds. In each, how many of the tokens had been through the model before?

# %% id="four-rounds" tags=["nbval-check-output"]
start = tokenizer.encode("The capital of France is Paris")
text, rounds = list(start), []
print("round  computed  again  next")
for number in range(1, 5):
    again = 0 if number == 1 else len(text) - 1
    computed = minikv.logits(model, text)
    rounds.append((len(text), again, computed))
    text.append(int(computed[-1].argmax()))
    print(f"{number:5d}  {rounds[-1][0]:8d}  {again:5d}  {tokenizer.decode(text[-1:])!r}")

# %% [markdown] id="really-again"
# Was it really the *same* work? The mask says so: no earlier row can have changed. Compare round 3 with the first rows
# of round 4.

# %% id="same-rows" tags=["nbval-check-output"]
third, fourth = rounds[2][2], rounds[3][2]
torch.testing.assert_close(fourth[:-1], third, rtol=0, atol=1e-10)
print(f"{len(third)} of the {len(fourth)} rows of round 4 are those of round 3")

# %% [markdown] id="recomputed"
# Tokens that go through the model again with the same result are [recomputed tokens](glossary.md#recomputed-tokens).
# Here is how they pile up.

# %% id="figure-triangle" tags=["hide-input"]
written, times = write(model, start, 9)
labels = [tokenizer.decode([token]).strip() for token in written[:-1]]
fig, ax = plt.subplots(figsize=(7.5, 3.6))
for number in range(9):
    length = len(start) + number
    old = 0 if number == 0 else length - 1
    ax.barh(number, old, color="#dcdcdc", hatch="...", edgecolor="#9a9a9a", linewidth=0)
    ax.barh(number, length - old, left=old, color="#1f1f1f")
ax.set_xticks(np.arange(len(labels)) + 0.5, labels, rotation=60)
ax.set_yticks(range(9), range(1, 10))
ax.set(ylabel="round", title="black: computed for the first time    dotted: computed again")
ax.invert_yaxis()
ax.grid(False)
plt.show()

# %% id="figure-triangle-note"
in_all, first_time = sum(times), len(times)
note(
    "**What to see.** Round 1 takes in the prompt; each round after it adds one black square and repeats "
    f"everything to its left. Nine rounds computed {in_all} tokens, {first_time} of them for the first "
    f"time and {in_all - first_time} again. The dotted area grows with the square of the length."
)

# %% [markdown] id="count-fifty"
# Now count exactly, for 50 tokens written after a single one. Once with our loop, which counts each token; once with the
# engine's counter of tokens that went through the model; once with a formula.

# %% id="count-1225" tags=["nbval-check-output"]
n = 50
_, times = write(model, tokenizer.encode("The"), n)
again = [count - 1 for count in times]  # of each token
engine = minikv.generate_without_cache(model, "The", n)
by_engine = engine.computed_tokens - len(times)  # all passes, less each token's first
by_formula = n * (n - 1) // 2
print("times that each token was computed again:", again[:4], "...", again[-3:])
print("by our loop:", sum(again))
print("by the engine's counter:", by_engine)
print("by n (n - 1) / 2:", by_formula)
assert sum(again) == by_engine == by_formula

# %% id="compare-recomputed"
compare("recomputed-50", by_engine, "times")

# %% [markdown] id="operations"
# ## In operations: a line, a square, a cube
#
# Tokens are not yet work. `minikv.shape.roofline` counts the multiplications and additions that a round needs at least.
# They come in two kinds:
#
# - **matrix products**: every token through every weight, the same for each token;
# - **attention**: every query with every key that it may see, which makes n (n + 1) / 2 pairs for n tokens.
#
# Take a model with random weights, of the size that we will time below, and take differences. If a sequence's first
# differences are constant, it is a line; second: a square; third: a cube.

# %% id="degrees" tags=["nbval-check-output"]
from minikv.shape.roofline import attention_flops, matrix_flops

heads = {"heads": 8, "kv_heads": 8, "head_dim": 64}
timed_shape = minikv.ModelShape(layers=2, hidden=256, ffn=512, vocab=1024, **heads)
lengths = range(1, 65_537)
matrices = np.array([matrix_flops(timed_shape, n, n) for n in lengths])  # logits for all n rows
attention = np.array([attention_flops(timed_shape, n, n) for n in lengths])


def degree(sequence):
    """The power of n with which an exact polynomial sequence grows."""
    differences = [np.diff(sequence[:2000], n=d) for d in range(6)]
    return next(d for d in range(1, 6) if (differences[d] == differences[d][0]).all())


for name, sums in (("one round", np.array), ("a whole answer", np.cumsum)):
    powers = degree(sums(matrices)), degree(sums(attention))
    print(f"{name}: matrix products n^{powers[0]}, attention n^{powers[1]}")

# %% [markdown] id="degrees-said"
# One round is linear plus quadratic in the length. A whole answer is a sum of rounds, so each power rises by one:
# **quadratic plus cubic**. Which part matters depends on the length:

# %% id="who-dominates"
from minikv.shape.model_shape import PRESETS


def crossing(shape):
    """The first length at which a round's attention needs more operations than its layers' matrices."""
    lengths = range(1, 10**6)
    return next(n for n in lengths if attention_flops(shape, n, n) > matrix_flops(shape, n, 0))


note(
    f"In our small model attention overtakes the layers' matrix products at {crossing(timed_shape):,} "
    f"tokens; in Llama-2-7B at {crossing(PRESETS['llama-2-7b']):,}. Below that, most of what is wasted "
    "is the linear part: the same tokens pushed through the same weights."
)

# %% [markdown] id="clock"
# ## On the clock
#
# Generating thousands of tokens this way would take long. We need not: a round's time depends only on its length, so we
# time **a few lengths** and sum up. Each is the least of two or three repetitions.

# %% id="time-lengths"
timed_model = minikv.load(shape=timed_shape, seed=0)
sampled = [16, 32, 64, 128, 256, 512, 1024, 2048]
seconds = []
minikv.logits(timed_model, range(16))  # the first call may compile something
for n in sampled:
    token_ids, tries = [(7 * i) % timed_shape.vocab for i in range(n)], []
    for _ in range(3 if n < 1024 else 2):
        started = time.perf_counter()
        minikv.logits(timed_model, token_ids)
        tries.append(time.perf_counter() - started)
    seconds.append(min(tries))
operations = [int(matrices[n - 1] + attention[n - 1]) for n in sampled]

# %% id="time-table"
print(f"{'tokens':>7}{'ms for one more':>18}{'times the line above':>23}{'operations: times':>20}")
print(f"{sampled[0]:7,d}{1e3 * seconds[0]:18.1f}")
for i in range(1, len(sampled)):
    growth, expected = seconds[i] / seconds[i - 1], operations[i] / operations[i - 1]
    print(f"{sampled[i]:7,d}{1e3 * seconds[i]:18.1f}{growth:23.1f}{expected:20.1f}")

# %% [markdown] id="clock-said"
# Each line has twice the tokens of the line above. A factor of 2 is a line, a factor of 4 a square, and a short text
# hides both behind the fixed cost of starting each operation. Now sum up: an answer of *n* tokens takes the time of
# round 1, plus round 2, and so on to round *n*. Between two sampled lengths we take a straight line.

# %% id="sum-up"
upto = np.arange(1, sampled[-1] + 1)
each = np.interp(upto, sampled, seconds)  # seconds of the round with n tokens
answer = each.cumsum()  # seconds of a whole answer of n tokens
hoped = seconds[0] * upto  # if every token cost what the first ones do

fig, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.4))
left.plot(sampled, [1e3 * s for s in seconds], label="measured")
rate = np.median([o / s for o, s in zip(operations, seconds, strict=True)])
left.plot(sampled, [1e3 * o / rate for o in operations], label="operations / median speed")
left.set(
    xlabel="tokens in the text", ylabel="ms for one more token", title="one round", ylim=(0, None)
)
left.legend()
right.plot(upto, answer, marker="", label="summed")
right.plot(upto, hoped, marker="", label="if every token cost\nwhat the first ones do")
right.set(xlabel="tokens in the answer", ylabel="s in all", title="a whole answer", ylim=(0, None))
right.legend()
plt.show()

# %% id="sum-up-note"
ratio = answer[2047] / answer[1023]
kind = "more than a square (4)" if ratio > 4 else "between a line (2) and a square (4)"
note(
    f"**What to see.** On the machine that built this page, one more token after 2,048 took "
    f"{1e3 * seconds[-1]:,.0f} ms, after 16 it took {1e3 * seconds[0]:,.1f} ms. An answer of 1,024 tokens "
    f"would take {answer[1023]:,.0f} s, one of 2,048 tokens {answer[2047]:,.0f} s: {ratio:.1f} times as "
    f"long for twice the text, {kind}; a pure cube would be 8. If every token cost what the first ones do, "
    f"it would be {hoped[2047]:,.0f} s. The dashed line at the left counts the least number of operations. "
    "This plain version does more: it computes the scores above the diagonal and then masks them, and it "
    "writes all scores to memory and reads them again."
)

# %% id="compare-twice"
compare("twice-as-long", float(ratio), "times")

# %% [markdown] id="audit"
# ## Audit: three sentences that you may have read
#
# The course grew out of three good texts, a talk, a blog and an explainer (the *Sources* of a chapter name those that it
# uses). Their numbers are worth checking. "Round 4" is the fourth of the rounds above.

# %% id="claim-round-4"
claim("round-4-seven-wasted", rounds[3][1], source="blog")

# %% id="claim-49"
claim("49-recomputed-49-times", by_engine, source="blog")

# %% [markdown] id="audit-power"
# The third is about growth. The slope between an answer of 32,768 tokens and one of 65,536 tells the power of n, from
# exact counts of operations:

# %% id="claim-quadratic"
whole_attention, whole_matrices = attention.cumsum(), matrices.cumsum()
half, full = 32_768, 65_536
power = math.log2(whole_attention[full - 1] / whole_attention[half - 1])
power_of_matrices = math.log2(whole_matrices[full - 1] / whole_matrices[half - 1])
print(f"matrix products of a whole answer: n ^ {power_of_matrices:.3f}")
print(f"attention of a whole answer:       n ^ {power:.3f}")
claim("cost-is-quadratic", power, source="explainer")

# %% [markdown] id="war-story"
# ## War story: the copy that was none
#
# RMSNorm rescales a row to a typical size of 1. In low precision that is done in float32, so the code takes a float32
# copy first. Here it is in the style of a fast little engine, saving memory by multiplying in place:

# %% id="bad-norm"
epsilon = 1e-6  # so that nothing is divided by zero


def bad_norm(x, weight):
    y = x.float()  # a copy in float32 ... is it?
    y.mul_(torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + epsilon))
    return (y * weight).to(x.dtype)


# %% [markdown] id="war-story-run"
# Put it into the bundled model, once in bfloat16 and once in float32, the more exact of the two. (`_norm` is private to the
# model, as the underscore says. We reach in only to break it.)

# %% id="bad-norm-in-a-model"
for dtype in (torch.bfloat16, torch.float32):
    victim = minikv.load(dtype=dtype)
    victim._norm = bad_norm
    print(
        dtype, "->", repr(minikv.generate_without_cache(victim, "The capital of France is", 8).text)
    )

# %% [markdown] id="war-story-why"
# It works in the coarse dtype and writes nonsense in the fine one. Why?

# %% id="same-tensor" tags=["nbval-check-output"]
for dtype in (torch.bfloat16, torch.float32):
    x = torch.full((1, 4), 3.0, dtype=dtype)
    print(dtype, " x.float() is x:", x.float() is x, end="")
    bad_norm(x, torch.ones(4))
    print(f"   x before: 3.00, afterwards: {float(x[0, 0]):.2f}")

# %% [markdown] id="war-story-told"
# When `x` is in float32 already, `x.float()` has nothing to convert and returns **the very same tensor**. The in-place
# multiplication then rescales the hidden state itself, to which the layer was going to add its answer. Exactly this was
# reported against nano-vllm, a small and widely read engine ([issue
# 170](https://github.com/GeeeekExplorer/nano-vllm/issues/170), 2026). Such engines run in bfloat16 all day, where the
# conversion makes a copy, so nobody notices; whoever debugs in float32 "to be safe" meets it. minikv's norm never
# writes in place, in any dtype:

# %% id="norm-leaves-input" tags=["nbval-check-output"]
for dtype in (torch.bfloat16, torch.float32, torch.float64):
    healthy = minikv.load(dtype=dtype)
    x = torch.full((1, 256), 3.0, dtype=dtype)
    healthy._norm(x, healthy.norm)
    assert (x == 3).all()
    print(dtype, "input untouched")

# %% [markdown] id="engine"
# ## The engine's version
#
# First the forward pass. Read it with the list above in mind. In each layer, the first two lines make q, k, v and ask
# `kv` for the attention; the other two are the small network. The model does not know what `kv` is: that is the one
# seam that all later chapters work at.

# %% id="source-forward"
from minikv.model.transformer import Transformer

show_source(Transformer.__call__)

# %% [markdown] id="engine-attend"
# The engine's attention is your `one_head` for all heads at once. Two things to notice: the queries may be *fewer* than
# the keys (they are then the last tokens, as in `last_row`), and the product is never taken in less than float32. (The
# `group` axis belongs to chapter 3. Until then read it as 1: one key and one value for each head.)

# %% id="source-attend-one"
from minikv.cache.attention.reference import attend_one

show_source(attend_one)

# %% id="source-loop"
show_source(minikv.generate_without_cache)

# %% [markdown] id="engine-agree"
# Both versions, from the same start. (The engine keeps this slow and plain loop for good: it is the
# [oracle](glossary.md#oracle) against which every faster version of the later chapters is held.)

# %% id="agree" tags=["nbval-check-output"]
prompt = tokenizer.encode("The capital of France is Paris which has the")
ours, times = write(model, prompt, 10)
theirs = minikv.generate_without_cache(model, prompt, 10)
assert ours[len(prompt) :] == theirs.tokens
assert sum(times) == theirs.computed_tokens
print(repr(theirs.text))
print("same tokens, and the same", theirs.computed_tokens, "computed tokens")

one = attend_one(q[-1:], k.transpose(0, 1), v.transpose(0, 1))[0, 0]  # one query, all keys; head 0
torch.testing.assert_close(one, last_row(q_last, keys, values), rtol=0, atol=1e-10)
print("one query against all keys: the same row")

# %% [markdown] id="questions"
# ## Questions
#
# **1.** Chapter 0 did one job in four ways and got the same answers each time. Why could it?
#
# <details><summary>Answer</summary>
#
# Because a language model is a function of the text alone. It keeps nothing between two calls, so *how* the numbers
# were obtained (all anew, or some of them kept) cannot matter as long as they are the same numbers. Whatever the later
# chapters keep, share or move, this is the test that they have to pass.
#
# </details>
#
# **2.** "The key and value of a token depend only on that token." True?
#
# <details><summary>Answer</summary>
#
# Only in the first layer (and there the key also depends on the token's position). From the second layer on they are
# made from a hidden state into which attention has mixed what stood before. The same word after another text has
# another key and value. They never depend on what comes *after*: that is what the mask buys.
#
# </details>
#
# **3.** Take the mask away. Which of this chapter's results fall?
#
# <details><summary>Answer</summary>
#
# Every row could then see the new token, so every row would change in every round, and none of the work would be "the
# same work again". Models such as BERT are of this kind. They read a whole text at once and are not used to write token
# by token.
#
# </details>
#
# **4.** Only the last row's logits count. Does it follow that in each round only the last token has to go through the
# layers?
#
# <details><summary>Answer</summary>
#
# Not in the loop of this chapter. The last token's query needs the keys and values of all tokens, in every layer, and
# here nothing has kept them. To make them again, the earlier tokens must go through the layers below. If someone handed
# you those keys and values, the answer would be yes.
#
# </details>
#
# **5.** A prompt of 1,000 tokens and an answer of 200, without keeping anything. How many tokens go through the model,
# and how many of these for the first time?
#
# <details><summary>Answer</summary>
#
# The rounds have 1,000, 1,001 and so on up to 1,199 tokens: let Python add `sum(range(1_000, 1_200))`. For the first
# time: the prompt and the first 199 tokens of the answer (the last one is never read). Divide the two, and you see that
# more than 99 of 100 are computed again.
#
# </details>

# %% [markdown] id="big-engines"
# ## In the big engines
#
# None of them runs this chapter's loop by default; all of them have its two ingredients. Names and files as of 2026;
# files move.
#
# | engine | one layer's attention | logits for the rows that need them only |
# |---|---|---|
# | vLLM | `Attention` in `vllm/model_executor/layers/attention/attention.py` | `logits_indices` in `vllm/v1/worker/gpu_model_runner.py` |
# | SGLang | `RadixAttention` in `python/sglang/srt/layers/radix_attention.py` | `LogitsProcessor` in `python/sglang/srt/layers/logits_processor.py` |
# | Hugging Face transformers | `LlamaAttention` in `src/transformers/models/llama/modeling_llama.py` | `logits_to_keep` in the same file |
# | llama.cpp | `build_attn_mha` in `src/llama-graph.cpp` | `build_inp_out_ids` in the same file |
#
# In Hugging Face transformers, `model.generate(..., use_cache=False)` runs the loop of this chapter.

# %% [markdown] id="sources"
# ## Sources
#
# - A. Vaswani and others, *Attention Is All You Need*, 2017, arXiv 1706.03762: scaled dot-product attention, heads, the
#   mask.
# - Sankalp Shubham, *How prompt caching works*, 2025, parts 2 and 3 ("the blog"): the sentence about Paris, the rounds.
# - Avi Chawla, *KV Caching in LLMs, clearly explained* ("the explainer"): why only the last row matters.
# - nano-vllm, issue 170, 2026: the norm that changed its input.

# %% [markdown] id="next"
# ## Next
#
# Each round of the loop rebuilds a pile of numbers that it had in its hands a moment ago, and then throws them away
# again. Which of them would you keep, if you could keep only two matrices a layer? [Chapter 2: Remember the
# keys](02_remember_the_keys.ipynb).
