# %% [markdown] id="title"
# # Capstone. Your own engine
#
# In the exercises of chapters [1](../chapters/01_one_token_at_a_time.ipynb) to
# [8](../chapters/08_the_cliff.ipynb) you built pieces. Here you join them into an engine that works: K and V in pages,
# prefixes shared, many requests in a step, and the same tokens as a model without any cache.
#
# **This notebook is ungraded.** Its checks show how far you are, and give no points. Unlike the exercises of the
# chapters, each step needs those before it. Bring your own pieces: copy from your exercises what fits, and change what does not. Inside the classes you may
# keep what you like; the checks only ask the methods that are named.
#
# **Together** about 180 minutes.

# %% id="e09-setup" role="given"
import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from minikv import generate_without_cache, load, logits
from minikv.cache.attention.reference import attend_one
from minikv.cache.blocks import blocks_for
from minikv.classroom.checks import check, expect, hidden_random, lock_minikv, refuses, require

torch.set_grad_enabled(False)
model = load(dtype=torch.float64)  # exact, so that tokens can be compared
lock_minikv()

# %% [markdown] id="engine"
# ## Exercise 1. Six steps to an engine
#
# *ungraded, 180 minutes, hard*
#
# ### Step 1. Pages
#
# K and V of all sequences lie in one tensor of blocks. A *table* is a list of block numbers: the token at position p
# lies in slot `p % block_size` of block `table[p // block_size]`. Write and read through it (chapter 5).


