# %% [markdown]
# # 6. Share the prefix
#
# [Before: 5. Pages](05_pages.ipynb) | [Next: 7. Many at once](07_many_at_once.ipynb) |
# [Glossary](glossary.md)
#
# **You will be able to**
#
# - say which K and V two requests may share, and show by measurement why no others;
# - build the index that finds them: chained keys, reference counts, eviction;
# - write prompts that stay findable, and predict to the token what a change in one costs.
#
# **You need** chapters [2](02_remember_the_keys.ipynb) and [5](05_pages.ipynb): the KV cache, prefill and time to first token (TTFT), blocks, block
# tables and the pool.
#
# **Time** About 45 minutes to read; half a minute to run.

# %% id="setup"
import json
import random
from collections import OrderedDict, deque

import matplotlib.pyplot as plt
import torch

import minikv
from minikv.cache.attention.reference import attend_one
from minikv.cache.blocks import BlockPool, BlockTable, blocks_for
from minikv.classroom.notebook import claim, compare, explore, note, predict, show_source
from minikv.shape.model_shape import PRESETS
from minikv.shape.size import kv_bytes, with_unit

plt.style.use("minikv.show.course")
model = minikv.load()
tokenizer = model.tokenizer

# %% [markdown]
# A hundred people ask the same assistant. Every prompt begins with the same instructions and ends
# with a question of its own. Chapter 5 gave each of them a block table, and nothing says that two
# tables may not name the same block. So the instructions could be in memory once, and be computed
# once. The whole chapter is one question: **when is that allowed?**
#
# ## Two guesses first

# %% id="predict"
predict(
    "prefix-blocks",
    "100 prompts begin with the same 96 tokens; each goes on with 12 tokens of its own. "
    "Blocks have 16 slots. Apart, they take 700 blocks. How many do they take if the common "
    "part is there once?",
    "blocks",
)
predict(
    "prefix-edit",
    "A chat of eight messages, about 20 tokens each, follows some 40 tokens of instructions. "
    "You mend one word in the first message and send it all again. How many percent of the "
    "prompt need not be computed?",
    "%",
)

# %% [markdown]
# ## The first idea: a dictionary
#
# K and V are computed from tokens. So remember them by token: a dictionary from words to their K
# and V, and whoever uses the word again looks it up. Does a word have *one* K and V?
#
# We need a look inside. `Growing` is the cache of chapter 2 in a few lines, and `compute` pushes
# tokens through the model as the continuation of what it holds already.

# %% id="growing"


class Growing:
    """K and V of one sequence: for each layer one tensor [2, tokens, kv_heads, head_dim]."""

    def __init__(self):
        self.layers = [
            torch.zeros(2, 0, model.shape.kv_heads, model.shape.head_dim)
            for _ in range(model.shape.layers)
        ]

    def attend(self, layer, q, k, v):
        self.layers[layer] = torch.cat((self.layers[layer], torch.stack((k, v))), dim=1)
        keys, values = self.layers[layer].transpose(1, 2)
        return attend_one(q, keys, values)  # causal attention, as in chapter 1

    def all(self):
        return torch.stack(self.layers)  # [layers, 2, tokens, kv_heads, head_dim]


def compute(ids, kv, start=None):
    """Push `ids` through the model behind what `kv` holds. Returns the logits of the last token."""
    start = kv.layers[0].shape[1] if start is None else start
    positions = torch.arange(start, start + len(ids))
    with torch.inference_mode():
        return model(torch.tensor(ids), positions, kv)[-1]


def kv_of(text, start=None):
    kv = Growing()
    compute(tokenizer.encode(text), kv, start)
    return kv.all()


# %% [markdown]
# Now one word in two contexts, at the same position.

# %% id="two-contexts" tags=["nbval-check-output"]
one, other = "The city by the river", "He fell in the river"
for text in (one, other):
    print(tokenizer.pieces(text))
assert tokenizer.encode(one)[-1] == tokenizer.encode(other)[-1]
a, b = kv_of(one)[:, :, -1], kv_of(other)[:, :, -1]  # " river": [layers, 2, kv_heads, head_dim]
for layer in range(model.shape.layers):
    for number, name in enumerate("KV"):
        same = (
            "equal, bit by bit" if torch.equal(a[layer, number], b[layer, number]) else "different"
        )
        print(f"layer {layer}: {name} of ' river' {same}")

# %% [markdown]
# Equal in the first layer, different in all others. That is no accident. The first layer's K and
# V are projections of the word's embedding, and the embedding knows only the word. The layer's output
# already holds what attention brought from the words before, and K and V of layer 1 are
# projections of that. (The position counts too. RoPE, chapter 1, turns K by it: the same word one place
# further has another K already in layer 0. V is not turned.)
#
# How different? As a share of the vector's own length:

# %% id="difference"


def difference(left, right):
    """How far apart two vectors are, as a share of their mean length."""
    return (2 * (left - right).norm() / (left.norm() + right.norm())).item()


pairs = {
    "another context": (kv_of(one), kv_of(other)),
    "the same context, one place on": (kv_of(one), kv_of(one, start=1)),
}
gaps = {
    (what, name): [
        difference(left[layer, number, -1], right[layer, number, -1])
        for layer in range(model.shape.layers)
    ]
    for what, (left, right) in pairs.items()
    for number, name in enumerate("KV")
}
assert gaps["another context", "K"][0] == gaps["another context", "V"][0] == 0
here, there = (kv[0, 0, -1].norm(dim=-1) for kv in pairs["the same context, one place on"])
assert torch.allclose(here, there, atol=1e-4)  # K in layer 0: turned, and as long as before
assert max(gaps["the same context, one place on", "V"]) < 1e-4

# %% id="difference-figure" tags=["hide-input"]
fig, axis = plt.subplots()
for (what, name), gap in gaps.items():
    face = "white" if name == "V" else None
    axis.plot(range(len(gap)), [100 * g for g in gap], label=f"{name}, {what}", mfc=face)
