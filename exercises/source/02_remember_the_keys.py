# %% [markdown] id="title"
# # Exercises 2. Remember the keys
#
# They go with [chapter 2](../chapters/02_remember_the_keys.ipynb) and ask for things that it does not show. Write your
# answers where `NotImplementedError` or `...` stands. The cell below an answer checks it: run it as often as you like. A
# check that fails says what is wrong, why it matters and what to try. The exercises do not need one another, so take
# them in any order.
#
# You may use whatever the first cell imports, and anything from Python, NumPy and PyTorch. The rest of minikv is closed
# here: what it does is the exercise.
#
# **Together** 20 points, about 105 minutes. Three of them, in exercise 5, are given by a person.

# %% id="e02-setup" role="given"
import gc
import math

import numpy as np
import torch

from minikv import load, logits
from minikv.classroom.checks import (
    check,
    expect,
    hidden_random,
    lock_minikv,
    oracle,
    refuses,
    require,
)

torch.set_grad_enabled(False)
model = load(dtype=torch.float64)  # the same weights as in float32, for when rounding is in the way
lock_minikv()


def some_rows(*size, seed):
    """A tensor of this size with random numbers; the same for the same seed."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# %% [markdown] id="reserved"
# ## Exercise 1. A cache that does not copy
#
# *3 points, 15 minutes, easy*
#
# The chapter's `MyCache` calls `torch.cat` and so copies all kept rows in every step. Complete one that reserves its
# memory beforehand, for one text in one layer. `append` writes the new rows behind those that are there, and gives back
# all rows so far, the new ones included, without copying any. With `limit=8` and 5 rows kept, 2 new ones go to the
# places 5 and 6, and `append` gives 7 rows.
#
# Eight rows of eight are fine. More are refused with a `ValueError` whose message holds both numbers: how many rows there
# would be, and how many there is room for. After that the cache is as it was, and takes what does fit.


# %% id="e02-reserved" role="answer"
class Reserved:
    """K and V of one text in one layer, in buffers that are reserved once."""

    def __init__(self, limit, heads, head_dim):
        self.length = 0  # rows in use
        self.k = torch.zeros(limit, heads, head_dim)
        self.v = torch.zeros(limit, heads, head_dim)

    def append(self, k, v):
        """k, v [new, heads, head_dim]. Gives k, v of all rows so far, each [rows, heads, head_dim]."""
        ### BEGIN SOLUTION
        end = self.length + len(k)
        if end > len(self.k):
            raise ValueError(f"there would be {end} rows, and there is room for {len(self.k)}")
        self.k[self.length : end] = k
        self.v[self.length : end] = v
        self.length = end
        return self.k[:end], self.v[:end]
        ### STUB
        # raise NotImplementedError("refuse what does not fit, in place of this line; then fill in each ...")
        # self.k[self.length : ...] = k
        # self.v[self.length : ...] = v
        # self.length = ...
        # return ..., ...
        ### END SOLUTION


# %% id="e02-reserved-rows" role="check" points=1
with check(
    "the rows after steps of 5, 1 and 2 tokens, in a buffer of 9",
    why="Attention reads what append gives back: a row too few, too many or in another place is another text.",
    hint="New rows begin at self.length and end at self.length + len(k). Give back the rows in use, not the whole buffer.",
):
    keys = torch.arange(1, 49).view(8, 2, 3).float()
    values = keys + 100
    reserved = Reserved(9, heads=2, head_dim=3)
    for first, end in ((0, 5), (5, 6), (6, 8)):
        got_k, got_v = reserved.append(keys[first:end], values[first:end])
        expect(
            got_k,
            keys[:end],
            f"K after {end} tokens",
            mistakes={
                "The unused part of the buffer is given back as well. Its zeros would count as keys: a score of 0 "
                "is not a weight of 0.": torch.cat((keys[:end], torch.zeros(9 - end, 2, 3))),
                "Only the new rows are given back. The queries need all keys so far.": keys[
                    first:end
                ],
                "The new rows overwrite the first ones.": lambda got, new=keys[first:end]: bool(
                    (got[: len(new)] == new).all()
                ),
            },
        )
        expect(
            got_v,
            values[:end],
            f"V after {end} tokens",
            mistakes={"These are the keys: V has rows of its own.": keys[:end]},
        )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    keys = some_rows(20, 1, 4, seed=draw.randint(0, 10**6)).float()
    reserved, end = Reserved(21, heads=1, head_dim=4), 0
    while end < 20:
        first, end = end, min(20, end + draw.randint(1, 6))
        got_k, got_v = reserved.append(keys[first:end], -keys[first:end])
        expect(got_k, keys[:end])
        expect(got_v, -keys[:end])
    ### END HIDDEN TESTS

# %% id="e02-reserved-copies" role="check" points=1
with check(
    "where the kept rows lie in memory, before and after a step",
    why="Whoever copies all kept rows for each token writes a text of n tokens n / 2 times over.",
    hint="self.k[a:b] = k writes into the buffer, and self.k[:b] looks into it. Neither makes a new tensor.",
):
    reserved = Reserved(7, heads=2, head_dim=3)
    addresses = []
    for first, end in ((0, 3), (3, 4), (4, 6)):
        new = torch.arange(first, end)[:, None, None].expand(-1, 2, 3).float()
        got_k, got_v = reserved.append(new, -new)
        expect(got_k[:, 0, 0], list(range(end)), "a number in each row of K")
        expect(got_v[:, 1, 2], [-row for row in range(end)], "a number in each row of V")
        addresses.append((got_k.data_ptr(), got_v.data_ptr()))
        held_here = (
            got_k,
            got_v,
        )  # as long as they are in use, their memory cannot be given to others
    require(
        addresses[0] == addresses[1] == addresses[2],
        "the first row of K or V is not where it was: the rows have been copied (torch.cat, clone, a new buffer?)",
    )
    require(got_k.data_ptr() != got_v.data_ptr(), "K and V lie in the same memory")

# %% id="e02-reserved-full" role="check" points=1
with check(
    "14 rows in a buffer of 16, and then 6 more",
    why="A context that grows past its buffer must not write over something else, nor end the whole service: whoever "
    "asked for too much is told so, in numbers, and the cache goes on.",
    hint="Raise a ValueError of your own before anything is written or counted: a refusal leaves the cache as it was. "
    "And what is too many: end > limit, or end >= limit?",
):
    rows = some_rows(16, 1, 2, seed=3).float()
    reserved = Reserved(16, heads=1, head_dim=2)
    reserved.append(rows[:14], rows[:14])
    refuses(lambda: reserved.append(rows[:6], rows[:6]), ValueError, naming=(20, 16))
    got_k, got_v = reserved.append(rows[14:], rows[14:])
    expect(
        got_k,
        rows,
        "after the refusal 2 rows, which just fit",
        mistakes={
            "Rows that were refused have been written.": lambda got: bool(
                (got[:6] == rows[:6]).all()
            ),
            "The length counts what was refused.": lambda got: len(got) > 16,
        },
    )
    expect(got_v, rows, "V")
    refuses(lambda: reserved.append(rows[:1], rows[:1]), ValueError, naming=(17, 16))
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    limit, more = draw.randint(30, 60), draw.randint(100, 200)
    reserved = Reserved(limit, heads=1, head_dim=2)
    refuses(
        lambda: reserved.append(torch.zeros(more, 1, 2), torch.zeros(more, 1, 2)),
        naming=(more, limit),
    )
    expect(len(reserved.append(torch.ones(limit, 1, 2), torch.ones(limit, 1, 2))[0]), limit)
    ### END HIDDEN TESTS

# %% [markdown] id="places"
# ## Exercise 2. Rows in any order
#
# *3 points, 20 minutes, medium*
#
# In the chapter the kept rows lay in the order of the text, and the queries were the last of them. Neither must be so.
# Suppose that each row says at which *position* of the text it stands, and write attention that goes by that alone: a
# query sees the keys whose position is not greater than its own, wherever they lie. With keys at the positions
# `[2, 0, 3, 1]`, a query at position 1 sees the second and the fourth of these rows, and no other.
#
# There are several queries and several heads. As in the chapter there may be fewer heads of K and V than of Q: then the
# first few query heads share the first head of K and V, the next few the second, and so on.


# %% id="e02-places" role="answer"
def attend_by_position(q, q_positions, k, v, kv_positions):
    """q [new, heads, head_dim]; k, v [rows, heads of K and V, head_dim]; the output as q.

    q_positions [new] and kv_positions [rows] are tensors of whole numbers.
    """
    ### BEGIN SOLUTION: scores for all heads, a mask from the two lists of positions, softmax, weighted sum
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
    future = kv_positions[None, :] > q_positions[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -math.inf).softmax(-1), v)
    ### END SOLUTION


# %% id="e02-places-middle" role="check" points=1
with check(
    "one head, keys at positions 0 to 5 in order, queries at 2 and 3",
    why="Queries need not be the last tokens: a step may be computed again while later rows are there already.",
    hint="Compare every key's position with every query's: kv_positions[None, :] and q_positions[:, None].",
):
    q, k, v = (some_rows(rows, 1, 4, seed=rows + 7) for rows in (2, 6, 6))
    v = v.flip(0)
    got = attend_by_position(q, torch.tensor([2, 3]), k, v, torch.arange(6))
    for row, position in ((0, 2), (1, 3)):
        query, keys, values = q[row : row + 1], k.transpose(0, 1), v.transpose(0, 1)
        upper = position + 1
        expect(
            got[row],
            oracle("minikv.cache.attention.reference.attend_one")(
                query, keys[:, :upper], values[:, :upper]
            )[0],
            f"the query at position {position}",
            mistakes={
                "It sees all keys. The mask may not be left out because rows are kept: there are keys "
                "in this query's future.": oracle("minikv.cache.attention.reference.attend_one")(
                    query, keys, values
                )[0],
                "The queries are taken for the last tokens (the chapter's before = len(k) - len(q)); "
                "but they say where they stand.": oracle(
                    "minikv.cache.attention.reference.attend_one"
                )(q, keys, values)[row],
                "The queries are taken for the first tokens: query 0 is not token 0.": oracle(
                    "minikv.cache.attention.reference.attend_one"
                )(query, keys[:, : row + 1], values[:, : row + 1])[0],
                "It cannot see the key at its own position.": oracle(
                    "minikv.cache.attention.reference.attend_one"
                )(query, keys[:, :position], values[:, :position])[0],
                "The scores are not divided by the root of head_dim.": oracle(
                    "minikv.cache.attention.reference.attend_one"
                )(query * 2, keys[:, :upper], values[:, :upper])[0],
            },
        )

# %% id="e02-places-shuffled" role="check" points=2
with check(
    "four query heads, two heads of K and V, rows out of order",
    why="Softmax and sum do not care in which order the rows come. So rows may lie wherever there is room, if only the "
    "mask knows their positions.",
    hint="Heads 0 and 1 read the first head of K and V, heads 2 and 3 the second. The mask is the same for all heads.",
):
    q, k, v = some_rows(3, 4, 4, seed=31), some_rows(6, 2, 4, seed=32), some_rows(6, 2, 4, seed=33)
    lying = torch.tensor([4, 0, 5, 2, 1, 3])  # the position of each row
    in_order = lying.argsort()
    got = attend_by_position(q, torch.tensor([3, 4, 5]), k, v, lying)
    expect(
        got,
        oracle("minikv.cache.attention.reference.attend_one")(
            q, k[in_order].transpose(0, 1), v[in_order].transpose(0, 1)
        ),
        mistakes={
            "The rows are read as if they lay in order: the mask must go by kv_positions.": oracle(
                "minikv.cache.attention.reference.attend_one"
            )(q, k.transpose(0, 1), v.transpose(0, 1)),
            "The wrong heads share: 0 and 1 belong together, not 0 and 2 (h // share, not h % share).": oracle(
                "minikv.cache.attention.reference.attend_one"
            )(q[:, [0, 2, 1, 3]], k[in_order].transpose(0, 1), v[in_order].transpose(0, 1))[
                :, [0, 2, 1, 3]
            ],
            "K is put in order and V is not: they belong together, row by row.": oracle(
                "minikv.cache.attention.reference.attend_one"
            )(q, k[in_order].transpose(0, 1), v.transpose(0, 1)),
        },
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for heads, kv_heads in ((6, 2), (3, 3), (4, 1)):
        rows = draw.randint(4, 12)
        seed = draw.randint(0, 10**6)
        q, k = some_rows(3, heads, 5, seed=seed), some_rows(rows, kv_heads, 5, seed=seed + 1)
        v, lying = some_rows(rows, kv_heads, 5, seed=seed + 2), draw.sample(range(rows), rows)
        asking = draw.sample(range(rows), 3)
        got = attend_by_position(q, torch.tensor(asking), k, v, torch.tensor(lying))
        for row, position in enumerate(asking):
            seen = [at for at in range(rows) if lying[at] <= position]
            expect(
                got[row],
                oracle("minikv.cache.attention.reference.attend_one")(
                    q[row : row + 1], k[seen].transpose(0, 1), v[seen].transpose(0, 1)
                )[0],
            )
    ### END HIDDEN TESTS

# %% [markdown] id="counting"
# ## Exercise 3. What a cached answer costs
#
# *4 points, 20 minutes, medium*
#
# Count in one head of one layer. There are `prompt` tokens and `new` tokens of answer, both at least 1. The model is asked `new`
# times; the last token is written and never read.
#
# - `kept_vectors`: how many vectors lie in the cache when the answer is finished, of all kinds together.
# - `scores_computed`: how many scores are computed in all, those that the mask forbids not counted. Without a cache each
#   round computes all rows; with one, the prompt is taken in by one prefill and then each step has one query.
# - `kept_rows_read`: here the prompt is not taken in at once but in *pieces* of at most `piece` tokens, one step for each (10
#   tokens in pieces of 4: steps of 4, 4 and 2). Every step reads each row of K that *earlier* steps have kept, once,
#   however many queries it has. How many such reads are there in all, of K alone?


# %% id="e02-counting" role="answer"
def kept_vectors(prompt, new):
    """Vectors in the cache of one head at the end."""
    ### BEGIN SOLUTION: which kinds of vectors are kept, and of how many tokens?
    return 2 * (prompt + new - 1)
    ### END SOLUTION


def scores_computed(prompt, new, cached):
    """Scores in all, with a cache (cached=True) or without."""
    ### BEGIN SOLUTION: a triangle for all rows of n tokens has n * (n + 1) / 2 scores
    later = range(prompt + 1, prompt + new)  # how long the text is in each later round
    first = prompt * (prompt + 1) // 2
    return first + (sum(later) if cached else sum(n * (n + 1) // 2 for n in later))
    ### END SOLUTION


def kept_rows_read(prompt, new, piece):
    """Reads of kept rows of K, when the prompt is taken in in pieces."""
    ### BEGIN SOLUTION: how many rows are kept already when each step begins?
    return sum(range(0, prompt, piece)) + sum(range(prompt, prompt + new - 1))
    ### END SOLUTION


# %% id="e02-counting-kept" role="check" points=1
with check(
    "what is kept of a prompt of 10 tokens and an answer of 3",
    why="Whatever is kept takes memory for as long as the conversation lasts. Only what is read again is worth it.",
    hint="Which of a token's vectors do later tokens read? And which tokens have gone through the model?",
):
    expect(
        kept_vectors(10, 3),
        24,
        mistakes={
            "Q seems to be cached too. A query is used once, in the step in which its token is new; nobody reads it again.": 36,
            "Q seems to be cached too; and the last token of the answer is never read, so nothing of it is kept.": 39,
            "The last token of the answer is written and never read: it has no key and no value.": 26,
            "A key AND a value are kept for each token.": lambda got: int(got) in (12, 13),
            "The answer's tokens are kept as well, not only the prompt's.": 20,
        },
    )
    expect(kept_vectors(1, 1), 2, "one token in, one out")
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(3):
        prompt, new = draw.randint(1, 999), draw.randint(1, 999)
        expect(kept_vectors(prompt, new), 2 * prompt + 2 * new - 2)
    ### END HIDDEN TESTS

# %% id="e02-counting-cached" role="check" points=1
with check(
    "scores with a cache, 10 tokens of prompt and 3 of answer",
    why="A cached step has one query, but that query meets every kept key: the step is not free and grows with the text.",
    hint="The prefill is a triangle with 10 rows. The next step has one row: over how many keys? And after it?",
):
    expect(
        scores_computed(10, 3, True),
        78,
        mistakes={
            "Each decode step counts as one score, as if it cost the same whatever the length (O(1)). Its query meets ALL "
            "keys so far, its own among them.": 57,
            "The prefill is a whole square: the mask forbids the half above the diagonal.": lambda got: (
                int(got) in (100, 123)
            ),
            "A token's own key counts as well.": 76,
            "One step too many: the last token is never read.": 91,
            "The prefill is missing: it computes scores as well.": 23,
            "This is the count without a cache.": 199,
        },
    )
    expect(scores_computed(4, 1, True), 10, "an answer of one token: a prefill and no more")
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(3):
        prompt, new = draw.randint(1, 400), draw.randint(1, 400)
        longest = prompt + new - 1
        expect(scores_computed(prompt, new, True), longest * (longest + 1) // 2)
    ### END HIDDEN TESTS

# %% id="e02-counting-plain" role="check" points=1
with check(
    "scores without a cache, 10 tokens of prompt and 3 of answer",
    why="Without a cache every round computes all rows anew. This is what a cache saves in attention alone.",
    hint="Three rounds, over texts of 10, 11 and 12 tokens. Each is a whole triangle.",
):
    expect(
        scores_computed(10, 3, False),
        199,
        mistakes={
            "This is the count with a cache.": 78,
            "You count whole squares: the mask forbids the half above the diagonal.": 365,
            "One round too many: the last token is never read.": 290,
            "Only the last row of each round is counted. Without a cache the rows before it are computed anew, "
            "because their K and V are needed again in the next layer.": 33,
        },
    )
    expect(scores_computed(4, 1, False), 10, "an answer of one token: no difference")
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(3):
        prompt, new = draw.randint(1, 400), draw.randint(1, 400)
        total = 0
        for n in range(prompt, prompt + new):
            total += n * (n + 1) // 2
        expect(scores_computed(prompt, new, False), total)
    ### END HIDDEN TESTS

# %% id="e02-counting-pieces" role="check" points=1
with check(
    "reads of kept rows: 10 tokens of prompt in pieces of 4, and 3 of answer",
    why="Smaller pieces compute no score more or less, but they read what is kept more often: that is their price.",
    hint="Write down for each step how many rows there are when it begins: 0, 4, 8, ... and then one step for each token but the last.",
):
    expect(
        kept_rows_read(10, 3, 4),
        33,
        mistakes={
            "The pieces of the prompt read nothing: but the second reads the rows of the first.": 21,
            "Either a step's own new rows are counted (they are not kept yet when it begins), or there is one step too "
            "many (the last token is never read).": 45,
            "The answer is cut into pieces as well. Its tokens come one at a time: a step for each but the last.": lambda got: (
                int(got) in (12, 24)
            ),
            "These are the scores. A step reads a kept row once, for all its queries, and its own rows are not kept yet.": 78,
            "Each query reads them anew. A step reads a row once, for all its queries.": 53,
            "These are K and V together.": 66,
        },
    )
    expect(kept_rows_read(10, 3, 10), 21, "the prompt in one piece")
    expect(kept_rows_read(3, 1, 1), 3, "a prompt of 3, one token at a time")
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(4):
        prompt, new, piece = draw.randint(1, 300), draw.randint(1, 100), draw.randint(1, 80)
        total, kept = 0, 0
        while kept < prompt:
            total, kept = total + kept, min(prompt, kept + piece)
        for _ in range(new - 1):
            total, kept = total + kept, kept + 1
        expect(kept_rows_read(prompt, new, piece), total)
    ### END HIDDEN TESTS

# %% [markdown] id="bug"
# ## Exercise 4. Find the bug
#
# *4 points, 15 minutes, medium*
#
# A colleague has put a text under way and its cache into one class. She has tested it well, she says: nine tokens, one
# by one, and all nine rows of logits are those of the uncached pass. Now two complaints have come in. Nothing is ever
# raised; the text is just odd.
#
# - "Whenever I send several tokens at once, the *next* answer is odd."
# - "After `reset` it is odd. It is as if somebody had been there before me."
#
# They have different causes. Find and repair both. `attention`, which it calls, is the chapter's, and it is right. (Each can be one line.)


# %% id="e02-bug-attention" role="given"
def attention(q, k, v):
    """q [new, heads, head_dim] of the last tokens; k, v [all, heads of K and V, head_dim]; the output as q."""
    share, before = q.shape[1] // k.shape[1], len(k) - len(q)
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
    future = torch.ones(len(q), len(k), dtype=torch.bool).triu(diagonal=before + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -math.inf).softmax(-1), v)


# %% id="e02-bug" role="answer"
class Conversation:
    """A text under way, and its cache: buffers of ``limit`` rows for each layer."""

    def __init__(self, model, limit):
        shape = model.shape
        self.model, self.length = model, 0
        size = (shape.layers, limit, shape.kv_heads, shape.head_dim)
        self.k = torch.zeros(size, dtype=model.dtype)
        self.v = torch.zeros(size, dtype=model.dtype)

    def read(self, tokens):
        """Take in a list of ids that come after those read so far. Gives their logits, [tokens, vocab]."""
        ### BEGIN SOLUTION
        positions = torch.arange(self.length, self.length + len(tokens))
        rows = self.model(torch.tensor(tokens), positions, self)
        self.length += len(tokens)
        return rows
        ### STUB
        # positions = torch.arange(self.length, self.length + len(tokens))
        # rows = self.model(torch.tensor(tokens), positions, self)
        # self.length = int(positions[-1]) + len(tokens)
        # return rows
        ### END SOLUTION

    def attend(self, layer, q, k, v):
        """The model calls this in each layer."""
        end = self.length + len(k)
        self.k[layer, self.length : end] = k
        self.v[layer, self.length : end] = v
        return attention(q, self.k[layer, :end], self.v[layer, :end])

    def reset(self):
        """Forget the text: the next one begins from nothing."""
        ### BEGIN SOLUTION
        self.length = 0  # what lies in the buffers behind it is never read
        ### STUB
        # self.k.zero_()
        # self.v.zero_()
        ### END SOLUTION


# %% id="e02-bug-spy" role="given"
class Spy:
    """The model, but it writes down which positions it is told in each step."""

    def __init__(self, model):
        self.model, self.shape, self.dtype, self.told = model, model.shape, model.dtype, []

    def __call__(self, token_ids, positions, kv):
        self.told.append([int(position) for position in positions])
        return self.model(token_ids, positions, kv)


# %% id="e02-bug-pieces" role="check" points=2
with check(
    "nine tokens and one more, read in steps of 6, 3 and 1",
    why="A step begins where the last one ended. A place that is left out stays empty in the buffer, and an empty row is "
    "read like any other.",
    hint="Follow self.length by hand: 0 at first, and after 6 tokens at once? Then after 1 token, which was her test.",
):
    ids = model.tokenizer.encode("The capital of France is Paris which has the King")[:10]
    spy = Spy(model)
    conversation = Conversation(spy, limit=64)
    rows = [conversation.read(ids[first:end]) for first, end in ((0, 6), (6, 9), (9, 10))]
    expect(
        spy.told,
        [[0, 1, 2, 3, 4, 5], [6, 7, 8], [9]],
        "the positions that the model is told",
        mistakes={
            "The offset counts the last step's tokens twice: the places 0 to 5 are taken, so the next one is 6.": lambda told: (
                told[1] == [11, 12, 13]
            ),
            "The length is that of the last step alone: what was read before it is forgotten.": lambda told: (
                told[1] == [6, 7, 8] and told[2] == [3]
            ),
            "The second step is right and the third is not: the places before a step are counted twice.": lambda told: (
                told[1] == [6, 7, 8] and told[2][0] > 9
            ),
            "Every step begins at position 0, as if nothing had been read.": lambda told: (
                told[1][0] == 0
            ),
            "The offset is one too small: the last token's place is taken.": lambda told: (
                told[1][0] == 5
            ),
        },
    )
    expect(torch.cat(rows), logits(model, ids), "the logits")
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    ids = [draw.randrange(model.shape.vocab) for _ in range(12)]
    first, second = sorted(draw.sample(range(2, 11), 2))
    conversation = Conversation(model, limit=64)
    rows = [conversation.read(ids[:first]), conversation.read(ids[first:second])]
    rows.append(conversation.read(ids[second:]))
    expect(torch.cat(rows), logits(model, ids))
    ### END HIDDEN TESTS

# %% id="e02-bug-reset" role="check" points=2
with check(
    "another text after reset",
    why="A key of zeros has the score 0, not the weight 0: softmax gives the forgotten rows a share, and the next "
    "conversation is computed among ghosts.",
    hint="What does a Conversation know when it is new, and what does reset leave behind? Compare with __init__, line by line.",
):
    spy = Spy(model)
    conversation = Conversation(spy, limit=64)
    conversation.read(model.tokenizer.encode("HAMLET:\nTo be,"))
    conversation.reset()
    ids = model.tokenizer.encode("The capital of Japan is")
    rows = conversation.read(ids)
    expect(
        spy.told[-1],
        list(range(len(ids))),
        "the positions of the new text",
        mistakes={
            "reset may clear the data, but it keeps the length: the new text is put behind the old one's rows.": lambda told: (
                told[0] > 0
            ),
        },
    )
    expect(rows, logits(model, ids), "the logits")
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    conversation = Conversation(model, limit=16)
    for _ in range(3):
        ids = [draw.randrange(model.shape.vocab) for _ in range(draw.randint(5, 15))]
        expect(conversation.read(ids), logits(model, ids))
        conversation.reset()
    ### END HIDDEN TESTS

# %% [markdown] id="window"
# ## Exercise 5. A window
#
# *6 points, 35 minutes, hard*
#
# Some models look only so far back: a query sees the last `window` tokens, itself among them. `ReadsLess` below is a
# cache for one head of such a model, and its answers are right. It reads few rows. But how many does it *hold*?
# `held_rows` looks: it adds up the memory of all tensors that hang on an object and divides by the size of one row of K
# and one of V. (So a row of K alone is half a row.)
#
# Write `Freeing`: the same answers to `step`, in steps of one token or of many, but after a step it holds at most
# `2 * window` rows, however long the text is. (It may hold more *during* a step.) `window` is at least 1. Keep K and V as
# PyTorch tensors on the object (`self.k`, `self.v`, or lists of tensors), and nowhere else.


# %% id="e02-window-parts" role="given"
def window_head(q, k, v, window):
    """One head. q [new, head_dim] of the last tokens; k, v [rows, head_dim], the last rows of the text.

    All rows that a query may see must be among them; further ones do no harm.
    """
    if len(k) < len(q):
        raise ValueError("fewer rows than queries: were rows let go before attention?")
    keys = torch.arange(len(k))
    queries = keys[len(k) - len(q) :, None]
    allowed = (keys <= queries) & (keys > queries - window)
    scores = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(~allowed, -math.inf)
    return scores.softmax(-1) @ v


class ReadsLess:
    """K and V of one head. Its steps read what the window needs and no more."""

    def __init__(self, window):
        self.window, self.k, self.v = window, None, None
        self.rows_read = 0  # rows of K that the last step read

    def step(self, q, k, v):
        """q, k, v [new, head_dim] of the next tokens. Gives the rows of attention, [new, head_dim]."""
        self.k = k if self.k is None else torch.cat((self.k, k))
        self.v = v if self.v is None else torch.cat((self.v, v))
        self.rows_read = min(len(self.k), self.window - 1 + len(q))
        return window_head(q, self.k[-self.rows_read :], self.v[-self.rows_read :], self.window)


def held_rows(cache, head_dim=8):
    """Rows of K and V that ``cache`` keeps in memory; a tensor that is part of a larger one keeps the whole of it."""
    sizes, seen, pending = {}, set(), [cache]
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            memory = each.untyped_storage()
            sizes[memory.data_ptr()] = memory.nbytes()
        elif isinstance(each, np.ndarray):
            if each.base is None:
                sizes[each.ctypes.data] = each.nbytes
            pending.append(each.base)  # a view keeps what it looks into
        elif isinstance(each, dict):
            pending += each.values()
        elif hasattr(each, "__dict__"):
            pending += vars(each).values()
        elif hasattr(each, "__iter__") and not isinstance(each, str):
            pending += each
    return sum(sizes.values()) / (2 * head_dim * 8)  # float64 takes 8 bytes a number


# %% id="e02-window" role="answer"
class Freeing:
    """K and V of one head that looks back ``window`` tokens. It holds no more than it will need."""

    def __init__(self, window):
        ### BEGIN SOLUTION
        self.window, self.k, self.v = window, None, None
        ### STUB
        # self.window = window
        ### END SOLUTION

    def step(self, q, k, v):
        """q, k, v [new, head_dim] of the next tokens. Gives the rows of attention, [new, head_dim]."""
        ### BEGIN SOLUTION: attention as above; then let go of the rows that no later token will see
        if self.k is not None:
            k, v = torch.cat((self.k, k)), torch.cat((self.v, v))
        out = window_head(q, k, v, self.window)
        self.k, self.v = k[-self.window :].clone(), v[-self.window :].clone()
        return out
        ### END SOLUTION


# %% id="e02-window-alive" role="given"
def rows_alive(head_dim=8):
    """Rows of K and V that all tensors of the notebook take together, wherever they are kept."""
    gc.collect()
    sizes = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.layout == torch.strided:
            memory = each.untyped_storage()
            sizes[memory.data_ptr()] = memory.nbytes()
    return sum(sizes.values()) / (2 * head_dim * 8)


# %% id="e02-window-single" role="check" points=1
with check(
    "300 tokens, one at a time, with a window of 5; then a window of 1",
    why="Reading less does not hold less. Without letting go, a cache with a window grows like any other.",
    hint="After the step, keep the last rows and forget the others. How many will the next token look at, apart from itself?",
):
    q, k, v = some_rows(3, 300, 8, seed=51)
    whole = window_head(q, k, v, 5)
    cache = Freeing(5)
    most, alive = 0, rows_alive()
    for at in range(300):
        row = cache.step(q[at : at + 1].clone(), k[at : at + 1].clone(), v[at : at + 1].clone())
        expect(
            row,
            whole[at : at + 1],
            f"the answer of token {at}",
            mistakes={
                "The window counts the token itself: it sees itself and window - 1 before it. You keep a row too few.": window_head(
                    q[: at + 1], k[: at + 1], v[: at + 1], 4
                )[-1:],
                "It sees a row too many: the window counts the token itself.": window_head(
                    q[: at + 1], k[: at + 1], v[: at + 1], 6
                )[-1:],
                "It sees the whole text: the window is missing.": window_head(
                    q[: at + 1], k[: at + 1], v[: at + 1], 300
                )[-1:],
            },
        )
        most = max(most, held_rows(cache))
    require(
        most <= 10,
        f"it held {most:g} rows, and 10 (2 x window) are allowed",
        mistakes={
            "All rows are held. A window bounds the work of a step, not the storage: rows must be let go.": lambda got: (
                got >= 300
            )
        },
        got=most,
    )
    require(
        most >= 4,
        f"held_rows finds only {most:g} rows: keep K and V as tensors that hang on the object (self.k = ...)",
    )
    require(
        rows_alive() - alive < 150,
        "few rows hang on the object, but the memory in use has grown with the text: are rows kept elsewhere, "
        "in a global name or on the class?",
    )
    cache = Freeing(1)
    for at in range(30):
        row = cache.step(q[at : at + 1].clone(), k[at : at + 1].clone(), v[at : at + 1].clone())
        expect(row, v[at : at + 1], f"with a window of 1, the answer of token {at}: its own V")
        held = held_rows(cache)
        require(
            held <= 2,
            f"with a window of 1, after {at + 1} tokens it holds {held:g} rows, and 2 (2 x window) are allowed",
            mistakes={
                "With a window of 1 nothing need be kept, but x[-0:] is the whole of x, not its empty end.": lambda got: (
                    got == 3
                )
            },
            got=held,
        )

# %% id="e02-window-pieces" role="check" points=2
with check(
    "a prefill of 40 tokens, then steps of 1, 7, 3 and 20, with a window of 6",
    why="A prefill longer than the window needs rows that are not needed afterwards; and the rows that are not needed must "
    "really be given back to the machine.",
    hint="First attend over what is kept plus all new rows, then let go. x[-6:] is a view: it keeps the whole of x alive; .clone() does not.",
):
    q, k, v = some_rows(3, 71, 8, seed=52)
    whole = window_head(q, k, v, 6)
    cache, first, least, alive = Freeing(6), 0, math.inf, rows_alive()
    for size in (40, 1, 7, 3, 20):
        end = first + size
        rows = cache.step(q[first:end].clone(), k[first:end].clone(), v[first:end].clone())
        expect(
            rows,
            whole[first:end],
            f"the answers of the step of {size} after {first}",
            mistakes={
                "You keep a row too few: the next token sees itself and the window - 1 rows before it.": window_head(
                    q[:end], k[:end], v[:end], 5
                )[-size:],
                "The number of answers is not that of the queries: was something cut off before attention?": lambda got, n=size: (
                    len(got) != n
                ),
                "The last tokens are right and the earlier ones are not: rows were let go BEFORE the step's first queries "
                "had read them.": lambda got, right=whole[first:end]: bool(
                    (got[-1] - right[-1]).abs().max() < 1e-9
                    and (got[0] - right[0]).abs().max() > 1e-9
                ),
            },
        )
        held = held_rows(cache)
        require(
            held <= 12,
            f"after the step of {size} it holds {held:g} rows, and 12 (2 x window) are allowed",
            mistakes={
                "It may look like few rows, but a slice is a view: as long as it lives, the memory of the whole tensor does.": lambda cache: (
                    hasattr(cache, "__dict__")
                    and all(
                        len(each) <= 12
                        for each in vars(cache).values()
                        if isinstance(each, torch.Tensor)
                    )
                ),
                "Rows are held that no later token will see. A window bounds the work of a step, not the storage: let them go. (Queries need not be kept at all.)": lambda cache: (
                    True
                ),
            },
            got=cache,
        )
        least, first = min(least, held), end
    require(
        least >= 5,
        f"after one of the steps only {least:g} rows are held: is that enough for the next token, and are they tensors "
        "that hang on the object?",
    )
    require(
        rows_alive() - alive < 60,
        "few rows hang on the object, but the memory in use has grown with the text: are rows kept elsewhere, "
        "in a global name or on the class?",
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    window = draw.randint(1, 9)
    q, k, v = some_rows(3, 120, 8, seed=draw.randint(0, 10**6))
    whole = window_head(q, k, v, window)
    cache, first = Freeing(window), 0
    while first < 120:
        end = min(120, first + draw.choice((1, 1, 2, 5, 30)))
        rows = cache.step(q[first:end].clone(), k[first:end].clone(), v[first:end].clone())
        expect(rows, whole[first:end])
        require(held_rows(cache) <= 2 * window, "more rows are held than 2 x window")
        first = end
    ### END HIDDEN TESTS

# %% [markdown] id="window-measure"
# **Measure it** (1 point, graded by a person). Take a window of 16 and a text of 600 tokens: a prefill of 100, then one
# token at a time. Show for both caches, after 100, 101, 200, 400 and 600 tokens, how many rows of K the last step read and how many
# rows are held: a table or a picture. (If your `Freeing` is not finished, measure `ReadsLess` alone, and say what you expect of
# the other.)

# %% id="e02-window-measure" role="manual" points=1
### BEGIN SOLUTION
parts = some_rows(3, 600, 8, seed=53)
caches, so_far = {"ReadsLess": ReadsLess(16), "Freeing": Freeing(16)}, 0
print("tokens         cache   read   held")
for size in [100] + [1] * 500:
    before, so_far = so_far, so_far + size
    for name, cache in caches.items():
        cache.step(*(part[before:so_far].clone() for part in parts))
        if so_far in (100, 101, 200, 400, 600):
            read = min(so_far, 16 - 1 + size)  # what window_head needs; ReadsLess counts it itself
            assert name == "Freeing" or cache.rows_read == read
            print(f"{so_far:6d}{name:>14s}{read:7d}{held_rows(cache):7.0f}")
### STUB
# parts = some_rows(3, 600, 8, seed=53)  # q, k, v
# # Your measurement
### END SOLUTION

# %% [markdown] id="window-explain"
# **Explain it** (2 points, graded by a person), in a few sentences and with your numbers:
#
# - A product page says: "Thanks to a window of 16 tokens, a long chat takes no more memory than a short one." For which of
#   the two caches is that so, and what exactly does the window alone bound?
# - How many rows must a cache have at hand *during* a step of 20 tokens, and why more than after it?
# - What can this head still say about token 3 after 600 tokens?
#
# *How it is graded.* 1 point for the measurement: both caches, rows read and rows held. 1 point: work and storage are told apart,
# with numbers. 1 point: the number of rows during the step, with a reason, and what becomes of token 3.

# %% [markdown] id="e02-window-explain" role="manual" points=2
# It is so for `Freeing` only. The window bounds the *work*: after the prefill every step reads 16 rows in both caches, at 101 tokens as
# at 600. It does not bound the *storage*: `ReadsLess` holds 600 rows after 600 tokens and would hold 60,000 after 60,000, though all but 16
# are never read again. Only letting go bounds it: `Freeing` holds 16 throughout.
#
# During a step of 20 tokens window - 1 + 20 = 16 - 1 + 20 = 35 rows are needed. The first of the new queries still looks at the 15 tokens before it, and the
# last one at itself and the 15 before it; after the step only the latter matter.
#
# Nothing. Token 3 left the window at token 19, and its key and value are gone for this head, for good. If the cache had kept them, the mask would hide them.
# (A whole model may know something of it at second hand: a token that could see it carries some of it on to the next layer.)
