# %% [markdown]
# # 5. Pages
#
# [Before: 4. The car park](04_the_car_park.ipynb) | [Next: 6. Share the
# prefix](06_share_the_prefix.ipynb) | [Glossary](glossary.md)
#
# **You will be able to**
#
# - follow a token from its position in a text to the place where its K and V lie, through a block
#   table;
# - derive the online softmax, which attends to K and V that lie in pieces, without putting them
#   together first;
# - say what pages cost (empty slots, a slower or faster kernel) and choose a block size.
#
# **You need** chapters [2](02_remember_the_keys.ipynb) to [4](04_the_car_park.ipynb): the KV cache, prefill and decode, GQA, and why memory in one piece
# goes to waste.
#
# **Time** About 40 minutes to read; half a minute to run.

# %% id="setup"
from time import perf_counter

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import minikv
from minikv.classroom.notebook import claim, compare, explore, note, predict, show_source

plt.style.use("minikv.show.course")
model = minikv.load()  # five layers, 8 query heads, 2 KV heads, float32

# %% [markdown]
# Chapter 4 ended badly. A request reserves 1,024 slots and fills 100. Another wants 512 slots and
# is refused, although 600 are free, because the 600 lie in two holes. Both troubles have one
# cause: **a sequence must lie in one piece.**
#
# Nothing in the mathematics asks for that. Attention sums over the tokens of a sequence, and a
# sum does not care where its terms are kept. So this chapter cuts the memory into small equal
# pieces, and then pays the price: somebody must remember which piece comes after which.
#
# ## Two guesses first

# %% id="predict"
predict(
    "pages-empty-slots",
    "A sequence of 100 tokens lies in pieces of 16 slots. How many of its slots are empty?",
    "slots",
)
predict(
    "pages-gathered-mb",
    f"The bundled model ({model.shape.kv_bytes_per_token('float32'):,} bytes a token in float32) writes "
    "one token after 1,000 others. How many MB (millions of bytes) are copied if K and V are first put "
    "back together into one piece?",
    "MB",
)

# %% [markdown]
# ## The cure: blocks and a table
#
# Cut the memory into [blocks](glossary.md#block) of $B$ [slots](glossary.md#slot); one slot holds
# the K and V of one token, in all layers. The blocks together are the [pool](glossary.md#pool). A
# sequence owns a list of block numbers, in the order of its text: its [block
# table](glossary.md#block-table). To find the token at position $p$, divide:
#
# $$\text{block} = \text{table}[\,p \,//\, B\,] \qquad \text{slot} = p \bmod B$$
#
# Do it once by hand. A sequence of ten tokens owns blocks 5, 2 and 7, in this order.

# %% id="by-hand" tags=["nbval-check-output"]
B = 4
table = [5, 2, 7]
for p in (0, 3, 4, 9):
    place, slot = divmod(p, B)
    print(f"position {p}: entry {place} of the table -> block {table[place]}, slot {slot}")

# %% [markdown]
# Position 9 is the second slot of block 7, and block 7 may lie anywhere. That is all that a table
# does. An operating system does the same for programs: their addresses look contiguous, and a
# page table says which piece of memory each page really is.
#
# **Growing** is one block at a time, when the last one is full. **Leaving** puts the blocks back.
# Since all blocks are alike, any free one will do: there is nothing to fit.

# %% id="grow"
free = list(range(7, -1, -1))  # eight free blocks; pop() hands out block 0 first
tables, tokens = {}, {}