# %% id="e09-pages" role="answer"
class Pages:
    """K and V of everybody, in blocks."""

    def __init__(self, shape, num_blocks, block_size):
        self.block_size = block_size
        size = (num_blocks, shape.layers, 2, block_size, shape.kv_heads, shape.head_dim)
        self.data = torch.full(size, torch.nan, dtype=torch.float64)  # nan: nobody has written here

    def write(self, table, layer, start, k, v):
        """Store k and v, [tokens, kv_heads, head_dim], of the tokens at the positions from start on."""
        ### BEGIN SOLUTION: one slot for each token, found through the table
        for position, (key, value) in enumerate(zip(k, v, strict=True), start):
            block, slot = table[position // self.block_size], position % self.block_size
            self.data[block, layer, 0, slot] = key
            self.data[block, layer, 1, slot] = value
        ### END SOLUTION

    def read(self, table, layer, count):
        """Keys and values of the first count tokens, [count, kv_heads, head_dim] each."""
        ### BEGIN SOLUTION: the blocks of the table one behind the other, cut to count
        keys, values = self.data[table, layer].transpose(0, 1).flatten(1, 2)[:, :count]
        return keys, values
        ### END SOLUTION


# %% id="e09-pages-check" role="check"
with check(
    "what is written through a table is read through it",
    why="The model never learns that its text lies in pieces. Everything above relies on that.",
    hint="Position p: block table[p // block_size], slot p % block_size. The last block may be partly filled.",
):
    shape = model.shape
    pages = Pages(shape, 8, 4)
    noise = torch.randn(
        2, 10, shape.kv_heads, shape.head_dim, generator=torch.Generator().manual_seed(9)
    ).double()
    pages.write([5, 2, 7], 1, 0, noise[0, :6], noise[1, :6])
    pages.write([5, 2, 7], 1, 6, noise[0, 6:], noise[1, 6:])
    keys, values = pages.read([5, 2, 7], 1, 10)
    expect(
        keys.shape[0],
        10,
        "rows read",
        mistakes={
            "The empty slots of the last block were read as well: cut to count.": 12,
        },
    )
    expect(keys, noise[0], "the keys, in the order of the text")
    expect(values, noise[1], "the values, in the order of the text")
    other = pages.read([1, 0], 1, 8)[0]
    require(bool(other.isnan().all()), "blocks of nobody were written to")
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    table, count = draw.sample(range(8), 4), draw.randint(5, 16)
    pages = Pages(shape, 8, 4)
    noise = torch.randn(2, count, shape.kv_heads, shape.head_dim).double()
    cut = draw.randint(1, count - 1)
    pages.write(table, 0, 0, noise[0, :cut], noise[1, :cut])
    pages.write(table, 0, cut, noise[0, cut:], noise[1, cut:])
    expect(pages.read(table, 0, count)[0], noise[0])
    expect(pages.read(table, 0, count)[1], noise[1])
    ### END HIDDEN TESTS

# %% [markdown] id="pool"
# ### Step 2. The pool
#
# Who owns which block, and which may be taken (chapters 5 and 6). A block is free, or it has owners, or it is *cached*:
# it has a key and no owner. `take` hands out free blocks first, then the cached one that lost its last owner the
# longest ago, which loses its key.


# %% id="e09-pool" role="answer"
class Pool:
    """Blocks 0 to num_blocks - 1: owners, keys, and what can be had."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        ### BEGIN SOLUTION
        self.owners = [0] * num_blocks
        self.free = list(range(num_blocks))
        self.cached = OrderedDict()  # blocks with a key and no owner, the longest unused first
        self.block_of, self.key_of = {}, {}
        ### STUB
        # # ... and whatever you need to remember
        ### END SOLUTION

    def num_free(self):
        """Blocks that take() can hand out: the free and the cached ones."""
        ### BEGIN SOLUTION: a number
        return len(self.free) + len(self.cached)
        ### END SOLUTION

    def take(self):
        """A block for new content, with one owner and no key; MemoryError when there is none."""
        ### BEGIN SOLUTION: a free block, or else the least recently used cached one
        if self.free:
            block = self.free.pop()
        elif self.cached:
            block, _ = self.cached.popitem(last=False)
            del self.block_of[self.key_of.pop(block)]
        else:
            raise MemoryError("no block is free")
        self.owners[block] = 1
        return block
        ### END SOLUTION

    def share(self, block):
        """One owner more, for a block that has owners or is cached."""
        ### BEGIN SOLUTION: count, and it is not cached any more
        self.owners[block] += 1
        self.cached.pop(block, None)
        ### END SOLUTION

    def release(self, table):
        """One owner less for each block of the table, from its tail to its head."""
        ### BEGIN SOLUTION: without an owner, a block with a key is cached and one without is free
        for block in reversed(table):
            self.owners[block] -= 1
            if self.owners[block] == 0:
                if block in self.key_of:
                    self.cached[block] = None
                else:
                    self.free.append(block)
        ### END SOLUTION

    def keep(self, block, key):
        """From now on ``block`` can be found by ``key``; nothing happens when the key leads to a block already."""
        ### BEGIN SOLUTION: remember both ways
        if key not in self.block_of:
            self.block_of[key], self.key_of[block] = block, key
        ### END SOLUTION

    def find(self, key):
        """The block with this key, owned or cached; None when there is none. Changes nothing."""
        ### BEGIN SOLUTION: look it up
        return self.block_of.get(key)
        ### END SOLUTION


# %% id="e09-pool-owners" role="check"
with check(
    "owners",
    why="A block that is given to two by mistake mixes two conversations; one that never comes back is lost memory.",
    hint="Count owners. A block without a key is free when its last owner lets go, not before.",
):
    pool = Pool(3)
    expect(pool.num_free(), 3, "free in a new pool of 3")
    first, second = pool.take(), pool.take()
    expect(
        {first, second} <= {0, 1, 2} and first != second, True, "two different blocks of the pool"
    )
    pool.share(first)
    pool.release([first, second])
    expect(
        pool.num_free(),
        2,
        "free when one of two blocks still has an owner",
        mistakes={"A shared block is free only when its last owner has let go.": 3},
    )
    pool.release([first])
    expect(pool.num_free(), 3, "free when all have let go")
    taken = {pool.take(), pool.take(), pool.take()}
    expect(taken, {0, 1, 2}, "three blocks taken")
    refuses(pool.take, MemoryError)

# %% id="e09-pool-cached" role="check"
with check(
    "cached blocks",
    why="A conversation that has just ended is probably continued: its blocks stay until somebody needs the place.",
    hint="A block with a key is cached when its last owner lets go. A hit revives it. LRU, and the tail before the head.",
):
    pool = Pool(3)
    head, tail = pool.take(), pool.take()
    pool.keep(head, "head")
    pool.keep(tail, "tail")
    pool.release([head, tail])
    expect(
        pool.num_free(),
        3,
        "blocks that can be had",
        mistakes={
            "Cached blocks without an owner can be had as well: they are as good as free.": 1,
        },
    )
    found = pool.find("head")
    expect(found is not None and found == head, True, "the head is found after its owner has gone")
    expect(pool.take() not in (head, tail), True, "a free block goes before a cached one")
    pool.take()
    expect(
        [pool.find("head") is not None, pool.find("tail") is not None],
        [True, False],
        "head and tail of the chain, after one cached block was taken",
        mistakes={
            "The head was given up first: release lets go from the tail to the head.": [
                False,
                True,
            ],
            "A block that was given away must not be found by its old key.": [True, True],
        },
    )
    pool.share(head)
    expect(pool.num_free(), 0, "a hit on a cached block: it cannot be had any more")
    refuses(pool.take, MemoryError)

# %% [markdown] id="keys"
# ### Step 3. Keys
#
# A key for each **full** block, which stands for the block and for all that comes before it (chapter 6). Any kind of
# key will do that a dict takes.


# %% id="e09-keys" role="answer"
def chain_keys(ids, block_size):
    """The keys of the full blocks of a list of token ids, in order."""
    ### BEGIN SOLUTION: chain each key to the one before
    keys, parent = [], b""
    for end in range(block_size, len(ids) + 1, block_size):
        parent = hashlib.sha256(parent + repr(ids[end - block_size : end]).encode()).digest()
        keys.append(parent)
    return keys
    ### END SOLUTION


# %% id="e09-keys-check" role="check"
with check(
    "keys of blocks",
    why="K and V of a token depend on every token before it. A key that forgets them serves another text's memory.",
    hint="Put the key of the block before into the key of each block.",
):
    keys = [
        chain_keys(ids, 2) for ids in ([1, 2, 3, 4, 5], [1, 2, 3, 4], [9, 2, 3, 4], [1, 2, 9, 4])
    ]
    expect(
        [len(each) for each in keys],
        [2, 2, 2, 2],
        "numbers of keys; 5 tokens have 2 full blocks of 2",
        mistakes={
            "Only full blocks have a key: a partly filled one will still change.": [3, 2, 2, 2]
        },
    )
    expect([a == b for a, b in zip(keys[0], keys[1], strict=True)], [True, True], "the same text")
    expect(
        [a == b for a, b in zip(keys[1], keys[2], strict=True)],
        [False, False],
        "1 2 3 4 and 9 2 3 4, block by block",
        mistakes={
            "3 4 after another beginning is another block: the key must hold its whole past.": [
                False,
                True,
            ]
        },
    )
    expect(
        [a == b for a, b in zip(keys[1], keys[3], strict=True)], [True, False], "1 2 3 4, 1 2 9 4"
    )
    expect(chain_keys([321] * 2, 2) == chain_keys([65] * 2, 2), False, "321 321 and 65 65")

# %% [markdown] id="forward"
# ### Step 4. One pass for many
#
# The model asks one thing of a cache: `attend(layer, q, k, v)` stores the new k and v and gives attention for q. The
# tokens of all sequences of a step lie one behind the other. Write such an object, and the pass around it.
#
# A *piece* is `(table, ids, start)`: these token ids, the first of them at position `start`, behind what the table
# already holds. `model(token_ids, positions, kv, rows)` takes int64 tensors; `rows` says of which tokens logits are
# wanted. Given is `attend_one(q, keys, values)`: causal attention of the last tokens of **one** sequence, q
# [tokens, heads, head_dim], keys and values [kv_heads, all tokens, head_dim] (mind the order of the axes).


# %% id="e09-forward" role="answer"
class PagedStep:
    """What the model sees of the pages in one pass."""

    def __init__(self, pages, pieces):
        self.pages, self.pieces = pages, pieces

    def attend(self, layer, q, k, v):
        """q [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim], those of all pieces. Returns q's shape."""
        ### BEGIN SOLUTION: for each piece: write, read, attend; then put the results together
        outs, first = [], 0
        for table, ids, start in self.pieces:
            own = slice(first, first + len(ids))
            self.pages.write(table, layer, start, k[own], v[own])
            keys, values = self.pages.read(table, layer, start + len(ids))
            outs.append(attend_one(q[own], keys.transpose(0, 1), values.transpose(0, 1)))
            first += len(ids)
        return torch.cat(outs)
        ### END SOLUTION


def compute(model, pages, pieces):
    """One pass over all pieces. Returns the logits of each piece's last token, [pieces, vocab]."""
    ### BEGIN SOLUTION: ids, positions and the last row of each piece, one behind the other
    ids = [token for _, tokens, _ in pieces for token in tokens]
    positions = [start + i for _, tokens, start in pieces for i in range(len(tokens))]
    lasts = torch.tensor([len(tokens) for _, tokens, _ in pieces]).cumsum(0) - 1
    return model(torch.tensor(ids), torch.tensor(positions), PagedStep(pages, pieces), lasts)
    ### END SOLUTION


# %% id="e09-forward-check" role="check"
with check(
    "logits of a prompt in pieces, beside another sequence",
    why="It makes no difference in which pieces a text came, nor who else was in the step. That is all a cache promises.",
    hint="Positions go on at start. Each piece attends through its own table, over start + len(ids) tokens.",
):
    text = model.tokenizer.encode("The capital of France is Paris and the river is")
    other = model.tokenizer.encode("ROMEO:\nI will")
    pages = Pages(model.shape, 10, 4)
    got = compute(model, pages, [([3, 8, 1], text[:6], 0)])
    expect(got, logits(model, text[:6])[-1:], "a prompt of 6 tokens", tolerance=1e-6)
    got = compute(model, pages, [([3, 8, 1], text[6:], 6), ([0, 5], other, 0)])
    expect(
        got[0],
        logits(model, text)[-1],
        "the rest of it, together with another sequence",
        tolerance=1e-6,
        mistakes={
            "As if the second piece stood at the beginning: do its positions go on at start, and does it see what "
            "was there before?": logits(model, text[6:])[-1],
        },
    )
    expect(got[1], logits(model, other)[-1], "the other sequence", tolerance=1e-6)

# %% [markdown] id="plan"
# ### Step 5. Who runs
#
# Decode first (chapter 7). A step has a budget of tokens. Every request that has begun its answer gets one token; what
# is left goes to the prompts, in order, in pieces as large as possible. When the budget is too small, those at the
# front of the list go first.


# %% id="e09-request" role="given"
@dataclass(eq=False)
class Request:
    """A request on its way."""

    name: str
    prompt: list
    new_tokens: int
    answer: list = field(default_factory=list)
    computed: int = 0  # tokens of prompt and answer that have K and V
    table: list = field(default_factory=list)

    @property
    def ids(self):
        """Prompt and answer so far."""
        return self.prompt + self.answer


# %% id="e09-plan" role="answer"
def plan(running, budget):
    """[(request, how many of its tokens to compute now)], decodes before prompts; at most budget tokens in all."""
    ### BEGIN SOLUTION: two rounds over the requests
    step, left = [], budget
    for decoding in (True, False):
        for request in running:
            count = min(len(request.ids) - request.computed, left)
            if bool(request.answer) == decoding and count > 0:
                step.append((request, count))
                left -= count
    return step
    ### END SOLUTION


# %% id="e09-plan-check" role="check"
with check(
    "the plan of a step",
    why="Somebody reads along with every decode. A long prompt in front of them makes all of them wait.",
    hint="First one token for each request with an answer, then min(what the prompt lacks, what is left of the budget).",
):
    requests = [
        Request("long", [1] * 20, 3, computed=4),
        Request("a", [1] * 3, 5, answer=[7], computed=3),
        Request("b", [1] * 2, 5, answer=[7, 8], computed=3),
        Request("new", [1] * 6, 2),
    ]
    for budget, wanted in (
        (8, [("a", 1), ("b", 1), ("long", 6)]),
        (20, [("a", 1), ("b", 1), ("long", 16), ("new", 2)]),
        (1, [("a", 1)]),
    ):
        expect(
            [(request.name, count) for request, count in plan(requests, budget)],
            wanted,
            f"a budget of {budget}",
            mistakes={
                "The long prompt goes first, and the readers wait.": lambda got: (
                    got[0][0] == "long"
                ),
                "More tokens than the budget.": lambda got, budget=budget: (
                    sum(count for _, count in got) > budget
                ),
                "A request with nothing to compute does not belong into a step.": lambda got: any(
                    count == 0 for _, count in got
                ),
            },
        )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(5):
        budget, lengths = draw.randint(3, 30), [draw.randint(1, 15) for _ in range(4)]
        requests = [Request("a", [1], 9, answer=[5], computed=1)]
        requests = [Request("p", [1] * length, 3) for length in lengths] + requests
        got = plan(requests, budget)
        expect([got[0][0].name, got[0][1]], ["a", 1])
        expect(sum(count for _, count in got), min(budget, 1 + sum(lengths)))
    ### END HIDDEN TESTS

# %% [markdown] id="join"
# ### Step 6. Join them
#
# The engine. Two methods are missing.
#
# `admit` lets waiting requests in, first come, first served. Look for the prompt's blocks in the pool, from the first on
# until one is missing. **One token at least must be computed**, so of 8 tokens in blocks of 4 only one block can be a
# hit. A request gets all blocks that it will ever need at once: for its prompt and its answer, whose last token is
# never fed back. If they cannot be had it waits, and leaves nothing behind.
#
# `step` admits, plans, computes, and books: what was computed is computed; full blocks are kept in the pool by their
# keys, but never before they have been computed; a request whose last token went through the model has a new token, the
# one with the largest logit; and one whose answer is complete leaves, and its blocks with it.


# %% id="e09-engine" role="answer"
class MiniEngine:
    """A paged, prefix-sharing engine."""

    def __init__(self, model, num_blocks, block_size, budget):
        self.model, self.block_size, self.budget = model, block_size, budget
        self.pages, self.pool = Pages(model.shape, num_blocks, block_size), Pool(num_blocks)
        self.waiting, self.running, self.answers = [], [], {}

    def add(self, name, prompt, new_tokens):
        """A request comes; prompt is a list of token ids."""
        self.waiting.append(Request(name, list(prompt), new_tokens))

    def run(self):
        """Step until all have their answers: {name: tokens}."""
        while self.waiting or self.running:
            if self.step() == 0:
                raise RuntimeError("a step computed nothing, so the rest would wait for ever")
        return self.answers

    def admit(self):
        """Let waiting requests in while their blocks can be had: their tables, and what is computed already."""
        ### BEGIN SOLUTION: hits first, then new blocks, all or nothing
        while self.waiting:
            request, hits = self.waiting[0], []
            most = (len(request.prompt) - 1) // self.block_size
            for key in chain_keys(request.prompt, self.block_size)[:most]:
                block = self.pool.find(key)
                if block is None:
                    break
                hits.append(block)
            tokens = len(request.prompt) + request.new_tokens - 1
            needed = blocks_for(tokens, self.block_size) - len(hits)
            for block in hits:
                self.pool.share(block)
            if needed > self.pool.num_free():
                self.pool.release(hits)
                return
            request.table = hits + [self.pool.take() for _ in range(needed)]
            request.computed = len(hits) * self.block_size
            self.running.append(self.waiting.pop(0))
        ### END SOLUTION

    def step(self):
        """One step. Returns how many tokens it computed."""
        ### BEGIN SOLUTION: admit, plan, compute, book
        self.admit()
        todo = plan(self.running, self.budget)
        if not todo:
            return 0
        pieces = [
            (
                request.table,
                request.ids[request.computed : request.computed + count],
                request.computed,
            )
            for request, count in todo
        ]
        for (request, count), row in zip(
            todo, compute(self.model, self.pages, pieces), strict=True
        ):
            before, request.computed = request.computed // self.block_size, request.computed + count
            keys = chain_keys(request.ids[: request.computed], self.block_size)
            for number in range(before, len(keys)):
                self.pool.keep(request.table[number], keys[number])
            if request.computed == len(request.ids):
                request.answer.append(int(row.argmax()))
                if len(request.answer) == request.new_tokens:
                    self.answers[request.name] = request.answer
                    self.running.remove(request)
                    self.pool.release(request.table)
        return sum(count for _, count in todo)
        ### END SOLUTION


# %% id="e09-engine-parts" role="given"
class Counted:
    """The model, with a list of how many tokens went through it in each pass."""

    def __init__(self, model):
        self.model, self.shape, self.passes = model, model.shape, []

    def __call__(self, token_ids, positions, kv, rows=None):
        self.passes.append(len(token_ids))
        return self.model(token_ids, positions, kv, rows)


known = {}  # what was asked before


def tokens_without_cache(prompt, new_tokens):
    """What minikv writes without any cache: nothing remembered, nothing wrong."""
    asked = (tuple(prompt), new_tokens)
    if asked not in known:
        known[asked] = generate_without_cache(model, prompt, new_tokens).tokens
    return known[asked]


# %% id="e09-engine-alone" role="check"
with check(
    "one request",
    why="The same tokens as without a cache, for a fraction of the work: chapter 2, now in pages.",
    hint="A request whose last token was computed gets the next one. That one is computed in the next step.",
):
    prompt = model.tokenizer.encode("The capital of France is")
    counted = Counted(model)
    mini = MiniEngine(counted, num_blocks=8, block_size=4, budget=16)
    mini.add("a", prompt, 10)
    expect(mini.run(), {"a": tokens_without_cache(prompt, 10)}, "the answer")
    expect(
        sum(counted.passes),
        len(prompt) + 9,
        "tokens through the model",
        mistakes={
            "The last token of an answer is not fed back.": len(prompt) + 10,
            "That is without a cache: only what is new goes through the model.": lambda got: (
                got > len(prompt) + 10
            ),
        },
    )
    expect(mini.pool.num_free(), 8, "blocks that can be had afterwards")

# %% id="e09-engine-many" role="check"
with check(
    "four requests together, in small steps",
    why="Nobody's answer may depend on who else is there, or on the pieces in which the prompt was computed.",
    hint="A piece that ends before the prompt does gives no token: its logits are of no use.",
):
    texts = {
        "france": "The capital of France is",
        "romeo": "ROMEO:\nI will not go to the",
        "guide": "You are a guide to the cities of Europe. Answer in one short sentence",
        "fool": "You are a fool, my lord",
    }
    prompts = {name: model.tokenizer.encode(text) for name, text in texts.items()}
    counted = Counted(model)
    mini = MiniEngine(counted, num_blocks=40, block_size=4, budget=7)
    for name, prompt in prompts.items():
        mini.add(name, prompt, 6)
    expect(
        mini.run(),
        {name: tokens_without_cache(prompt, 6) for name, prompt in prompts.items()},
        "the answers",
    )
    require(max(counted.passes) <= 7, "a step computed more than its budget of 7 tokens")
    require(
        len(counted.passes) <= 24, "more than 24 passes: do several requests run in the same step?"
    )

# %% id="e09-engine-prefix" role="check"
with check(
    "a shared prefix is computed once",
    why="The instructions at the front of every prompt are most of the work, and they are always the same.",
    hint="Look for the keys of the full blocks from the first on, and stop at the first that is missing. One token at "
    "least has to be computed: its logits are what the request came for.",
):
    common = model.tokenizer.encode("You are a guide. What is the capital of France")
    counted = Counted(model)
    mini = MiniEngine(counted, num_blocks=12, block_size=4, budget=64)
    for name, more, computes in (
        ("first", [], 12),
        ("again", [], 4),
        ("goes on", [300, 301, 302], 3),
        ("another", [400], 1),
    ):
        counted.passes.clear()
        mini.add(name, common + more, 1)
        expect(mini.run()[name], tokens_without_cache(common + more, 1), f"the answer to {name!r}")
        expect(
            sum(counted.passes),
            computes,
            f"tokens computed for {name!r}: 12 common tokens and {len(more)} more, in blocks of 4",
            mistakes={
                "Nothing was found. Are full blocks kept by their keys once they are computed?": (
                    12 + len(more)
                ),
            },
        )
    mini.add("other", [9, *common[1:]], 1)
    expect(
        mini.run()["other"],
        tokens_without_cache([9, *common[1:]], 1),
        "a prompt with another beginning, and the same blocks behind it",
    )

# %% id="e09-engine-tight" role="check"
with check(
    "a pool that is too small for all at once",
    why="A full pool is the ordinary state of a cache that is used. Requests wait, cached blocks go, and nothing is lost.",
    hint="All or nothing: a request takes its blocks only when it can have all of them. Its own hits are not free for it. "
    "Whoever leaves gives everything back.",
):
    common = model.tokenizer.encode("You are a guide. What is the capital of France")
    prompts = {str(number): [*common[: 2 + 2 * number], 500 + number] for number in range(5)}
    mini = MiniEngine(model, num_blocks=5, block_size=4, budget=16)
    for _ in range(2):
        for name, prompt in prompts.items():
            mini.add(name, prompt, 5)
        expect(
            mini.run(),
            {name: tokens_without_cache(prompt, 5) for name, prompt in prompts.items()},
            "the answers",
        )
        expect(mini.pool.num_free(), 5, "blocks that can be had when all have left")

# %% [markdown] id="done"
# ### Done?
#
# Then you have written what this course is about. What minikv's engine has besides: sampling, requests that are preempted
# when blocks run out (yours reserves them all at once, so memory stands empty), copy-on-write for several answers to one
# prompt, a check of tokens behind every hash, and errors that name both numbers. Read `minikv/engine/scheduler.py`: you
# know every line of it now.