axis.set(
    xlabel="layer",
    ylabel="difference, % of the length",
    title="K and V of ' river' against those of the same word elsewhere",
    xticks=range(model.shape.layers),
)
axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()
context = gaps["another context", "K"] + gaps["another context", "V"]
moved = gaps["the same context, one place on", "K"]
note(
    "**What to see.** In another context both lines start at 0 and leave it at once: from layer 1 "
    f"on, K and V differ by {100 * min(g for g in context if g):.0f} to {100 * max(context):.0f} % "
    "of their length. One place further on, in the same words, K differs by "
    f"{100 * moved[0]:.0f} % already in layer 0: it is as long as before and turned. V stays the "
    "same in all layers, within rounding, because RoPE makes attention see distances only, and "
    "those have not changed. But K is kept turned, so a copy from another place does not fit."
)

# %% [markdown]
# So a word has as many K and V as it has pasts. What is *the past*, exactly? Take a prompt, change
# one token in the middle, and compare position by position.

# %% id="one-changed"
sentence = (
    "You are a guide to the cities of Europe. Answer in one short sentence, and name the city "
    "first."
)
ids = tokenizer.encode(sentence)
at = 12
changed = [*ids[:at], tokenizer.encode(" river")[0], *ids[at + 1 :]]
left, right = Growing(), Growing()
compute(ids, left)
compute(changed, right)
left, right = left.all(), right.all()

fig, axis = plt.subplots(figsize=(7.5, 2.8))
for layer in (0, 1, model.shape.layers - 1):
    gap = [100 * difference(left[layer, :, p], right[layer, :, p]) for p in range(len(ids))]
    axis.plot(gap, label=f"layer {layer}", markersize=4)
axis.axvline(at, color="#767676", linewidth=0.8, linestyle="-", marker="")
axis.annotate(
    "the changed token",
    (at, axis.get_ylim()[1] * 0.9),
    xytext=(-6, 0),
    textcoords="offset points",
    ha="right",
)
axis.set(xlabel="position", ylabel="difference of K and V, %", title="one token changed")
axis.legend(loc="center left")
plt.show()
before = torch.equal(left[:, :, :at], right[:, :, :at])
deepest = [difference(left[-1, :, p], right[-1, :, p]) for p in range(at + 1, len(ids))]
assert before
assert min(deepest) > 0
note(
    f"**What to see.** The {at} positions before the change have the same K and V in every layer, "
    "bit by bit. In layer 0 only the changed token itself differs. In the last layer **every** "
    f"later position differs, by {100 * min(deepest):.1f} to {100 * max(deepest):.0f} %."
)

# %% [markdown]
# The causal mask (chapter 1) gives and takes here. Nothing that comes later can change an earlier
# K or V; everything that stood before does change them. Two prompts may therefore share the K and
# V of exactly what they have in common **from the very first token on**. That is their common
# [prefix](glossary.md#prefix), and the first difference ends it for good, however long the two
# agree afterwards. (Pieces in the middle cannot be shared exactly. There is research on reusing
# them approximately and mending the error; this is not that.)
#
# ## What the dictionary would do
#
# Differences of vectors are abstract. Let us build the dictionary and read the text that comes
# out. Blocks of four tokens are looked up from the start of the prompt; each one that is known is
# a [hit](glossary.md#hit), and its K and V are taken as they are. What makes two blocks "the same"
# is left open: `serve` is given a list of keys, one for each full block.

# %% id="serve"
B = 4