def write_token(name):
    """One more token for sequence `name`: the block and slot where its K and V go."""
    table = tables.setdefault(name, [])
    position = tokens.get(name, 0)
    if position == len(table) * B:  # every slot that it owns is taken
        table.append(free.pop())
    tokens[name] = position + 1
    return table[position // B], position % B


def leave(name):
    free.extend(reversed(tables.pop(name)))
    del tokens[name]


# %% id="grow-run" tags=["nbval-check-output"]
for name in "aaaaabbbaab":  # two sequences that grow in turns
    write_token(name)
print("tables:", tables, " free:", sorted(free))
leave("a")
print("a left.  free:", sorted(free))
for _ in range(10):
    write_token("c")
print("tables:", tables, " free:", sorted(free))
print("c's ninth token:", divmod(8, B), "-> block", tables["c"][8 // B])

# %% [markdown]
# `c` took the blocks that `a` had left, with `b` in between, and one more. Nobody had to know
# beforehand how long `a`, `b` or `c` would become, so nothing was reserved. What is empty is the
# rest of each last block: at most $B - 1$ slots a sequence.
#
# Now the two cases of chapter 4. First 100 tokens, where a reservation took 1,024 slots:

# %% id="hundred"
from minikv.cache.blocks import BlockPool, BlockTable, blocks_for

blocks, empty = blocks_for(100, 16), blocks_for(100, 16) * 16 - 100
assert (blocks, empty) == (7, 12)
print(
    f"100 tokens: {blocks} blocks of 16, {empty} slots empty (reserved in one piece: {1_024 - 100})"
)
compare("pages-empty-slots", empty, "slots")

# %% [markdown]
# And the request that was refused. The engine's own `Arena` (chapter 4) and its `BlockPool`, both
# with 2,048 slots, live through the same history: A, B, C and D arrive, B and D leave, and E
# wants 512 slots.

# %% id="refused" tags=["nbval-check-output"]
from itertools import pairwise

from minikv.cache.arena import Arena

wanted = {"A": 704, "B": 400, "C": 744, "D": 200}
arena, pool, owners = Arena(2048, "first_fit"), BlockPool(2048 // 8, block_size=8), {}
for name, slots in wanted.items():
    arena.allocate(name, slots)
    owners[name] = pool.allocate_many(blocks_for(slots, 8))
for name in "BD":
    arena.free(name)
    pool.release(owners.pop(name))
try:
    arena.allocate("E", 512)
except MemoryError as refusal:
    print("one piece:", refusal)
owners["E"] = pool.allocate_many(blocks_for(512, 8))
assert len(owners["E"]) * 8 == 512
print(f"blocks: E owns {len(owners['E'])} blocks of 8; {pool.num_free * 8} slots are still free")

# %% id="refused-figure" tags=["hide-input"]
fig, (above, below) = plt.subplots(2, 1, figsize=(7.5, 2.4), sharex=True)
look = {
    "A": {"facecolor": "#e4e4e4"},
    "C": {"facecolor": "#c0c0c0"},
    "E": {"facecolor": "white", "hatch": "////"},
}
for owner, start, slots, _ in arena.segments():
    if owner:
        above.broken_barh([(start, slots)], (0, 1), edgecolor="black", **look[owner])
    above.text(start + slots / 2, 0.5, owner or f"{slots} free", ha="center", va="center")
for owner, blocks in owners.items():
    starts = [8 * block for block in blocks]
    below.broken_barh([(start, 8) for start in starts], (0, 1), ec="black", lw=0.2, **look[owner])
    label = {"ha": "center", "va": "center", "bbox": {"fc": "white", "ec": "none", "pad": 1}}
    for start in (
        (min(starts) + 100, max(starts) - 90) if owner == "E" else [sum(starts) / len(starts)]
    ):
        below.text(start, 0.5, owner, **label)
for axis, title in ((above, "in one piece: E is refused"), (below, "in blocks of 8: E is served")):
    axis.set(title=title, yticks=[], xlim=(0, 2048))
    axis.grid(False)
below.set_xlabel("slot")
plt.show()
holes = " and ".join(str(hole.length) for hole in arena.holes())
e = sorted(owners["E"])
runs = 1 + sum(after > before + 1 for before, after in pairwise(e))
note(
    f"**What to see.** Above, holes of {holes} slots, and no room for E. Below, E (hatched) lies in the "
    f"same holes, in **{runs} runs of blocks**; its table says in which order they follow each other."
)

# %% [markdown]
# ## Write in blocks, read it back
#
# Bookkeeping alone attends to nothing. Take one head of dimension 8 and a sequence of ten tokens
# in blocks 5, 2 and 7 as above, and write K and V where the table says. Beside it, the same K and
# V in one piece.

# %% id="write"
torch.manual_seed(5)
head_dim, length = 8, 10
K, V = torch.randn(2, length, head_dim)  # in one piece: [position, head_dim]
q = torch.randn(head_dim)

k_pool, v_pool = torch.zeros(2, 8, B, head_dim)  # [block, slot, head_dim]
table = [5, 2, 7]
for p in range(length):
    block, slot = table[p // B], p % B
    k_pool[block, slot], v_pool[block, slot] = K[p], V[p]

# %% [markdown]
# The plain way to attend: [gather](glossary.md#gather) the blocks into one piece again, cut off
# the empty end, and do as in chapter 1.

# %% id="gather" tags=["nbval-check-output"]
keys = k_pool[table].flatten(0, 1)[:length]  # [3, 4, head_dim] -> [12, head_dim] -> [10, head_dim]
values = v_pool[table].flatten(0, 1)[:length]
assert torch.equal(keys, K)
assert torch.equal(values, V)
print("gathered K and V are those that were written, in the order of the text")


def attend(q, keys, values):
    return torch.softmax(keys @ q / head_dim**0.5, dim=0) @ values


assert torch.equal(attend(q, keys, values), attend(q, K, V))
print("attention over gathered blocks = attention over one piece, bit by bit")

# %% [markdown]
# This is correct, and `minikv` keeps exactly this as its reference. But `k_pool[table]`
# **copies**: every K and V of the sequence is read, written somewhere else and read again, in
# every layer, for every new token. Chapter 3 said what decoding is bound by: moving bytes. We
# would move them three times instead of once.
#
# Can we leave K and V where they are, and visit block after block? Scores, yes: each score needs
# one key. The weighted sum, yes: it is a sum. The trouble is the softmax between them, which
# divides by a sum over *all* tokens. Before we have seen the last block we do not know that sum.
#
# ## Softmax in pieces
#
# First idea: divide at the end. Carry two running sums from block to block, of $e^{s_i}$ and of
# $e^{s_i} v_i$:

# %% id="naive-sums" tags=["nbval-check-output"]


def attend_naively(q, k_pool, v_pool, table, length):
    total, out = 0.0, torch.zeros(head_dim)
    for place, block in enumerate(table):
        filled = min(B, length - place * B)  # slots with a token in this block
        e = torch.exp(k_pool[block, :filled] @ q / head_dim**0.5)
        total = total + e.sum()
        out = out + e @ v_pool[block, :filled]
    return out / total


difference = (attend_naively(q, k_pool, v_pool, table, length) - attend(q, K, V)).abs().max().item()
assert difference < 1e-6
print("block by block = all at once, within 1e-6")

# %% [markdown]
# It works, for these numbers. Now let the scores be larger. Nothing keeps a model from scores of
# a hundred or more, and float32 ends at about $3.4 \cdot 10^{38}$, a little above $e^{88}$:

# %% id="overflow" tags=["nbval-check-output"]
big = 100 * q / (K @ q / head_dim**0.5).max()  # scaled until the largest score is 100
print("largest score:     ", round((K @ big / head_dim**0.5).max().item(), 3))
print("its exponential:   ", torch.exp((K @ big / head_dim**0.5).max()).item())
print("naive, in pieces:  ", attend_naively(big, k_pool, v_pool, table, length)[:3])
print("torch.softmax:     ", attend(big, K, V)[:3])
assert attend_naively(big, k_pool, v_pool, table, length).isnan().all()
assert attend(big, K, V).isfinite().all()

# %% [markdown]
# `inf / inf` is `nan`. `torch.softmax` is safe because it subtracts the largest score $m$ first.
# That changes nothing, for $e^{s-m} = e^{s} e^{-m}$, and the factor $e^{-m}$ cancels in the
# division; but now the largest exponential is $e^0 = 1$.
#
# So we want $\sum_i e^{s_i - m}$ with $m$ the maximum of **all** scores, and again we do not know
# $m$ before the last block. Second idea: use the largest score *so far*. When a block brings a
# larger one, everything summed under the old maximum is too large by the same factor, and one
# multiplication mends it:
#
# $$\sum_i e^{s_i - m_\text{new}} \;=\; e^{m_\text{old} - m_\text{new}} \sum_i e^{s_i - m_\text{old}}$$
#
# Watch it on five scores in two blocks:

# %% id="rescale" tags=["nbval-check-output"]
first, second = torch.tensor([1.0, 3.0]), torch.tensor([2.0, 5.0, 4.0])
largest = first.max()
total = torch.exp(first - largest).sum()
print(f"after block 1: largest {largest:.0f}, sum {total:.4f}")

new_largest = torch.maximum(largest, second.max())
shrink = torch.exp(largest - new_largest)
total = total * shrink + torch.exp(second - new_largest).sum()
print(f"after block 2: largest {new_largest:.0f}, old sum shrunk by {shrink:.4f}, sum {total:.4f}")

both = torch.cat((first, second))
print(f"at once:       largest {both.max():.0f}, sum {torch.exp(both - both.max()).sum():.4f}")
assert torch.isclose(total, torch.exp(both - both.max()).sum())

# %% [markdown]
# The weighted sum of values was made under the old maximum too, so it shrinks by the same factor.
# A running maximum, a running sum, a running output: this is the [online
# softmax](glossary.md#online-softmax) (Milakov and Gimelshein, 2018), which FlashAttention made
# famous.

# %% id="online"


def attend_by_table(q, k_pool, v_pool, table, length, watch=None):
    largest, total, out = torch.tensor(-torch.inf), torch.tensor(0.0), torch.zeros(head_dim)
    for place, block in enumerate(table):
        filled = min(B, length - place * B)
        scores = k_pool[block, :filled] @ q / head_dim**0.5
        new_largest = torch.maximum(largest, scores.max())
        shrink = torch.exp(largest - new_largest)  # 0 for the first block: nothing to shrink
        weights = torch.exp(scores - new_largest)
        total = total * shrink + weights.sum()
        out = out * shrink + weights @ v_pool[block, :filled]
        largest = new_largest
        if watch is not None:
            watch.append((scores, largest.item(), shrink.item(), total.item()))
    return out / total


# %% id="online-check" tags=["nbval-check-output"]
for name, query in (
    ("ordinary scores", q),
    ("scores up to 100", big),
    ("scores up to 10,000", 100 * big),
):
    expected, found = attend(query, K, V), attend_by_table(query, k_pool, v_pool, table, length)
    assert torch.allclose(found, expected, atol=1e-5), name
    print(f"{name}: through the table = plain softmax, within 1e-5")

# %% [markdown]
# The order of additions differs from the plain softmax, so the last bits may too: equal within
# rounding, not bit by bit. (Different orders of addition are
# one reason why the same prompt can give another token beside other requests, when two tokens are almost
# equally likely.)
#
# Ten tokens are too few to see the maximum move. Take a longer sequence, eight blocks of four,
# and look at what the loop carries.

# %% id="online-figure" tags=["hide-input"]
long_table, watched = torch.randperm(8).tolist(), []
long_k, long_v = torch.randn(2, 8, B, head_dim)
by_position = torch.randn(32, head_dim) * torch.linspace(0.5, 2.5, 32)[:, None]
long_k[long_table] = by_position.view(8, B, head_dim)
attend_by_table(q, long_k, long_v, long_table, 32, watched)

fig, axis = plt.subplots(figsize=(7.5, 3.0))
scores = torch.cat([scores for scores, *_ in watched])
axis.plot(range(32), scores, linestyle="none", marker="o")
line = [largest for _, largest, *_ in watched]
axis.step([B * i for i in range(9)], [*line, line[-1]], where="post", marker="", linestyle="-")
axis.annotate(
    "largest so far", (32, line[-1]), xytext=(-4, 6), textcoords="offset points", ha="right"
)
for i, (_, largest, shrink, _) in enumerate(watched):
    axis.axvline(B * i - 0.5, color="#c8c8c8", linewidth=0.8)
    if 0 < shrink < 1:
        axis.text(B * i + 0.1, largest + 0.3, f"x {shrink:.2f}", fontsize=9)
axis.set(
    xlabel="position (grey lines: a new block)",
    ylabel="score (dots)",
    title="what was summed shrinks whenever a larger score turns up",
)
axis.margins(y=0.15)
plt.show()
moved = sum(0 < shrink < 1 for _, _, shrink, _ in watched)
note(
    f"**What to see.** The line is the maximum that the loop knows. It rises at **{moved}** of the {len(watched) - 1} "
    "later blocks, and there everything summed so far is multiplied by the factor beside the step. "
    "At the other blocks the factor is 1."
)

# %% [markdown]
# ## A cache of your own that lies in pages
#
# Now for the real model. It asks one thing of a cache, `kv.attend(layer, q, k, v)` (chapter 2),
# and so far every sequence had a buffer of its own. Ours has one pool for everybody:
#
# `pool[block, layer, k or v, kv_head, slot, head_dim]`
#
# The attention inside must do what the one-headed loop did, for all heads and for a whole prompt
# at once. Two things are new. The query heads of a group (chapter 3) become rows of one matrix,
# so that a key is read once for all of them. And each row must not see positions after its own:
# the causal mask, which also hides the empty slots of the last block, as they stand for positions
# that nobody has reached.

# %% id="walk"


def walk(q, positions, pieces):
    """Online softmax over `pieces` of K and V, [2, kv_heads, slots, head_dim] each.

    q [queries, heads, head_dim], at these positions, the last ones of the sequence. Returns the same shape.
    """
    queries, heads, head_dim = q.shape
    kv_heads = pieces[0].shape[1]
    # rows [kv_heads, queries * group, head_dim], and the last position that each of them may see
    rows = q.unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2) * head_dim**-0.5
    sees = positions.repeat_interleave(heads // kv_heads)[:, None]
    largest, total, out, start = torch.tensor(-torch.inf), 0.0, torch.zeros_like(rows), 0
    for keys, values in pieces:
        there = torch.arange(start, start + keys.shape[1])
        scores = (rows @ keys.transpose(1, 2)).masked_fill(there > sees, -torch.inf)
        new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
        shrink, weights = torch.exp(largest - new_largest), torch.exp(scores - new_largest)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights @ values
        largest, start = new_largest, start + keys.shape[1]
    return (out / total).unflatten(1, (queries, -1)).transpose(0, 1).flatten(1, 2)


# %% [markdown]
# Two ways to hand it the pieces: gathered into one, or left where they are. And an honest
# counter: a tensor that does not share its memory with the pool was copied.

# %% id="ways"


def gathered(pool, layer, table):
    """One piece, [2, kv_heads, all slots, head_dim]."""
    return [torch.cat([pool[block, layer] for block in table], dim=2)]


def in_place(pool, layer, table):
    """Views of the blocks: nothing moves."""
    return [pool[block, layer] for block in table]


def copied_bytes(pieces, pool):
    there = pool.untyped_storage().data_ptr()
    return sum(piece.nbytes for piece in pieces if piece.untyped_storage().data_ptr() != there)


# %% id="my-paged"
class MyPaged:
    """K and V of all sequences in one pool of blocks."""

    def __init__(self, shape, num_blocks, block_size, read=in_place):
        self.pool = torch.zeros(
            num_blocks, shape.layers, 2, shape.kv_heads, block_size, shape.head_dim
        )
        self.free = list(range(num_blocks - 1, -1, -1))
        self.block_size, self.read = block_size, read
        self.tables, self.lengths, self.copied = {}, {}, 0

    def begin(self, name, count):
        """Sequence `name` brings `count` tokens: make room for them. Returns their positions."""
        start = self.lengths.get(name, 0)
        self.table = self.tables.setdefault(name, [])
        while len(self.table) * self.block_size < start + count:
            self.table.append(self.free.pop())
        self.lengths[name] = start + count
        self.positions = torch.arange(start, start + count)
        return self.positions

    def attend(self, layer, q, k, v):
        for position, key, value in zip(self.positions.tolist(), k, v, strict=True):
            block, slot = self.table[position // self.block_size], position % self.block_size
            self.pool[block, layer, 0, :, slot] = key
            self.pool[block, layer, 1, :, slot] = value
        pieces = self.read(self.pool, layer, self.table)
        self.copied += copied_bytes(pieces, self.pool)
        return walk(q, self.positions, pieces)


# %% [markdown]
# The model is the one of chapter 1, unchanged. Two sequences take turns, so that their blocks end
# up mixed in the pool.

# %% id="same-tokens" tags=["nbval-check-output"]
prompts = {"Paris": "The capital of France is", "play": "ROMEO:\nI will"}
new_tokens = 12


def step(kv, name, ids):
    positions = kv.begin(name, len(ids))
    with torch.inference_mode():
        logits = model(torch.tensor(ids), positions, kv, rows=torch.tensor([len(ids) - 1]))
    return int(logits[0].argmax())


def in_turns(kv):
    ids = {
        name: [step(kv, name, model.tokenizer.encode(prompt))] for name, prompt in prompts.items()
    }
    for _ in range(new_tokens - 1):
        for name in prompts:
            ids[name].append(step(kv, name, ids[name][-1:]))
    return ids


kv = MyPaged(model.shape, num_blocks=24, block_size=4)
mine = in_turns(kv)
for name, prompt in prompts.items():
    oracle = minikv.generate_without_cache(model, prompt, new_tokens)
    assert mine[name] == oracle.tokens
    print(f"{name}: table {kv.tables[name]}, the same {new_tokens} tokens as without a cache:")
    print("   ", repr(prompt + oracle.text))

# %% [markdown]
# The tables interleave, and the text is the same. The model never knew.
#
# ## Count what was copied

# %% id="copied" tags=["nbval-check-output"]
gathering = MyPaged(model.shape, num_blocks=24, block_size=4, read=gathered)
assert in_turns(gathering) == mine
print(f"gathering first:   {gathering.copied:>9,} bytes copied")
print(f"through the table: {kv.copied:>9,} bytes copied")

token_bytes = model.shape.kv_bytes_per_token("float32")
ends = [
    len(model.tokenizer.encode(prompt)) + more
    for prompt in prompts.values()
    for more in range(new_tokens)
]
assert gathering.copied == sum(blocks_for(end, 4) * 4 * token_bytes for end in ends)
assert kv.copied == 0
print(
    f"the first is the sum over all steps of the sequence's blocks x 4 slots x {token_bytes:,} bytes, exactly"
)

# %% [markdown]
# And these are short texts. The copy grows with the context, at every step. At 1,000 tokens, for a
# single new one:

# %% id="copied-1000"
at_1000 = blocks_for(1_001, 16) * 16 * token_bytes
print(f"{at_1000:,} bytes copied for one token after 1,000 others, in blocks of 16")
compare("pages-gathered-mb", at_1000 / 1e6, "MB")

# %% [markdown]
# ## See it: tables and pool
#
# Move the history along with the first slider: sequences arrive, grow and leave. Above, each
# sequence as it sees itself; below, the pool, driven by the engine's own `BlockPool` and
# `BlockTable`. Use Tab and the arrow keys. Try this:
#
# - go through the events one by one at block size 4: where does D land after B has left?
# - look up another token ("A 9", "C 5") and follow it from the upper row to the lower;
# - set the block size to 1, then to 12: when are slots wasted, and when must somebody wait?

# %% id="widget"
from minikv.classroom.explorers import block_tables

explore(block_tables.draw, **block_tables.CONTROLS)

# %% [markdown]
# ## War story: the full last block
#
# Many engines keep a number called something like "tokens in the last block". Decoding wants to
# know the slot of the newest token: last block, that many minus one. Here is the obvious line:

# %% id="war" tags=["nbval-check-output"]


def tokens_in_last_block(n):
    return n % B  # looks right


def newest_slot(table, n):
    return table[-1] * B + tokens_in_last_block(n) - 1  # the pool as one long row of slots


slots = ["."] * 12  # three blocks of four
for n, letter in enumerate("abcd", 1):
    slots[0 + n - 1] = letter  # sequence A, written correctly into block 0
for n, letter in enumerate("wxyz", 1):
    slots[newest_slot([1], n)] = letter  # sequence B in block 1, with the line above
print("blocks:", "".join(slots[:4]), "".join(slots[4:8]), "".join(slots[8:]))

# %% [markdown]
# B's fourth token is not in B's block. It lies in block 0, on top of A's `d`. With four tokens in
# the block, `4 % 4` is 0, and slot $-1$ of block 1 is the last slot of block 0: **somebody else's
# memory**. Nothing crashes. A gets a wrong key and B misses one, and only when a length is a
# multiple of the block size.
#
# MinivLLM had this fault ([issue 76](https://github.com/Wenyueh/MinivLLM/issues/76), mended in [pull request
# 77](https://github.com/Wenyueh/MinivLLM/pull/77), 2026): the
# count of a full last block came out as 0. Pull request 83 there found a second effect:
# `token_ids[-0:]` is the whole list in Python, not its empty end.
#
# A cousin of it is no fault at all, and still costs people hours. nano-vllm asks `len(seq) %
# block_size == 1` to learn whether a new block is needed. Readers keep reporting that it should
# say `== 0` ([nano-vllm](https://github.com/GeeeekExplorer/nano-vllm), issues 30, 91, 150, 240, pull request 65, ...). It is
# right there, because the new token is already counted when the question is asked; ask before
# counting it, and 0 is right. The condition does not say which of the two it means.
#
# What the number should be, at every length that matters:

# %% id="war-table" tags=["nbval-check-output"]
print("   n   n % 4   in the last block   is it full   n % 4 == 1")
for n in (0, 1, 3, 4, 5, 8, 9):
    t = BlockTable(block_size=4)
    t.blocks.extend(range(blocks_for(n, 4)))
    t.num_tokens = n
    wrong = "" if n % 4 == t.last_block_tokens else "  <- n % 4 is wrong"
    print(
        f"{n:4}{n % 4:8}{t.last_block_tokens:16}{t.last_block_is_full!s:>17}{n % 4 == 1!s:>13}{wrong}"
    )

# %% [markdown]
# `minikv` gives both questions a name, so that no caller does the arithmetic, and `locate`
# refuses a position that the table has no block for:

# %% id="war-source"
show_source(BlockTable.last_block_tokens)
show_source(BlockTable.last_block_is_full)
show_source(BlockTable.locate)

# %% id="war-cure" tags=["nbval-check-output"]
t = BlockTable(block_size=4)
t.blocks.extend([1])
t.num_tokens = 4
print("newest token of a full block 1: block and slot", t.locate(t.num_tokens - 1))
try:
    t.locate(4)
except IndexError as refusal:
    print("the next one, before a block was added:", refusal)

# %% [markdown]
# For the empty table, "full" is true: there is no room for a token, so a block must be taken.
# That is what a caller wants to know.
#
# ## The engine's version
#
# Attention that reads K and V through block tables is called [paged
# attention](glossary.md#paged-attention). `minikv/cache/paged.py` holds the pool, in the layout
# that you used, and fills a few tensors a step (slots, tables, lengths) for *all* sequences of a
# step. Its `attend` only calls a kernel:

# %% id="engine-paged"
from minikv.cache.paged import Paged

show_source(Paged.attend)

# %% [markdown]
# The kernel is written more than once, in *dialects* with one signature. One is for reading, each
# of the others for speed on one kind of machine:
#
# | dialect | written in | how it reads K and V | for |
# |---|---|---|---|
# | `reference` | torch | gathers, then plain softmax | being right by inspection; any dtype, any device |
# | `cpu` | Python compiled by Numba | through the table, online softmax | float32 and float64 on a CPU |
# | `gpu` | Triton | through the table, online softmax | a graphics card |
#
# The next cell lists their files (those that begin with `cpu_` are parts of the second one), and
# shows the first.

# %% id="engine-reference"
import pkgutil

from minikv.cache import attention
from minikv.cache.attention import cpu, reference

print("here:", ", ".join(found.name for found in pkgutil.iter_modules(attention.__path__)))
show_source(reference.attend)

# %% [markdown]
# You can read every line of it: store into slots; then, for each sequence, gather its blocks and
# do plain attention.
#
# The fast one is your loop, compiled. Read it for its shape:

# %% id="engine-cpu"
show_source(cpu._attend)
show_source(cpu.scores_of_few)

# %% [markdown]
# What you know, under other names:
#
# | in `walk` | in `_attend` | why |
# |---|---|---|
# | `rows`, heads of a group together | row `r` is token `r // group`, head `r % group` | one visit to a key serves the whole group |
# | `for keys, values in pieces` | in `scores_of_few`: `for position in range(start, end, block_size)`, `table[position // block_size]` | the table, block by block |
# | `largest`, `total` | `state[0]`, `state[1]` | the running maximum and sum, one for each row |
# | `out * shrink + weights @ values` | `_weigh` shrinks `sums[r]`, `add_values` adds to it | the running output |
# | `-torch.inf` | `LOWEST`, finite | minus infinity minus itself would be nan |
# | mask | `before + r // group + 1`, and `tokens = min(block_size, ...)` in `scores_of_few` | the future has weight 0, and empty slots are never read |
#
# What is new is for speed alone. Scores are made for a *tile* of 128 positions before the maximum
# is taken, so that sums shrink less often. Weights are powers of 2 instead of $e$, the factor
# $1/\ln 2$ having gone into the query: cheaper to compute, the same result. The next block, `ahead`,
# is asked for while this one is worked on. And the loop around it (`_work`) gives each thread one
# tile of queries and one KV head at a time, until none is left.
#
# A piece of a prompt goes the same way, up to 48 rows at once. With so many rows each key, once
# read, is used 48 times, and arithmetic counts (chapter 3). Then `many` rows lie beside each other
# in the lanes of the processor's vectors, and all of them are multiplied with a key in one go.
#
# Your loop's last block has slots that were never written; their weight is 0. That is safe only
# as long as what lies there is a finite number, because $0 \cdot \text{nan} = \text{nan}$. The
# engine's kernel does not read them.
#
# Do they agree? First the kernels on the same pool and tables, then whole generations.

# %% id="agree-kernels" tags=["nbval-check-output"]
from minikv.cache.step import Piece

end, shape = kv.lengths["Paris"], model.shape
q = torch.randn(1, shape.heads, shape.head_dim)
k, v = torch.randn(2, 1, shape.kv_heads, shape.head_dim)
kv.begin("Paris", 1)
answers = {"yours": kv.attend(3, q, k, v)}
for dialect in ("reference", "cpu"):
    engine_kv = Paged(shape, num_blocks=24, block_size=4, attention=dialect)
    engine_kv.pool[:24] = kv.pool
    t = BlockTable(block_size=4)
    t.blocks.extend(kv.tables["Paris"])
    engine_kv.begin([Piece("Paris", [0], start=end, table=t)])
    answers[dialect] = engine_kv.attend(3, q, k, v)
    assert torch.allclose(answers[dialect], answers["yours"], atol=1e-5)
print(f"one new token over {end + 1}: yours, reference and cpu agree within 1e-5")

# %% id="agree-engine" tags=["nbval-check-output"]
for dialect in ("reference", "cpu"):
    engine = minikv.Engine(
        model, num_blocks=24, block_size=4, prefix_caching=False, attention=dialect
    )
    outs = engine.generate(
        list(prompts.values()), minikv.Sampling(max_new_tokens=new_tokens, ignore_eos=True)
    )
    assert [out.tokens for out in outs] == list(mine.values())
    print(f"engine, attention={dialect!r}: both sequences in one batch, the same tokens as yours")

# %% [markdown]
# ## Measure it: what does a table cost?
#
# Counters first: nothing is copied, so by bytes alone the table is nearly free (four bytes for
# each block). Now clocks. We take four layers of a small shape (6 query heads and 2 KV heads of 64)
# and contexts of 1,000 tokens, put the same K and V once into shuffled blocks and once into one
# piece, and compute one decode step's attention over the layers in three ways:
#
# - **one piece**: torch's `scaled_dot_product_attention` on contiguous K and V, in two ways of
#   calling it, the faster one counts;
# - **table**: the engine's kernel, filling the step's tensors included;
# - **gather**: gather first (one copy, straight into the right order, into memory that is there already), then torch's attention.

# %% id="race"
from dataclasses import replace

from minikv.shape.model_shape import preset

bench = replace(preset("bench-14m"), layers=4)  # half of its layers: half the memory


def competitors(sequences, context=1_000, block_size=16):
    """Three ways to attend to the same K and V with one new token of each sequence, over all layers."""
    per_sequence = blocks_for(context, block_size)
    paged = Paged(bench, sequences * per_sequence, block_size, attention="cpu")
    paged.pool.normal_()
    rows = torch.randperm(sequences * per_sequence).view(sequences, per_sequence)
    pieces = []
    for number in range(sequences):
        table = BlockTable(block_size)
        table.blocks.extend(rows[number].tolist())
        pieces.append(Piece(number, [0], context - 1, table))
    q = torch.randn(sequences, bench.heads, bench.head_dim)
    k, v = torch.randn(2, sequences, bench.kv_heads, bench.head_dim)
    grouped = q.unflatten(1, (bench.kv_heads, -1))  # [sequences, kv_heads, group, head_dim]

    # where gathered blocks go, reused by all layers: fresh memory would cost more than the copy
    room = torch.empty(2, bench.kv_heads, rows.numel(), block_size, bench.head_dim)

    def gather(layer):
        there = paged.pool[:, layer].permute(1, 2, 0, 3, 4)  # as `room`, but all blocks: a view
        torch.index_select(there, 2, rows.flatten(), out=room)  # one copy, in the right order
        blocks = room.unflatten(2, rows.shape)  # [2, kv_heads, sequences, blocks, slot, head_dim]
        return blocks.flatten(3, 4)[..., :context, :].transpose(1, 2)

    def table_way():
        paged.begin(pieces)
        return [paged.attend(layer, q, k, v) for layer in range(bench.layers)]

    table_way()  # stores k and v of the new token; then the same in one piece
    whole = [gather(layer).clone().contiguous() for layer in range(bench.layers)]
    return {
        "table": table_way,
        "one piece": lambda: [
            F.scaled_dot_product_attention(grouped, *both).flatten(1, 2) for both in whole
        ],
        "one piece, gqa": lambda: [
            F.scaled_dot_product_attention(q[:, :, None], *both, enable_gqa=True)[:, :, 0]
            for both in whole
        ],
        "gather": lambda: [
            F.scaled_dot_product_attention(grouped, *gather(layer)).flatten(1, 2)
            for layer in range(bench.layers)
        ],
    }


def best_seconds(ways, repeats=7):
    """The shortest run of each, taking turns: what else the machine does only makes runs longer."""
    seconds = dict.fromkeys(ways, float("inf"))
    with torch.inference_mode():
        for _ in range(repeats):
            for name, way in ways.items():
                start = perf_counter()
                way()
                seconds[name] = min(seconds[name], perf_counter() - start)
    return seconds


# %% id="race-run"
batches, relative = (1, 12, 32), {"table": [], "gather": []}
for sequences in batches:
    ways = competitors(sequences)
    with torch.inference_mode():
        for name, way in ways.items():
            assert all(
                torch.allclose(a, b, atol=1e-4) for a, b in zip(way(), ways["table"](), strict=True)
            ), name
    seconds = best_seconds(ways)
    whole = min(seconds["one piece"], seconds["one piece, gqa"])
    gigabytes = sequences * 1_000 * bench.kv_bytes_per_token("float32") / 1e9
    for name in relative:
        relative[name].append(whole / seconds[name])
    print(
        f"{sequences:3} at once: one piece {gigabytes / whole:5.1f} GB/s of K and V, "
        f"table x {relative['table'][-1]:.2f}, gather x {relative['gather'][-1]:.2f}"
    )
del ways

# %% id="race-figure" tags=["hide-input"]
fig, axis = plt.subplots(figsize=(7.5, 3.0))
for shift, (name, hatch, face) in enumerate(
    (("table", "", "#767676"), ("gather", "////", "white"))
):
    bars = axis.bar(
        [i + 0.35 * shift for i in range(3)],
        relative[name],
        0.33,
        facecolor=face,
        edgecolor="black",
        hatch=hatch,
        label=name,
    )
    axis.bar_label(bars, fmt="%.2f", fontsize=9)
axis.axhline(1, color="black", linestyle="--", linewidth=1)
axis.text(2.62, 1.02, "one piece", va="bottom", fontsize=9)
axis.axhspan(1 / 1.26, 1 / 1.20, color="#d8d8d8", zorder=0)
axis.text(2.62, 1 / 1.23, "paper", va="center", fontsize=9)
axis.set_xticks(
    [i + 0.175 for i in range(3)], [f"{n} sequence{'s' if n > 1 else ''}" for n in batches]
)
axis.set_xlim(-0.3, 3.1)
axis.set(
    ylabel="speed against one piece",
    title="attention of one decode step, 1,000 tokens of context each",
)
axis.legend(loc="upper left", ncols=2)
axis.set_ylim(0, max(1.45, 1.25 * max(relative["table"])))
plt.show()


def in_words(ratio):
    if ratio < 0.9:
        return "slower than"
    return "about as fast as" if ratio <= 1.1 else "faster than"


note(
    "**What to see.** On the machine that built this page, the kernel that goes through the table is "
    + ", ".join(
        f"{in_words(r)} one piece with {n} sequence{'s' if n > 1 else ''} ({r:.2f} times its speed)"
        for n, r in zip(batches, relative["table"], strict=True)
    )
    + ". Gathering first reaches "
    + ", ".join(f"{r:.2f}" for r in relative["gather"])
    + " times the speed of one piece. (Bytes moved three times instead of once would give 0.33; where it is "
    "more, the copy was still in the processor's cache when it was read.) The grey band is what the PagedAttention paper reports for its "
    "GPU kernel: 20 to 26 % more time than a kernel that reads contiguous memory."
)

# %% [markdown]
# Careful: these are two programs, torch's and ours, so the ratio is not the price of the table
# alone. For that, one and the same kernel has to run with many pieces and with one; the next
# section does it. What can be said here: a table need not be slow. Blocks of 16 slots are pieces
# of some kilobytes, long enough for memory to be read at speed, and the next one can be asked for
# early. The paper's figure is a GPU's, for the attention kernel alone, in 2023; attention is one
# part of a step, and with the memory that pages won, the whole system came out ahead all the same.
#
# ## How large should a block be?
#
# Small blocks waste few slots: on average about half a block a sequence. Large blocks mean
# shorter tables and longer pieces. Simulate the first: requests with seeded lengths, modelled on
# the ShareGPT conversations of the paper (`car_park.chats`, chapter 4), thirty at a time, each
# growing by a token a tick, over the real `BlockPool`.

# %% id="block-size"
from collections import deque

from minikv.lab import car_park

requests = car_park.chats(200, seed=0).requests


def grow(pool, table, tokens):
    missing = blocks_for(table.num_tokens + tokens, pool.block_size) - len(table)
    table.blocks.extend(pool.allocate_many(missing))
    table.num_tokens += tokens


def useful_share(block_size, at_once=30):
    """The share of owned slots that hold a token, and the most empty slots of one sequence."""
    pool = BlockPool(at_once * blocks_for(2_048, block_size), block_size)
    waiting, running, filled, owned, worst = deque(requests), {}, 0, 0, 0
    while waiting:
        while waiting and len(running) < at_once:
            request = waiting.popleft()
            running[request] = BlockTable(block_size)
            grow(pool, running[request], request.prompt_tokens)
        for request, table in list(running.items()):
            grow(pool, table, 1)
            filled, owned = filled + table.num_tokens, owned + table.capacity_tokens
            worst = max(worst, table.capacity_tokens - table.num_tokens)
            if table.num_tokens == request.total_tokens:
                pool.release(reversed(running.pop(request).blocks))
    return filled / owned, worst


# %% id="block-size-run" tags=["nbval-check-output"]
sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
shares = {}
for size in sizes:
    shares[size], worst = useful_share(size)
    assert worst <= size - 1
    print(
        f"blocks of {size:3}: {100 * shares[size]:5.1f} % of the owned slots hold a token; "
        f"at most {worst:3} empty in a sequence"
    )

# %% [markdown]
# The other way round: what does a small block cost? Count table entries, and time the kernel. A block
# of 1,024 slots takes a whole sequence: one piece, and no table to speak of.

# %% id="block-size-time"
timed = (1, 4, 16, 64, 256, 1024)
speed = best_seconds({size: competitors(4, block_size=size)["table"] for size in timed}, repeats=12)
for size in timed:
    print(
        f"blocks of {size:5,}: {blocks_for(1_000, size):5,} table entries for 1,000 tokens, "
        f"{speed[size] / speed[16]:.2f} times the kernel time of blocks of 16"
    )

# %% id="block-size-figure" tags=["hide-input"]
fig, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3.0))
left.plot(sizes, [100 * shares[size] for size in sizes])
left.plot([16], [96.3], linestyle="none", marker="x", markersize=9, color="black")
left.text(
    14, 94, "the paper's vLLM: 96.3 %\n(of its whole KV memory)", ha="right", va="top", fontsize=8
)
left.set(title="owned slots that hold a token (%)", ylim=(55, 102))
right.plot(timed, [speed[size] / speed[16] for size in timed], marker="s", linestyle="--")
right.axhline(1, color="#767676", linewidth=0.8)
right.set(title="kernel time, blocks of 16 = 1", ylim=(0, None))
for axis in (left, right):
    axis.set_xscale("log", base=2)
    axis.set_xticks(timed, [f"{size:,}" for size in timed])
    axis.set_xlabel("slots in a block")
plt.show()
note(
    f"**What to see.** Left: blocks of 16 keep **{100 * shares[16]:.1f} %** of the owned slots useful, blocks of 256 "
    f"only {100 * shares[256]:.1f} %. Right: on the machine that built this page, blocks of one slot "
    f"take **{speed[1] / speed[16]:.1f} times** the kernel time of blocks of 16. In blocks of 1,024 each "
    f"sequence lies in one piece, and the same kernel takes {speed[1024] / speed[16]:.2f} times as long as with 16: "
    "the difference is what cutting into pages costs *this* kernel."
)

# %% [markdown]
# Small blocks cost time, large blocks cost memory, and there is room between the two. The paper
# found 16 to 128 best for its longer texts and chose 16. Chapter 6
# gives one more reason for small blocks: only a whole block can be shared.
#
# ## Audit: 96.3 % useful
#
# The paper's 96.3 % is a share of the *whole* KV memory, so slots that nobody owns
# while requests wait count as waste too. Chapter 4's simulation counts just so. The same trace,
# the same 15,700 slots, blocks of 16:

# %% id="audit"
trace = car_park.chats()
paged_run = car_park.simulate(
    trace, reservation="paged", block_size=16, ticks=trace.requests[-1].arrival + 1, snapshots=0
)
claim("96-percent-useful", paged_run.held, source="paper")

# %% id="audit-beside" tags=["nbval-check-output"]
for reservation, paper in (("maximum", 20.4), ("power_of_two", 26.8), ("oracle", 38.2)):
    run = car_park.simulate(
        trace,
        reservation=reservation,
        placement="buddy",
        ticks=trace.requests[-1].arrival + 1,
        snapshots=0,
    )
    print(
        f"{reservation:13} in one piece: {100 * run.held:5.1f} % hold a token "
        f"(paper, its own requests: {paper} %)"
    )
print(
    f"{'blocks of 16':13}             : {100 * paged_run.held:5.1f} % hold a token (paper: 96.3 %)"
)

# %% [markdown]
# ## Questions
#
# **1.** Llama-3.1-8B needs 128 KiB a token in bf16 (chapter 3). How large is one block of 16
# slots, and how much memory can 200 sequences waste at most in their last blocks?
#
# <details><summary>Answer</summary>
#
# A block is 16 x 128 KiB = 2 MiB. A sequence wastes at most 15 slots, 1.875 MiB, and 200 of them
# at most 375 MiB, on average about half of it. With a reservation of 1,024 slots and 100 used
# (chapter 4), a *single* sequence wasted 924 slots, 115.5 MiB.
#
# </details>
#
# **2.** With blocks there is no external fragmentation at all. Why not? And is any internal
# fragmentation left?
#
# <details><summary>Answer</summary>
#
# External fragmentation means that enough is free, but not in one piece. Every request for memory
# is for one block, and every free block is one piece of that size, so a free block always fits.
# Internal fragmentation is left in the last block of each sequence: at most block_size - 1 slots.
#
# </details>
#
# **3.** An engine computes `block = tables[0][position // block_size]` in its kernel, whichever
# sequence it is working on. With one request all tests pass. What do you see with two, and which
# test would have caught it?
#
# <details><summary>Answer</summary>
#
# Every sequence reads the K and V of sequence 0 (and perhaps writes there): the first answers
# well, the others talk about the first one's text. A cousin of it was reported for sparkinfer
# (gittensor-ai-lab/sparkinfer issue 289): row *i* of the batch was taken to be the *i*-th table from
# sequence 0 on, which is right until a sequence ends and another takes its place. The test: run A
# and B together, let A end and C take its place, and compare B and C with each run alone. In this chapter, two sequences taking turns do that job, and so does the batch of two in
# the engine.
#
# </details>
#
# **4.** Two requests start with the same six tokens, blocks have four slots, and somebody lets
# both tables name the same two blocks. What goes wrong, and when?
#
# <details><summary>Answer</summary>
#
# The first block is full and is only read from now on: sharing it is harmless. The second holds
# tokens 4 and 5 and two empty slots. As soon as the requests differ, both write their seventh
# token into slot 2 of the same block, and one reads the other's K and V (reported for atlas, pull
# request 692). A block may be written only while it has one owner. So share full blocks only, or
# copy the shared tail before writing. Chapter 6 builds on it.
#
# </details>
#
# **5.** "With pages, attention over 10,000 tokens is as cheap as over 100, since the kernel only
# looks at one block at a time." What is wrong?
#
# <details><summary>Answer</summary>
#
# It looks at one block at a time, but at all of them. A decode step still reads the K and V of
# every earlier token once, 100 times as many at 10,000. Pages change where K and V lie, not how
# many there are. (A cached decode step is not O(1): chapter 2.)
#
# </details>
#
# **6.** Two threads share one long sequence: one takes the first half of the blocks, the other
# the second. Each ends with its own largest score, sum and (undivided) output. How do you put the
# two together?
#
# <details><summary>Answer</summary>
#
# With the same rescaling. Let $m = \max(m_1, m_2)$. Then the sum is $t_1 e^{m_1 - m} + t_2 e^{m_2
# - m}$, the output $o_1 e^{m_1 - m} + o_2 e^{m_2 - m}$, and one division ends it. The order does
# not matter, so any number of workers can do it. On GPUs this is how one long sequence keeps the
# whole machine busy (split-K, Flash-Decoding).
#
# </details>
#
# ## In the big engines
#
# As of 2026, each path seen in the public repository:
#
# | engine | what it calls it | where |
# |---|---|---|
# | vLLM | blocks, `BlockPool`; a block table for each request | `vllm/v1/core/block_pool.py`, `vllm/v1/worker/gpu/block_table.py`; a kernel that reads them: `vllm/v1/attention/ops/chunked_prefill_paged_decode.py` |
# | SGLang | pages of a token-to-KV pool; `ReqToTokenPool` is the table, one entry a token | `python/sglang/srt/mem_cache/memory_pool.py`; `python/sglang/srt/layers/attention/triton_ops/decode_attention.py` |
# | Hugging Face transformers | `PagedAttentionCache`, for continuous batching | `src/transformers/generation/continuous_batching/cache.py` |
# | llama.cpp | cells: one token each, found anywhere by `find_slot`; a mask tells sequences apart, there is no block table | `src/llama-kv-cache.cpp` |
#
# ## Sources
#
# - W. Kwon, Z. Li, S. Zhuang, Y. Sheng, L. Zheng, C. H. Yu, J. Gonzalez, H. Zhang, I. Stoica:
#   Efficient Memory Management for Large Language Model Serving with PagedAttention, SOSP 2023,
#   arXiv 2309.06180 (blocks and tables: section 4; 96.3 % and 20.4 to 38.2 %: figure 2; kernel
#   and block size: section 7).
# - M. Milakov, N. Gimelshein: Online normalizer calculation for softmax, 2018, arXiv 1805.02867.
# - T. Dao, D. Y. Fu, S. Ermon, A. Rudra, C. Ré: FlashAttention, 2022, arXiv 2205.14135.
# - The faults: Wenyueh/MinivLLM issue 76 and pull requests 77 and 83; GeeeekExplorer/nano-vllm
#   issues 30, 91, 150 and 240, pull request 65.
#
# ## Next
#
# Look at the tables once more. Nothing says that two of them may not name the same block. A
# hundred requests that begin with the same instructions (a *system prompt*) keep a hundred copies of it, and
# [chapter 6](06_share_the_prefix.ipynb) asks how they could keep one.