def blocks_of(ids, size=B):
    return [tuple(ids[i : i + size]) for i in range(0, len(ids) // size * size, size)]  # full ones


def serve(ids, keys, store):
    """Logits after `ids`, with leading blocks taken from `store`, and how many were."""
    kv, hits = Growing(), 0
    while hits < (len(ids) - 1) // B and keys[hits] in store:
        for layer, block in enumerate(store[keys[hits]]):
            kv.layers[layer] = torch.cat((kv.layers[layer], block), dim=1)
        hits += 1
    logits = compute(ids[hits * B :], kv)
    for number, key in enumerate(keys):
        store.setdefault(key, kv.all()[:, :, number * B : (number + 1) * B])
    return logits, hits


# %% id="dictionary" tags=["nbval-check-output"]
store = {}
served = [
    "The capital of Italy and I will not go to the",
    "You are a fool, my lord",
    "You are a fool and I will not go to the",
]
for text in served:
    ids = tokenizer.encode(text)
    logits, hits = serve(ids, blocks_of(ids), store)  # the key of a block: its tokens, no more
    oracle = minikv.logits(model, ids)[-1]
    print(f"{text!r}: {hits} hits of {len(blocks_of(ids))} blocks")
    print(f"    dictionary: ...{tokenizer.decode([int(logits.argmax())])!r}")
    print(f"    computed:   ...{tokenizer.decode([int(oracle.argmax())])!r}")
assert logits.argmax() != oracle.argmax()

# %% [markdown]
# Read the third. Both of its blocks were known: one from the second prompt, one (`' and I will
# not'`) from the first, where it had stood after *The capital of Italy*. The model was asked
# about a fool and goes on about a *capital*. Somebody else's prompt leaks into the answer, nothing
# crashes, and every single look-up was right. It is the key that is wrong: it forgets the past.
#
# ## A key that holds its past
#
# A block's key must stand for its own tokens and all tokens before. The whole prefix as a key
# would do, but it grows with every block. Hash it instead, link by link: a block's key is a hash
# of *the key before it* and its own tokens. This is a [key chain](glossary.md#key-chain).

# %% id="chain" tags=["nbval-check-output"]


def chain(ids, size=B):
    keys, parent = [], 0
    for block in blocks_of(ids, size):
        parent = hash((parent, block))
        keys.append(parent)
    return keys


store = {}
for text in served:
    ids = tokenizer.encode(text)
    logits, hits = serve(ids, chain(ids), store)
    oracle = minikv.logits(model, ids)[-1]
    assert torch.allclose(logits, oracle, atol=1e-4)
    print(f"{text!r}: {hits} hits, ...{tokenizer.decode([int(logits.argmax())])!r}")
print("with chained keys, every answer is the one without a cache")

# %% [markdown]
# The third prompt now finds one block, *You are a fool*, and computes the rest. The block `' and
# I will not'` is in the store twice, under two keys, because it has two pasts. That is a tree: two
# prompts share their trunk, and where they differ they branch.
#
# Only **full** blocks get a key. A half-filled one will still be written to, and a key must stand for something that does not change.
#
# One more detail stands in `serve`: at most `(len(ids) - 1) // B` hits. Send the same prompt twice
# and see why.

# %% id="full-hit" tags=["nbval-check-output"]
eight = tokenizer.encode("You are a fool and I will not")
assert len(eight) == 2 * B
store = {}
for attempt in (1, 2):
    logits, hits = serve(eight, chain(eight), store)
    print(f"attempt {attempt}: {len(eight)} tokens in 2 blocks, {hits} hit(s)")
assert hits == 1
assert all(key in store for key in chain(eight))
assert torch.allclose(logits, minikv.logits(model, eight)[-1], atol=1e-4)

# %% [markdown]
# All eight tokens have their K and V in the store, and still the second block is computed again.
# What we want is the *next token*, and that comes from the last token's logits. K and V are kept,
# but the query and the hidden state of the last token are not. (nano-vllm crashed on such a full
# hit: issue 144, pull request 199. Nothing was left to compute, so there was no row to take logits
# from.) One token would be enough; a whole block is computed because blocks are what is shared,
# and one that others read must not be written to.
#
# ## Whose block is it?
#
# Now with the memory of chapter 5: a pool, and block tables that name the same block. When a request
# leaves, it may not free a block that another still reads. So count: a block's [reference
# count](glossary.md#reference-count) is the number of tables that name it.
#
# And when the count falls to zero? The K and V are still there and still right. Throwing
# them away would be a pity: the next request with this prefix may be a second away. The block becomes a
# [cached block](glossary.md#cached-block): nobody owns it, the index still finds it, and whoever
# needs memory may have it. **It is as good as free.** Giving it away is
# [eviction](glossary.md#eviction), and somebody must choose: the [least recently
# used](glossary.md#lru), LRU for short.


# %% id="memory"
class Memory:
    """Blocks that are free, owned, or cached. Bookkeeping only: no K and V."""

    def __init__(self, num_blocks, size=B, tail_first=True):
        self.free, self.size, self.tail_first = deque(range(num_blocks)), size, tail_first
        self.owners = [0] * num_blocks
        self.index, self.key_of = {}, {}  # key -> block and back
        self.cached = OrderedDict()  # blocks with a key and no owner, the longest unused one first
        self.evictions = 0

    def take(self):
        """A block for new content: a free one, or else the least recently used cached one."""
        if self.free:
            block = self.free.popleft()
        else:
            block, _ = self.cached.popitem(last=False)
            del self.index[self.key_of.pop(block)]
            self.evictions += 1
        self.owners[block] = 1
        return block

    def end(self, table):
        """A request leaves."""
        for block in reversed(table) if self.tail_first else table:
            self.owners[block] -= 1
            if self.owners[block] == 0:
                if block in self.key_of:
                    self.cached[block] = None  # now the most recently used
                else:
                    self.free.append(block)


# %% [markdown]
# And the other half: a request comes. It takes what it finds, and only then new blocks, so that
# nothing it found can be evicted for it.


# %% id="shelf"
class Shelf(Memory):
    def begin(self, ids):
        """A request comes: its block table, and how many of its blocks were found."""
        keys, table = chain(ids, self.size), []
        for key in keys[: (len(ids) - 1) // self.size]:
            if key not in self.index:
                break
            table.append(self.index[key])
        hits = len(table)
        for block in table:
            self.owners[block] += 1
            self.cached.pop(block, None)  # it has an owner again
        table += [self.take() for _ in range(blocks_for(len(ids), self.size) - hits)]
        for key, block in list(zip(keys, table, strict=False))[hits:]:
            if key not in self.index:
                self.index[key], self.key_of[block] = block, key
        return table, hits


# %% id="shelf-run" tags=["nbval-check-output"]
shelf = Shelf(num_blocks=8)
first = tokenizer.encode("The capital of Italy and I will not go to the")
second = tokenizer.encode("The capital of Italy is a city")
table_1, hits = shelf.begin(first)
print(f"first:  table {table_1}, {hits} hits")
table_2, hits = shelf.begin(second)
print(
    f"second: table {table_2}, {hits} hit; owners of block {table_2[0]}: {shelf.owners[table_2[0]]}"
)
shelf.end(table_1)
print(f"the first one leaves: owners {shelf.owners}, cached {list(shelf.cached)}")
shelf.end(table_2)
print(f"both are gone: owners {shelf.owners}, cached {list(shelf.cached)}, free {list(shelf.free)}")
table_3, hits = shelf.begin(first)
print(f"the first one comes again: table {table_3}, {hits} hits")

# %% [markdown]
# Block 0, *The capital of Italy*, had two owners and outlived both. The partly filled blocks had
# no key, so they went straight back to the free list.
#
# ## Who goes first?
#
# Look at `end` again: it hands the blocks over **from the last to the first**. Why does the order matter?
# Three blocks of memory, one chain of three blocks, then a short stranger who needs one block.

# %% id="tail" tags=["nbval-check-output"]
twelve = tokenizer.encode("You are a guide. What is the capital of France")
assert len(twelve) == 3 * B
for tail_first in (False, True):
    shelf = Shelf(num_blocks=3, tail_first=tail_first)
    shelf.end(shelf.begin(twelve)[0])
    shelf.end(shelf.begin(tokenizer.encode("Good"))[0])  # the stranger
    _, hits = shelf.begin(twelve)
    print(
        f"{'tail' if tail_first else 'head'} given up first: the chain comes again and finds {hits}"
    )

# %% [markdown]
# If the head goes, the two blocks after it are stranded: their K and V are perfect, and no look-up
# can reach them, since a hit cannot start in the middle. If the tail goes, two thirds of the chain
# can still be found. A simulator had no order among blocks released together; in 200 runs of this very case the head went first in
# 144 (llm-d-inference-sim issue 704).
#
# The same by the engine, where a request's blocks are counted as free as soon as it is done:

# %% id="tail-engine" tags=["nbval-check-output"]


def ask(engine, prompt, new_tokens=1, salt=None):
    """One request, from its arrival to its end."""
    sampling = minikv.Sampling(max_new_tokens=new_tokens, ignore_eos=True)
    engine.add("a request", prompt, sampling, salt=salt)
    outs = []
    while engine.has_work:
        outs = engine.step() or outs
    return outs[0]


engine = minikv.Engine(model, num_blocks=3, block_size=4)
ask(engine, twelve)
stats = engine.stats()
print(
    f"done: {stats.cached_blocks} blocks cached, {stats.free_blocks} of {stats.total_blocks} free"
)
ask(engine, "Good")
out = ask(engine, twelve)
print(f"after the stranger: {out.cached_tokens} of {len(twelve)} tokens found")
assert out.cached_tokens == 2 * 4

# %% [markdown]
# ## One system prompt, a hundred requests
#
# First in bytes, for a model of chapter 3, Llama-2-7B in bf16, and 500 tokens of instructions.

# %% id="bytes"
llama = PRESETS["llama-2-7b"]
apart = kv_bytes(llama, 500, requests=100)
shared = kv_bytes(llama, 500, requests=100, shared_tokens=500)
print("a hundred copies:", with_unit(apart))
print("one, shared:     ", with_unit(shared))
claim("500-token-prompt-25-gb", apart, source="blog")

# %% [markdown]
# Then for real. A hundred prompts on the bundled model, 96 tokens in common, 12 of their own, once
# without and once with sharing. The first one is alone in its step, because a block
# can be found only when its K and V have been written; then the other 99 come, all at once.

# %% id="hundred" tags=["nbval-check-output"]
instructions = tokenizer.encode(
    "You are a patient guide to the cities of Europe. You know the capital of every country, the "
    "rivers that run through them, and the famous places that a visitor should see. Answer in one "
    "short sentence, name the city first, and never make up what you do not know. Be kind. "
)
common = (instructions * 2)[:96]
rng = random.Random(6)
prompts = [common + [rng.randrange(300, 2_000) for _ in range(12)] for _ in range(100)]


def hundred(prefix_caching):
    """Blocks that 100 living requests own, and prompt tokens computed."""
    engine = minikv.Engine(
        model,
        num_blocks=800,
        max_batch_tokens=12_000,  # all in one step, to see them together
        max_batch_requests=100,
        prefix_caching=prefix_caching,
    )
    sampling = minikv.Sampling(max_new_tokens=3, ignore_eos=True)
    engine.add(0, prompts[0], sampling)
    engine.step()
    for number in range(1, 100):
        engine.add(number, prompts[number], sampling)
    engine.step()
    stats = engine.stats()
    assert stats.running == 100
    return stats.total_blocks - stats.free_blocks, stats.prompt_tokens - stats.hit_tokens


apart_blocks, apart_tokens = hundred(prefix_caching=False)
shared_blocks, shared_tokens = hundred(prefix_caching=True)
print(f"apart:  {apart_blocks:4} blocks, {apart_tokens:6,} prompt tokens computed")
print(f"shared: {shared_blocks:4} blocks, {shared_tokens:6,} prompt tokens computed")
assert shared_blocks == 96 // 16 + 100 * blocks_for(12, 16)
assert shared_tokens == 96 + 100 * 12

# %% id="hundred-compare"
compare("prefix-blocks", shared_blocks, "blocks")

# %% id="hundred-figure" tags=["hide-input"]
shelf, owned = Shelf(num_blocks=800, size=16), []
for prompt in prompts:
    shelf.begin(prompt)
    owned.append(sum(count > 0 for count in shelf.owners))
block_bytes = 16 * model.shape.kv_bytes_per_token("float32")
alone = [number * blocks_for(108, 16) for number in range(1, 101)]
fig, axis = plt.subplots(figsize=(7.5, 2.8))
for line, name in ((alone, "apart"), (owned, "shared")):
    axis.plot(range(1, 101), [n * block_bytes / 1e6 for n in line], label=name, marker="")
    axis.text(101, line[-1] * block_bytes / 1e6, name, va="center")
axis.plot(
    [100, 100], [n * block_bytes / 1e6 for n in (apart_blocks, shared_blocks)], "kx", markersize=9
)
axis.set(
    xlabel="requests at the same time",
    ylabel="KV memory, MB",
    title="96 tokens in common, 12 of one's own (crosses: counted in the engine)",
    xlim=(0, 112),
)
plt.show()
assert [alone[-1], owned[-1]] == [apart_blocks, shared_blocks]
note(
    "**What to see.** Both lines are straight. Apart, a request adds "
    f"{alone[1] - alone[0]} blocks; shared, {owned[1] - owned[0]}, for what is its own: that part "
    "sharing cannot save. At 100 requests that is "
    f"{apart_blocks * block_bytes / 1e6:.1f} against {shared_blocks * block_bytes / 1e6:.1f} MB, "
    f"and {apart_tokens / shared_tokens:.1f} times fewer prompt tokens computed. The lines are "
    "your `Shelf`, the crosses the engine."
)

# %% [markdown]
# Memory is half of it. The other half is time: tokens that are found need no prefill. A prompt of
# 768 tokens, of which more and more are found:

# %% id="ttft"
engine = minikv.Engine(model, num_blocks=1_200, max_batch_tokens=1_024)
base = [rng.randrange(300, 2_000) for _ in range(768)]
ask(engine, base)
found = (0, 192, 384, 576, 752)
ttft = {}
for count in found:
    times = []
    for _ in range(4):
        out = ask(engine, base[:count] + [rng.randrange(300, 2_000) for _ in range(768 - count)])
        assert out.cached_tokens == count
        assert out.computed_tokens == 768 - count
        times.append(out.ttft_s)
    ttft[count] = min(times)

# %% id="ttft-figure" tags=["hide-input"]
fig, axis = plt.subplots(figsize=(7.5, 2.6))
axis.plot(found, [1_000 * ttft[count] for count in found])
axis.set(
    xlabel="tokens found, of a prompt of 768",
    ylabel="TTFT, ms",
    title="time to first token, nobody else on the engine",
    ylim=(0, None),
)
plt.show()
note(
    f"**What to see.** On the machine that built this page the first token came after "
    f"{1_000 * ttft[0]:.0f} ms when nothing was found and after {1_000 * ttft[752]:.0f} ms with "
    f"{found[-1]} of 768 tokens found: **{ttft[0] / ttft[752]:.0f} times** sooner. What is left "
    "is prefill of the rest, and the overhead of a step (chapter 3). Time per output token does "
    "not change: decoding reads all K and V, found or computed."
)

# %% [markdown]
# ## How to write a prompt that is found
#
# Nobody who writes prompts sees keys and blocks. But they decide the hits. Here is one assistant: instructions, a list of tools in
# JSON, and a chat. Each row of the next cell sends a prompt and then a second one that *means* the
# same or goes on from it, and counts the tokens of the second that were found.

# %% id="hygiene-prompts"
SYSTEM = (
    "You are a patient guide to the cities of Europe. Answer in one short sentence, name the city "
    "first, and never make up what you do not know.\n"
)
TOOLS = [
    {"name": "weather", "city": "text", "day": "number"},
    {"name": "train", "from": "text", "to": "text"},
    {"name": "hotel", "city": "text", "nights": "number"},
]
CHAT = [
    "User: What is the capital of France, and how do I get there?\n",
    "Guide: Paris is the capital of France, and there is a train to it.\n",
    "User: And what is the capital of Italy, and is it far from there?\n",
    "Guide: Rome is the capital of Italy, and there is a night train to it.\n",
    "User: What is the weather like in Rome in the month of May?\n",
    "Guide: Rome is warm in May, and there is not much rain at all.\n",
    "User: And which river is it that runs through the city of Rome?\n",
    "Guide: Rome lies on the Tiber, which runs through the city to the sea.\n",
]
shuffled = [{key: tool[key] for key in reversed(tool)} for tool in TOOLS]
assert shuffled == TOOLS  # the same tools; only the order of the keys differs
chat, tools = "".join(CHAT[:6]), json.dumps(TOOLS) + "\n"
mended = [CHAT[0].replace("how do I", "how can I"), *CHAT[1:]]

ways = {  # name: (first prompt, second prompt)
    "clock first": (f"12:03:44. {SYSTEM}{chat}", f"12:07:09. {SYSTEM}{chat}"),
    "clock last": (f"{SYSTEM}{chat}12:03:44.", f"{SYSTEM}{chat}12:07:09."),
    "tools, keys in any order": (
        tools + SYSTEM + chat,
        json.dumps(shuffled) + "\n" + SYSTEM + chat,
    ),
    "tools, keys sorted": tuple(
        json.dumps(some, sort_keys=True) + "\n" + SYSTEM + chat for some in (TOOLS, shuffled)
    ),
    "oldest messages dropped": (SYSTEM + chat, SYSTEM + "".join(CHAT[2:])),
    "first message mended": (SYSTEM + "".join(CHAT), SYSTEM + "".join(mended)),
    "two messages appended": (SYSTEM + chat, SYSTEM + "".join(CHAT)),
}

# %% id="hygiene" tags=["nbval-check-output"]
rows = {}
for way, (before, after) in ways.items():
    engine = minikv.Engine(model, num_blocks=64, block_size=16)
    ask(engine, before)
    out = ask(engine, after)
    rows[way] = out.cached_tokens, len(tokenizer.encode(after))
    print(f"{way:25} {rows[way][0]:4} of {rows[way][1]} tokens found")

# %% id="hygiene-figure" tags=["hide-input"]
fig, axis = plt.subplots(figsize=(7.5, 3.0))
for place, (cached, total) in enumerate(reversed(rows.values())):
    share = 100 * cached / total
    kept = share > 50
    axis.barh(place, 100, color="white", edgecolor="#767676", linewidth=0.6)
    axis.barh(
        place,
        share,
        color="#767676" if kept else "white",
        edgecolor="black",
        hatch="" if kept else "////",
    )
    axis.text(101, place, f"{cached} of {total}", va="center", fontsize=9)
axis.set_yticks(range(len(rows)), list(rows)[::-1])
axis.grid(False)
axis.set(xlim=(0, 118), xlabel="tokens of the second prompt that were found, %")
plt.show()
note(
    "**What to see.** A clock costs "
    f"{rows['clock first'][1] - rows['clock first'][0]} tokens in front and "
    f"{rows['clock last'][1] - rows['clock last'][0]} at the end, for the same words. Tools as "
    "JSON are found only when their text is the same: sort the keys. A chat that only grows is "
    "found up to its last full block; mend its first message, and of "
    f"{rows['first message mended'][1]} tokens {rows['first message mended'][0]} are left: what "
    "stands before the mended word, in whole blocks."
)
compare(
    "prefix-edit",
    round(100 * rows["first message mended"][0] / rows["first message mended"][1]),
    "%",
)

# %% [markdown]
# (Why is nothing found after a clock that differs in a few digits? The first block holds them, and a
# hit starts with the first block or not at all. With the date in front and the seconds last, some
# blocks might be found before the digits that change; do not rely on it.)
#
# The rule fits in a line: **what never changes first, what changes at the end, and history only
# grows.** Dropping the oldest messages to keep a chat short is the same fault as mending them: all
# that follows has moved. If it must be done, do it seldom and in large steps.
#
# ## Audit: a clock, a capital letter, and what is shared
#
# The talk speaks of a timestamp before the prompt. Count it:

# %% id="audit-clock"
claim("timestamp-before-the-prompt", rows["clock first"][0], source="talk")

# %% [markdown]
# The agent goose had the date and time, to the second, in its instructions, and mended it by keeping
# only the date (pull request 2434). Tools in random order were
# found there as well (pull request 5192). The billing header of the verdict was mended in vLLM too
# (pull request 36829).
#
# And the blog writes *capital* in one picture and *Capital* in the next, as if the two were one
# prefix. At block size 1, so that no rounding to blocks hides anything:

# %% id="audit-capital" tags=["nbval-check-output"]
lower, upper = "The capital of France is", "The Capital of France is"
print(tokenizer.pieces(lower))
print(tokenizer.pieces(upper))
engine = minikv.Engine(model, num_blocks=64, block_size=1)
ask(engine, lower)
out = ask(engine, upper)
print(f"{out.cached_tokens} of {len(tokenizer.encode(upper))} tokens found")
claim("capital-and-Capital", out.cached_tokens - len(tokenizer.encode("The")), source="blog")

# %% [markdown]
# To the tokenizer a capital letter is another token, as strange as any other word.
#
# The third figure: *KV can hardly be shared between conversations.* In the talk's own experiment
# all conversations (it calls them sessions) begin with the same 10,000 tokens. `minikv.lab` holds that workload (chapter 8):

# %% id="audit-shared"
from minikv.lab.simulate import WORKLOAD

last_prompt = WORKLOAD.prompt_tokens(WORKLOAD.turns - 1)
print(
    f"a session's last prompt: {last_prompt:,} tokens, "
    f"{WORKLOAD.system_tokens:,} of them the same for all"
)
claim("kv-hardly-shared", WORKLOAD.system_tokens / last_prompt, source="talk")

# %% [markdown]
# ## Who may share with whom?
#
# A hit is faster than a miss, and time can be measured from outside: whoever sends a guess and gets a quick
# answer knows that somebody sent the same before (a timing side channel; it has been
# demonstrated on public services: Song et al., 2024). Tenants (customers who share an engine) who must not learn that of each other get a
# [salt](glossary.md#salt), which goes into the root of the key chain: other root, other keys, all
# the way down.

# %% id="salt" tags=["nbval-check-output"]
engine = minikv.Engine(model, num_blocks=64, block_size=16)
for salt in (None, "acme", "zeta", "acme"):
    out = ask(engine, SYSTEM + chat, salt=salt)
    print(f"salt {salt!s:5}: {out.cached_tokens} tokens found")

# %% [markdown]
# The root holds what else K and V depend on: the model's weights and the dtype. Weights may change under a running
# engine (fine-tuning, reinforcement learning), and then every cached block is
# stale. Nobody can see that from the tokens.

# %% id="weights" tags=["nbval-check-output"]
trained = minikv.load(dtype=torch.float64)
prompt = SYSTEM + CHAT[0] * 3 + CHAT[1] + "User: The capital of Italy is"
engine = minikv.Engine(trained, num_blocks=64, block_size=16)
ask(engine, prompt)
trained.layers[0].down.mul_(0.2)  # somebody changes the weights
stale = ask(engine, prompt, new_tokens=8)
engine.invalidate_cache()
fresh = ask(engine, prompt, new_tokens=8)
expected = minikv.generate_without_cache(trained, prompt, 8)
print(f"the new weights say:                {expected.text!r}")
print(f"not told: {stale.cached_tokens:3} tokens found, answer {stale.text!r}")
print(f"told:     {fresh.cached_tokens:3} tokens found, answer {fresh.text!r}")
assert stale.tokens != expected.tokens == fresh.tokens

# %% [markdown]
# ## See it: the tree
#
# The tree, drawn from the engine's own `BlockPool` and `PrefixCache`. Two given prompts, *"You are a guide. What is the
# capital of France?"* and *"... the river of Rome?"*, have come and gone. Then yours come. Use Tab and the
# arrow keys, or type and press Enter. Try this:
#
# - change one letter at the beginning of the second prompt, then at its end; write *Capital*;
# - make both prompts the same, with 1 slot in a block: which token is not found, and why?
# - go through the block sizes: when does a large block cost you a hit?
# - let the first one end, or make the pool larger: who is evicted, and in which order?

# %% id="widget"
from minikv.classroom.explorers import prefix_tree

explore(prefix_tree.draw, **prefix_tree.CONTROLS)

# %% [markdown]
# ## War story: another prompt's answer
#
# A key is made of bytes, and a token id is a number. What could go wrong? Somebody wants compact keys, and
# spends one byte a token.

# %% id="war" tags=["nbval-check-output"]


def compact_chain(ids):
    keys, parent = [], b""
    for block in blocks_of(ids):
        parent = parent + bytes(token & 255 for token in block)
        keys.append(parent)
    return keys


store = {}
ours, theirs = [65] * 4 + [276], [321] * 4 + [276]
serve(theirs, compact_chain(theirs), store)
logits, hits = serve(ours, compact_chain(ours), store)
print(f"keys: {compact_chain(ours)[0]} and {compact_chain(theirs)[0]}; hits: {hits}")
right, others = (minikv.logits(model, ids)[-1] for ids in (ours, theirs))
for name, row in (("we are told", logits), ("right", right), ("their answer", others)):
    print(f"{name:13} ...{tokenizer.decode([int(row.argmax())])!r}")
assert torch.allclose(logits, others, atol=1e-4)
assert not torch.allclose(logits, right, atol=0.1)

# %% [markdown]
# Token 321 and token 65 have the same last eight bits. Chained or not, the key says that the two prompts are
# the same, and we get, up to rounding, the answer to somebody else's prompt.
#
# vllm-mlx had this line, `bytes(t & 0xFF for t in tokens)` (pull request 444, 2026). The second
# form of the fault is rarer and harder to see: the hash is good, but it is *believed*. OpenVINO GenAI kept only a
# hash for each block, with a note in the code that tokens should be compared (openvino.genai issue
# 3722). vLLM used Python's own `hash`, as your `chain` does; it is fast, and it was not made to
# withstand somebody who looks for two prompts with one hash. Pull request 12621 made its starting value hard to
# guess, pull request 15297 offered sha256, and since version 0.10.2 that is the default.
#
# `minikv` does both: sha256 over all eight bytes of each token, and an entry keeps its
# tokens and its parent and compares them. To see that the second is enough by itself, put in the worst hash that
# there is: one that always says the same.

# %% id="war-cure" tags=["nbval-check-output"]
from minikv.cache import prefix

block_key = prefix.block_key
prefix.block_key = lambda parent, tokens: bytes(32)
try:
    engine = minikv.Engine(model, num_blocks=16, block_size=4)
    outs = [ask(engine, ids, new_tokens=6) for ids in (theirs, ours, theirs, ours)]
finally:
    prefix.block_key = block_key
for name, ids, out in zip(("theirs", "ours") * 2, (theirs, ours) * 2, outs, strict=True):
    right = out.tokens == minikv.generate_without_cache(model, ids, 6).tokens
    print(f"{name:6}: {out.cached_tokens} tokens found, right answer: {right}")
    assert right
assert [out.cached_tokens for out in outs] == [0, 0, 4, 0]

# %% [markdown]
# A collision costs a hit, never an answer: the first to come keeps the key, the other is computed
# each time.
#
# ## The engine's version
#
# `minikv/cache/prefix.py` is the index, `minikv/cache/blocks.py` owns counts and order. Neither
# knows a tensor. The keys first:

# %% id="engine-keys"
show_source(prefix.block_key)
show_source(prefix.KeyChain.extend)

# %% [markdown]
# Your `chain`, with three differences. The hash is sha256; the chain starts from a *namespace* (model, dtype, salt); and it is
# extended while a text grows, so a key is computed once. Looking up:

# %% id="engine-lookup"
show_source(prefix.PrefixCache.lookup)
show_source(prefix.PrefixCache._cached_run)

# %% [markdown]
# One look-up a block, and it stops at the first that is missing. `entry.tokens` and
# `entry.parent` are the comparison of the war story: the parent is compared by identity, so a whole
# past is checked with one comparison a block. `lookup` changes nothing: whoever looks up may still
# decide to wait, if there is no room for the rest.

# %% id="engine-publish"
show_source(prefix.PrefixCache.publish)

# %% [markdown]
# `publish` is called after a step, when K and V have been written: never promise what is not there. If two
# requests computed the same block side by side, one of the two can be found and the other
# stays private to its owner. And the pool:

# %% id="engine-pool"
show_source(BlockPool.share)
show_source(BlockPool.keep)
show_source(BlockPool.release)

# %% [markdown]
# `share` revives a cached block, or adds an owner to one that has some. `keep` marks blocks that got a
# key: read-only from now on. `release` takes an owner
# away, and when the last one goes, a block with a key is cached and one without is free. All three leave
# everything as it was when one block of the list is wrong. The order of `release` is the caller's:
# the scheduler hands over `reversed(table.blocks)`.
#
# Do yours and the engine's agree? Three thousand random prompts of few different tokens, so that they
# often begin alike, through a pool that is much too small, with up to three requests at a time.

# %% id="agree" tags=["nbval-check-output"]


class EngineShelf:
    """`begin` and `end` of `Shelf`, by the engine's own objects."""

    def __init__(self, num_blocks):
        self.pool = BlockPool(num_blocks, B)
        self.cache = prefix.PrefixCache(self.pool)

    def begin(self, ids):
        keys, table = prefix.KeyChain(b"", B), BlockTable(B)
        keys.extend(ids)
        hits = self.cache.lookup(keys, most=(len(ids) - 1) // B)
        table.blocks.extend([hit.block for hit in hits])
        self.pool.share(table.blocks)
        table.blocks.extend(self.pool.allocate_many(blocks_for(len(ids), B) - len(hits)))
        table.num_tokens, keys.linked = len(ids), hits[-1] if hits else None
        self.cache.publish(keys, table, len(hits))
        return table, len(hits)

    def end(self, table):
        self.pool.release(reversed(table.blocks))


mine, engines, living, total = Shelf(24), EngineShelf(24), [], 0
for _ in range(3_000):
    ids = rng.choices((65, 321), k=rng.randint(1, 24))
    (my_table, my_hits), (its_table, its_hits) = mine.begin(ids), engines.begin(ids)
    assert my_hits == its_hits
    living.append((my_table, its_table))
    total += my_hits
    while len(living) > 3 or (living and rng.random() < 0.4):
        my_table, its_table = living.pop(rng.randrange(len(living)))
        mine.end(my_table)
        engines.end(its_table)
assert mine.evictions == engines.pool.evictions
print(f"the same hits for 3,000 prompts: {total:,} blocks found, {mine.evictions:,} evicted")

# %% [markdown]
# And the text? In float64, where two orders of addition cannot tip a close decision, with a pool so
# small that blocks are evicted all the time:

# %% id="agree-tokens" tags=["nbval-check-output"]
exact = minikv.load(dtype=torch.float64)
sampling = minikv.Sampling(max_new_tokens=8, ignore_eos=True)
texts = [
    text
    for way in ("clock last", "first message mended", "two messages appended")
    for text in ways[way]
]
answers = {}
for caching in (False, True):
    engine = minikv.Engine(exact, num_blocks=36, block_size=8, prefix_caching=caching)
    answers[caching] = [out.tokens for out in engine.generate(texts, sampling)]
    stats = engine.stats()
    print(
        f"prefix caching {caching!s:5}: "
        f"{stats.hit_tokens:5,} of {stats.prompt_tokens:,} tokens found"
    )
assert answers[True] == answers[False]
assert stats.evictions > 0
print(f"the same {len(texts)} answers, with {stats.evictions} blocks evicted on the way")

# %% [markdown]
# ## Questions
#
# **1.** "My prompt ends with the same 2,000 words of small print each time, so 2,000 words are
# found." What is wrong, and what would help?
#
# <details><summary>Answer</summary>
#
# A hit cannot start in the middle. K and V of the small print depend on everything before it, and
# before it stands something new each time, so nothing is found. Put the small print first and the
# new part last.
#
# </details>
#
# **2.** Blocks have 4 slots. Two prompts have the same 6 tokens and then differ. Which blocks may they share? And
# what happens if somebody lets them share two?
#
# <details><summary>Answer</summary>
#
# One: the first block, full with tokens 0 to 3. The second holds tokens 4 and 5 and has two slots left. Shared, both
# requests write their seventh token into its slot 2, and one reads the other's K and V (reported for atlas, pull
# request 692). A block may be written only while it has one owner and no key; whoever wants to go on from a shared,
# partly filled block copies it first ([copy-on-write](glossary.md#copy-on-write)). `minikv` does that
# when one prompt is continued in several ways at once (`Sampling(n=...)`).
#
# </details>
#
# **3.** One engine makes the root of its keys by gluing strings: `adapter + salt`. Tenant A uses the
# adapter (a set of additional weights) "x" and no salt, tenant B no adapter and the salt "x". What can happen, and how does
# `namespace` prevent it?
#
# <details><summary>Answer</summary>
#
# Both roots are "x", so B is served K and V that were computed with A's adapter: wrong, and a leak (vllm issue 44701
# is of this kind). `namespace` writes the fields as JSON *with their names*, so that no two different sets of fields
# give the same bytes: compare `namespace(adapter="x", salt=None)` with `namespace(adapter=None, salt="x")`.
#
# </details>
#
# **4.** Blocks of 4 slots, a prompt of 12 fixed tokens and 2 tokens of a clock that changes. How many tokens are found on
# the second request if the clock stands first? Last? Between the eighth and the ninth token?
#
# <details><summary>Answer</summary>
#
# First: 0, for the very first block contains the clock. Last: 12, three full blocks. In between: 8, the two blocks before
# it. (With 16 slots in a block: 0 in all three cases, because 14 tokens fill no block.)
#
# </details>
#
# **5.** (Chapter 5.) Large blocks make short tables and fast kernels. Why does sharing want small ones? What
# would blocks of 256 find in our table of ways to write a prompt?
#
# <details><summary>Answer</summary>
#
# Only full blocks have keys, so a common prefix is rounded *down* to whole blocks: with B slots up to B - 1 tokens of
# it are computed again. In our table only the prompts with tools are longer than 256 tokens: with such blocks, every
# other row would be 0. Block size 1 loses nothing and needs a key and a table entry for each token.
#
# </details>
#
# **6.** (Chapters 2 and 3.) 10,000 tokens of a prompt are found. Is the *decoding* that follows faster than without the hit?
#
# <details><summary>Answer</summary>
#
# No. Each new token still reads the K and V of all 10,000, wherever they came from. A hit saves prefill, hence
# TTFT, and memory if somebody else has the same prefix at the same time. Time per output token stays.
#
# </details>
#
# ## In the big engines
#
# As of 2026, each path seen in the public repository:
#
# | engine | what it calls it | where |
# |---|---|---|
# | vLLM | automatic prefix caching: chained hashes of full blocks, freed tail first, LRU | `vllm/v1/core/kv_cache_utils.py` (hashes), `vllm/v1/core/block_pool.py`, `vllm/v1/core/kv_cache_manager.py` |
# | SGLang | RadixAttention: a radix tree over tokens; leaves are evicted first | `python/sglang/srt/mem_cache/radix_cache.py` |
# | Hugging Face transformers | prefix sharing in continuous batching: a block's hash from its parent's and its tokens | `src/transformers/generation/continuous_batching/cache_manager.py` |
# | llama.cpp | prompt cache: a server slot keeps its last prompt, and a new one reuses the longest common prefix | `tools/server/server-context.cpp` |
#
# A tree of tokens and chained hashes of blocks answer the same question. The tree can share to the token; the
# hashes are one look-up in a flat dictionary for each block, and can be sent to other machines as a few bytes each.
#
# ## Sources
#
# - L. Zheng et al.: SGLang: Efficient Execution of Structured Language Model Programs, 2023, arXiv
#   2312.07104 (RadixAttention).
# - W. Kwon et al.: Efficient Memory Management for Large Language Model Serving with PagedAttention,
#   SOSP 2023, arXiv 2309.06180 (sharing blocks between sequences: section 4).
# - vLLM's documentation, *Automatic Prefix Caching* (docs/design/prefix_caching.md), the design
#   that `minikv` follows.
# - L. Song, Z. Pang, W. Wang et al.: The Early Bird Catches the Leak: Unveiling Timing Side Channels in
#   LLM Serving Systems, 2024, arXiv 2409.20002.
# - The talk and the blog of the audits: Khawaja Shams (Momento), QCon AI Boston 2026; Sankalp Shubham, *How prompt
#   caching works*, 2025.
# - The faults: waybarrios/vllm-mlx pull request 444; openvinotoolkit/openvino.genai issue 3722; vllm-project/vllm pull
#   requests 12621, 15297 and 36829, issue 44701; GeeeekExplorer/nano-vllm issue 144 and pull request 199;
#   llm-d-inference-sim issue 704; goose pull requests 2434 and 5192; ggml-org/llama.cpp pull request 21793.
#
# ## Next
#
# The hundred requests above ran in one step, "to see them together". Who decided that? In which
# step does a request start, how many fit, and what if a long prompt comes while others are being
# answered? [Chapter 7](07_many_at_once.ipynb) puts many requests into one pass.
