# %% [markdown] id="title"
# # Exercises 3. What a token weighs
#
# They go with [chapter 3](../chapters/03_what_a_token_weighs.ipynb) and ask for things that it does not show. Write your
# answers where `NotImplementedError` or `...` stands. The cell below an answer checks it: run it as often as you like. A
# check that fails says what is wrong, why it matters and what to try. The exercises do not need one another, so take
# them in any order.
#
# You may use whatever the first cell imports and defines, and anything from Python, NumPy and PyTorch. The rest of minikv
# is closed here: what it does is the exercise. All numbers of bytes and FLOPs are exact, so work with whole numbers.
#
# **Together** 19 points, about 95 minutes.

# %% id="e03-setup" role="given"
import math
from typing import NamedTuple

from minikv.classroom.checks import check, expect, hidden_random, lock_minikv, oracle


class Shape(NamedTuple):
    """The sizes of a model."""

    layers: int
    hidden: int
    heads: int  # of queries
    kv_heads: int
    head_dim: int
    vocab: int = 32_000
    ffn: int = 8192


lock_minikv()

# %% [markdown] id="config"
# ## Exercise 1. Weigh any config.json
#
# *4 points, 15 minutes, easy*
#
# Complete `kept_numbers`: how many numbers one token leaves in the cache, from a `config.json` that has been read into a dict.
# Not every file has all lines. Without `num_key_value_heads` every head keeps its own K and V; without `head_dim` the
# heads cut `hidden_size` into equal parts. A file with `kv_lora_rank` describes MLA: a token leaves in each layer one
# vector of `kv_lora_rank` numbers and a small key of `qk_rope_head_dim` numbers.
#
# Then complete `kept_bytes`: the bytes of so many numbers of `bits` bits each. With `group`, every `group` numbers (and a
# smaller rest, if there is one) share a scale of 2 bytes. A part of a byte at the end counts as a byte. For example, 64 numbers of 4
# bits in groups of 32 take 32 bytes and two scales: 36.


# %% id="e03-config" role="answer"
def kept_numbers(config):
    """Numbers that one token leaves in the cache, over all layers."""
    ### BEGIN SOLUTION
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    if "kv_lora_rank" in config:
        return layers * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    return 2 * layers * kv_heads * head_dim
    ### STUB
    # layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    # if "kv_lora_rank" in config:
    #     return ...
    # kv_heads = ...
    # head_dim = ...
    # return ...
    ### END SOLUTION


def kept_bytes(numbers, bits, group=None):
    """Bytes that ``numbers`` numbers take, with their scales if they have any."""
    ### BEGIN SOLUTION
    scales = math.ceil(numbers / group) if group else 0
    return math.ceil(numbers * bits / 8) + 2 * scales
    ### STUB
    # scales = ...  # how many
    # return ...
    ### END SOLUTION


# %% id="e03-config-gqa" role="check" points=1
with check(
    "a model of 26 layers with 4 heads of 256 numbers, which share one KV head, and a hidden size of 1,152",
    why="Who plans with the wrong one of these sizes buys several times too much memory, or runs out of it.",
    hint="2 x layers x KV heads x head_dim. The file has a line for each; nothing needs to be divided.",
):
    expect(
        kept_numbers(
            {
                "num_hidden_layers": 26,
                "hidden_size": 1152,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "head_dim": 256,
            }
        ),
        13_312,
        mistakes={
            "All heads are counted. Only the KV heads are kept: the query heads share them.": 53_248,
            "head_dim is not hidden / heads in every model: the file says what it is.": lambda got: (
                int(got) in (14_976, 59_904)
            ),
            "A key AND a value: a factor of 2 is missing.": 6_656,
            "A factor of 3? Queries are not kept: nobody reads them again.": 19_968,
        },
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(4):
        layers, kv, share, width = (draw.randint(2, 99) for _ in range(4))
        config = {
            "num_hidden_layers": layers,
            "num_key_value_heads": kv,
            "num_attention_heads": kv * share,
        }
        config |= {"hidden_size": kv * share * (width + 8), "head_dim": width}
        expect(kept_numbers(config), 2 * layers * kv * width)
    ### END HIDDEN TESTS

# %% id="e03-config-missing" role="check" points=1
with check(
    "files that lack a line or two",
    why="Older files say nothing of KV heads, and many nothing of head_dim: then the plain rule of chapter 1 holds.",
    hint='config.get("name", what to take instead) gives the line if there is one.',
):
    expect(
        kept_numbers({"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12}),
        18_432,
        "12 layers, 12 heads, hidden size 768, no more lines",
        mistakes={
            "Without the line there is not ONE KV head, but one for each head.": 1_536,
            "A key AND a value: a factor of 2 is missing.": 9_216,
        },
    )
    expect(
        kept_numbers(
            {
                "num_hidden_layers": 32,
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
            }
        ),
        65_536,
        "32 layers, 32 heads, 8 KV heads, hidden size 4,096, no head_dim",
        mistakes={
            "The hidden state is cut by the heads, not by the KV heads: 4096 / 32.": lambda got: (
                got == 2 * 32 * 4096
            ),
            "A key AND a value: a factor of 2 is missing.": 32_768,
        },
    )
    expect(
        kept_numbers(
            {
                "num_hidden_layers": 10,
                "hidden_size": 512,
                "num_attention_heads": 4,
                "head_dim": 64,
            }
        ),
        5_120,
        "10 layers, 4 heads of 64, hidden size 512, no line on KV heads",
    )

# %% id="e03-config-mla" role="check" points=1
with check(
    "a model with MLA: 27 layers, a summary of 512 numbers and a key of 64",
    why="MLA is so light because one vector serves all heads, and serves K as well as V.",
    hint="Per layer: kv_lora_rank + qk_rope_head_dim. Which of the factors of the other formula is not needed here?",
):
    expect(
        kept_numbers(
            {
                "num_hidden_layers": 27,
                "hidden_size": 2048,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
            }
        ),
        15_552,
        mistakes={
            "No factor of 2 here: the one vector serves K and V.": lambda got: (
                int(got) in (31_104, 27_648)
            ),
            "The small key that carries the position is missing.": 13_824,
            "The heads do not count: all of them read the same vector.": lambda got: (
                int(got) in (248_832, 497_664, 2 * 27 * 16 * 128)
            ),
        },
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    config = {
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_hidden_layers": draw.randint(2, 99),
    }
    config |= {"kv_lora_rank": draw.randint(100, 999), "qk_rope_head_dim": draw.randint(10, 99)}
    wanted = config["num_hidden_layers"] * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    expect(kept_numbers(config), wanted)
    ### END HIDDEN TESTS

# %% id="e03-config-scales" role="check" points=1
with check(
    "numbers of a few bits, and their scales",
    why="4 bits are not half a byte when a scale comes with them: in groups of 32 it is an eighth more.",
    hint="Bits to bytes: divide by 8, round up. The number of scales is rounded up as well.",
):
    expect(kept_bytes(1000, 16), 2000, "1,000 numbers of 16 bits without scales")
    expect(
        kept_bytes(64, 4, 32),
        36,
        "64 numbers of 4 bits in groups of 32",
        mistakes={
            "The scales are missing.": 32,
            "A scale has 2 bytes, not 1.": 34,
            "There is one scale for each GROUP, not for each number.": lambda got: int(got) > 90,
        },
    )
    expect(
        kept_bytes(100, 4, 32),
        58,
        "100 numbers of 4 bits in groups of 32",
        mistakes={"The last 4 numbers need a scale, too.": 56},
    )
    expect(kept_bytes(3, 4), 2, "3 numbers of 4 bits", mistakes={"Half a byte cannot be kept.": 1})
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(5):
        numbers, bits, group = (
            draw.randint(1, 9999),
            draw.randint(2, 16),
            draw.choice((16, 64, 128)),
        )
        expect(
            kept_bytes(numbers, bits, group),
            (numbers * bits + 7) // 8 + 2 * ((numbers + group - 1) // group),
        )
    ### END HIDDEN TESTS

# %% [markdown] id="teams"
# ## Exercise 2. A server for several teams
#
# *4 points, 20 minutes, medium*
#
# A GPU has `memory` bytes. The weights take `weights` of them, and the server keeps `spare` for its own use. The rest is for K and V, at
# `a_token` bytes a token.
#
# Several teams use the server. Each team has a text of its own, with `shared` tokens, with which all its conversations
# begin. The K and V of this text are kept once *for each team*. A conversation has `tokens` tokens at its longest, the
# shared ones included. Every team is promised the same number of conversations at the same time. How many can it be? When
# not even one for each fits, the answer is 0.
#
# For example, with room for 1,000 tokens, two teams, 100 shared tokens and 150 in all: the teams' texts take 200 of the
# 1,000 tokens, and each conversation takes 50 more. 16 fit, so 8 for each team.


# %% id="e03-teams" role="answer"
def for_each_team(memory, weights, spare, a_token, tokens, shared, teams):
    """Conversations that each team can have at the same time; shared < tokens."""
    ### BEGIN SOLUTION: room in tokens, then what the teams' texts leave of it, then a division
    room = (memory - weights - spare) // a_token
    return max(0, (room - teams * shared) // (teams * (tokens - shared)))
    ### END SOLUTION


# %% id="e03-teams-one" role="check" points=1
with check(
    "one team that shares nothing: 24 GB, weights of 16 GB, 131,072 bytes a token, 4,096 tokens",
    why="Weights are there before the first conversation, and half a conversation does not fit.",
    hint="What the weights leave, divided by the bytes of one conversation, rounded down.",
):
    expect(
        for_each_team(24 * 10**9, 16 * 10**9, 0, 131_072, 4096, 0, 1),
        14,
        mistakes={
            "The weights are missing: they take their part first.": 44,
            "Rounded up: the last one does not fit any more.": 15,
            "GB are 10^9 bytes here; nothing has to be converted.": lambda got: 15 < got < 44,
        },
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(3):
        weights, a_token, tokens = (
            draw.randint(1, 9**9),
            draw.randint(9, 9**6),
            draw.randint(2, 9999),
        )
        memory = weights + draw.randint(0, 10**11)
        expect(
            for_each_team(memory, weights, 0, a_token, tokens, 0, 1),
            (memory - weights) // a_token // tokens,
        )
    ### END HIDDEN TESTS

# %% id="e03-teams-four" role="check" points=2
with check(
    "four teams: 40 GB, weights of 16 GB, 2 GB spare, 131,072 bytes a token, 1,500 tokens of which 1,000 are shared",
    why="Sharing is what makes many conversations fit; but each text must be there once, for every team that has its own.",
    hint="Together the teams' texts take 4 x 1,000 tokens. What does a conversation take besides?",
):
    expect(
        for_each_team(40 * 10**9, 16 * 10**9, 2 * 10**9, 131_072, 1500, 1000, 4),
        81,
        mistakes={
            "The shared text is paid for by every conversation. It is kept once for each team.": 27,
            "The shared text is kept once for ALL teams, or not at all. But each team has another, and keeps it once.": 83,
            "That is what all teams have together.": lambda got: 320 <= got <= 330,
            "The spare memory is used.": 89,
            "The weights are missing.": 142,
        },
    )
    expect(for_each_team(1000, 0, 0, 1, 150, 100, 2), 8, "the example of the text")
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(4):
        shared, teams, own = draw.randint(1, 500), draw.randint(2, 9), draw.randint(1, 500)
        room = draw.randint(10_000, 99_999)
        wanted = (room - teams * shared) // teams // own
        expect(
            for_each_team(7 * room + 11 + 5, 5, 11, 7, shared + own, shared, teams), max(0, wanted)
        )
    ### END HIDDEN TESTS

# %% id="e03-teams-none" role="check" points=1
with check(
    "servers that are almost too small",
    why="A plan that says -3 conversations is no plan; and a text that nobody can go on with helps nobody.",
    hint="Two teams, 100 shared tokens, 150 in all: 300 tokens are needed for one conversation each. 0 is the least.",
):
    expect(for_each_team(300, 0, 0, 1, 150, 100, 2), 1, "room for just one each")
    expect(for_each_team(299, 0, 0, 1, 150, 100, 2), 0, "a token less")
    expect(
        for_each_team(100, 0, 0, 1, 150, 100, 2),
        0,
        "not even room for the texts",
        mistakes={"Fewer than none cannot fit.": lambda got: got < 0},
    )
    expect(
        for_each_team(10**9, 10**10, 0, 131_072, 4096, 0, 1),
        0,
        "weights that do not fit",
        mistakes={"Fewer than none cannot fit.": lambda got: got < 0},
    )

# %% [markdown] id="bug"
# ## Exercise 3. Find the bug
#
# *3 points, 15 minutes, medium*
#
# A colleague plans the memory for K and V. He has compared his function with a real cache, for the model that he uses, and it
# agreed to the byte:
#
#     Shape(layers=24, hidden=2048, heads=16, kv_heads=8, head_dim=128)
#
# For other models the plan is wrong, for some too large and for some too small. There are two mistakes in it, and
# for his model they cancel. Repair the function, so that it is right for all.


# %% id="e03-bug" role="answer"
def planned_bytes(shape, tokens, requests, bytes_a_number=2):
    """Bytes of K and V of ``requests`` requests of ``tokens`` tokens each, none of them shared."""
    ### BEGIN SOLUTION
    width = shape.kv_heads * shape.head_dim  # numbers in the keys of one token and layer
    a_token = 2 * shape.layers * width * bytes_a_number  # K and V
    return requests * tokens * a_token
    ### STUB
    # width = shape.hidden  # numbers that a layer keeps for a token
    # a_token = shape.layers * width * bytes_a_number
    # return requests * tokens * a_token
    ### END SOLUTION


# %% id="e03-bug-mha" role="check" points=1
with check(
    "a model in which every head has its own K and V: 32 layers, 32 heads of 128, hidden size 4,096",
    why="Half the memory that is needed is no plan: the server stops when half of its users have come.",
    hint="Here heads x head_dim is the hidden size, so the width is right. What else does a token leave in each layer?",
):
    expect(
        planned_bytes(Shape(32, 4096, 32, 32, 128), tokens=1, requests=1),
        524_288,
        "bytes for one token",
        mistakes={
            "It has half of what is needed: K and V are kept, not one of them.": 262_144,
            "It has twice what is needed.": 1_048_576,
            "Q is not kept: 2 kinds of vectors, not 3.": 786_432,
        },
    )
    expect(
        planned_bytes(Shape(32, 4096, 32, 32, 128), tokens=100, requests=3, bytes_a_number=1),
        78_643_200,
        "3 requests of 100 tokens, a byte a number",
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    layers, heads, head_dim = draw.randint(2, 9), draw.randint(2, 9), 2 * draw.randint(2, 9)
    expect(
        planned_bytes(Shape(layers, heads * head_dim, heads, heads, head_dim), 7, 3, 4),
        2 * layers * heads * head_dim * 7 * 3 * 4,
    )
    ### END HIDDEN TESTS

# %% id="e03-bug-gqa" role="check" points=2
with check(
    "models with fewer KV heads than heads",
    why="The hidden state is what a layer hands on, and nobody keeps it. What is kept has a width of its own.",
    hint="How many vectors of K does a layer make for a token, and how many numbers has each? Two fields of the shape say so.",
):
    for model, shape, wanted in (
        ("32 layers, hidden 4096, 8 KV heads of 128", Shape(32, 4096, 32, 8, 128), 131_072),
        ("36 layers, hidden 2560, 8 KV heads of 128", Shape(36, 2560, 32, 8, 128), 147_456),
        ("26 layers, hidden 1152, 1 KV head of 256", Shape(26, 1152, 4, 1, 256), 26_624),
        ("his own model", Shape(24, 2048, 16, 8, 128), 98_304),
    ):
        expect(
            planned_bytes(shape, tokens=1, requests=1),
            wanted,
            f"{model}: bytes for one token",
            mistakes={
                "The width is still that of the hidden state. KV heads x head_dim is what is kept.": lambda got, shape=shape: (
                    got in (2 * shape.layers * shape.hidden, 4 * shape.layers * shape.hidden)
                ),
                "All heads are counted. Only the KV heads are kept: the query heads share them.": 4
                * shape.layers
                * shape.heads
                * shape.head_dim,
                "head_dim is not hidden / heads in every model.": 4
                * shape.layers
                * shape.kv_heads
                * (shape.hidden // shape.heads),
                "The width is right now. But K and V are kept, not one of them.": wanted // 2,
            },
        )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(3):
        kv_heads, share, head_dim = draw.randint(1, 4), draw.randint(2, 4), 2 * draw.randint(2, 20)
        sizes = {
            "layers": draw.randint(2, 9),
            "hidden": 8 * draw.randint(2, 30),
            "head_dim": head_dim,
        }
        sizes |= {"heads": kv_heads * share, "kv_heads": kv_heads, "vocab": 100, "ffn": 64}
        real = oracle(
            "minikv.cache.paged.Paged"
        )(  # the tensors of a cache for one token, in float32
            oracle("minikv.shape.model_shape.ModelShape")(**sizes), num_blocks=1, block_size=1
        ).block_bytes
        expect(planned_bytes(Shape(**sizes), 1, 1, 4), real)
        expect(planned_bytes(Shape(**sizes), 50, 20, 4), 1000 * real)
    ### END HIDDEN TESTS

# %% [markdown] id="flops"
# ## Exercise 4. What a kept prefix saves
#
# *4 points, 20 minutes, medium*
#
# Of a text, `kept` tokens have their K and V in the cache, and `new` tokens after them are taken in by one step. Count what
# is needed, to the last operation:
#
# - `pairs_seen`: how many pairs of a query and a key that it sees. With `window`, a query sees only the last `window` tokens, itself
#   among them. `kept=3, new=2`: the queries see 4 and 5 keys, so 9 pairs; with a window of 3 it is 6.
# - `prefill_flops`: the FLOPs of the whole step. As in the chapter: 2 for each new token and each number in the matrices of
#   every layer; 4 x head_dim for each pair, query head and
#   layer; and 2 for each number in the output head (a matrix of `hidden` x `vocab`), for *one* row, since only the last
#   token's logits are wanted. `numbers_in_matrices(shape)`, which you may use, counts those of one layer.


# %% id="e03-flops-given" role="given"
def numbers_in_matrices(shape):
    """Numbers in the matrices of ONE layer: of q, of k and v, behind attention, and the three of the feed-forward network."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return shape.hidden * (q + 2 * kv + q) + 3 * shape.hidden * shape.ffn


# %% id="e03-flops" role="answer"
def pairs_seen(kept, new, window=None):
    """Pairs of a new token's query and a key that it sees, in one head of one layer."""
    ### BEGIN SOLUTION: a formula, or a loop over the new tokens
    seen = range(kept + 1, kept + new + 1)
    return sum(seen) if window is None else sum(min(each, window) for each in seen)
    ### END SOLUTION


def prefill_flops(shape, kept, new, window=None):
    """Multiplications and additions of a step that takes in ``new`` tokens after ``kept`` ones."""
    ### BEGIN SOLUTION: the new tokens through the matrices, one row through the output head, and all pairs
    matrices = new * shape.layers * numbers_in_matrices(shape) + shape.hidden * shape.vocab
    pairs = pairs_seen(kept, new, window)
    return 2 * matrices + 4 * shape.layers * shape.heads * shape.head_dim * pairs
    ### END SOLUTION


# %% id="e03-flops-pairs" role="check" points=1
with check(
    "pairs without a window",
    why="The new tokens are few, but each of them looks at all that is kept: attention does not forget the prefix.",
    hint="The first new token sees `kept` keys and itself, each further one a key more.",
):
    expect(
        pairs_seen(3, 2),
        9,
        "2 new tokens after 3",
        mistakes={
            "This is the whole rectangle: the first new token may not see the second.": 10,
            "The kept tokens are not seen: only the triangle of the new ones is counted.": 3,
            "The pairs of the kept tokens are counted again: they are not asked a second time.": 15,
            "A token sees itself as well.": 7,
        },
    )
    expect(pairs_seen(0, 4), 10, "4 tokens, none before")
    expect(
        pairs_seen(0, 4) + pairs_seen(4, 3) + pairs_seen(7, 1),
        pairs_seen(0, 8),
        "the same 8 tokens in three steps and in one",
    )
    expect(pairs_seen(0, 8), 36, "8 tokens, none before")
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(4):
        kept, new = draw.randint(0, 5000), draw.randint(1, 500)
        expect(pairs_seen(kept, new), kept * new + new * (new + 1) // 2)
    ### END HIDDEN TESTS

# %% id="e03-flops-window" role="check" points=1
with check(
    "pairs with a window",
    why="With a window the work of a new token stops growing. At the beginning of a text it has not begun to.",
    hint="At place 0 a query sees one key, at place 1 two. At which place does it see `window` keys for the first time?",
):
    expect(
        pairs_seen(3, 2, 3),
        6,
        "2 new tokens after 3, window 3",
        mistakes={
            "The window is not looked at.": 9,
            "The window counts the token itself: `window` keys, not one more.": 8,
            "The window counts the token itself: `window` keys, not one fewer.": 4,
        },
    )
    expect(
        pairs_seen(0, 4, 3),
        9,
        "4 tokens, none before, window 3",
        mistakes={"The first tokens have fewer keys than the window: 1, 2, 3, 3.": 12},
    )
    expect(pairs_seen(1, 2, 100), 5, "a window that is larger than the text")
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(4):
        kept, new, window = draw.randint(0, 60), draw.randint(1, 60), draw.randint(1, 60)
        total = 0
        for place in range(kept, kept + new):
            total += len(range(max(0, place - window + 1), place + 1))
        expect(pairs_seen(kept, new, window), total)
    ### END HIDDEN TESTS

# %% id="e03-flops-all" role="check" points=2
with check(
    "2 new tokens after 3, in a model with 3 layers, 4 heads of 4, one KV head, hidden size 8, vocab 10, ffn 16",
    why="With such a count one knows before buying what a step costs, and what a kept prefix saves.",
    hint="Look at the parts: 8,448 for the matrices of all layers, 160 for the output head, 1,728 for attention. Which one differs?",
):
    small = Shape(layers=3, hidden=8, heads=4, kv_heads=1, head_dim=4, vocab=10, ffn=16)
    expect(
        prefill_flops(small, 3, 2),
        10_336,
        mistakes={
            "Attention is counted with the KV heads. Sharing K and V saves bytes, not operations: every QUERY head multiplies.": 9_040,
            "Attention has half of what it needs: a score AND a share of a value for each pair.": 9_472,
            "Attention is counted in one layer only.": 9_184,
            "Logits are counted for all new tokens, but only the last one's are wanted.": 10_496,
            "The kept tokens go through the matrices again. That is what the cache saves.": 23_008,
            "Attention is missing.": 8_608,
            "The output head is missing.": 10_176,
            "The part of the matrices has half of what it needs: a multiplication AND an addition for each number.": 6_032,
        },
    )
    expect(prefill_flops(small, 3, 2, 3), 9_760, "the same with a window of 3")
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(3):
        sizes = {"layers": draw.randint(2, 9), "hidden": 8 * draw.randint(2, 30), "head_dim": 16}
        sizes |= {"heads": 8, "kv_heads": draw.choice((1, 2, 4, 8)), "vocab": 99, "ffn": 64}
        kept, new = draw.randint(0, 999), draw.randint(1, 99)
        shape = oracle("minikv.shape.model_shape.ModelShape")(**sizes)
        cost = oracle("minikv.shape.roofline.step_cost")(shape, [(new, kept + new)], rows=1)
        expect(prefill_flops(Shape(**sizes), kept, new), cost.flops)
        saved = sum(range(kept + 1, kept + new + 1)) - new
        expect(
            prefill_flops(Shape(**sizes), kept, new, window=1),
            cost.flops - 4 * sizes["layers"] * 8 * 16 * saved,
        )
    ### END HIDDEN TESTS

# %% [markdown] id="ridge"
# ## Exercise 5. Compute-bound, or never
#
# *4 points, 25 minutes, hard*
#
# First `step_seconds`: the least time that a step takes by the roofline, and which roof decides: `(seconds, "memory")` or
# `(seconds, "compute")`. When both take equally long, either word is right.
#
# Then `requests_needed`. A decode step serves n requests, one new token each. Every request has a context of `context` tokens. The first
# `shared` of them are the same for all requests, and suppose that the step reads their K and V **once for all**. The other
# tokens are each request's own. (The new tokens are counted in `context`.) The step
#
# - moves `weight_bytes` for the weights and `a_token` bytes for the K and V of each token that it reads;
# - computes `weight_flops` for each new token, and `pair_flops` for each pair of a new token and a token of its context.
#
# From which n on does it have at least `ridge` FLOPs for each byte? Give the smallest, or `None` if no n is enough. All are whole
# numbers. (The chapter's table had nothing shared. Its "never" is not the last word.)


# %% id="e03-ridge" role="answer"
def step_seconds(step_bytes, step_flops, bytes_per_s, flops_per_s):
    """(least seconds of the step, "memory" or "compute")."""
    ### BEGIN SOLUTION: two times, and the longer one decides
    moving, computing = step_bytes / bytes_per_s, step_flops / flops_per_s
    return (moving, "memory") if moving > computing else (computing, "compute")
    ### END SOLUTION


def requests_needed(weight_bytes, weight_flops, a_token, pair_flops, context, shared, ridge):
    """The smallest number of requests with which a decode step is compute-bound; None if there is none."""
    ### BEGIN SOLUTION: what does each further request bring in FLOPs, and in bytes? What is there only once?
    once = weight_bytes + shared * a_token
    each_bytes = (context - shared) * a_token
    each_flops = weight_flops + context * pair_flops
    gain = each_flops - ridge * each_bytes  # FLOPs of a request beyond what its own bytes need
    return None if gain <= 0 else math.ceil(ridge * once / gain)
    ### END SOLUTION


# %% id="e03-ridge-seconds" role="check" points=1
with check(
    "the time of a step, and what decides it",
    why="Who knows which roof decides knows what to buy, and what would be wasted.",
    hint="Moving and computing go on at the same time, so the longer of the two counts.",
):
    expect(
        step_seconds(6000, 400, 1000, 200),
        [6.0, "memory"],
        "6,000 bytes at 1,000 a second, 400 FLOPs at 200 a second",
        mistakes={
            "The two times are added, but both go on at the same time.": lambda got: got[0] == 8,
            "The shorter time cannot be enough: both must be finished.": lambda got: got[0] == 2,
            "The words are swapped: it waits for bytes, so memory decides.": [6.0, "compute"],
            "Rates are in the unit 1 a second: divide by them.": lambda got: got[0] > 1000,
        },
    )
    expect(step_seconds(1000, 900, 1000, 200), [4.5, "compute"], "more to compute, less to move")
    expect(step_seconds(9000, 9000, 500, 2000), [18.0, "memory"], "a machine that computes fast")

# %% id="e03-ridge-weights" role="check" points=1
with check(
    "requests with no context to speak of, at 295 FLOPs a byte",
    why="Weights are read once for all requests. That is why many requests together cost hardly more than one.",
    hint="FLOPs grow with n, bytes do not: n x weight_flops / weight_bytes >= ridge.",
):
    expect(
        requests_needed(16 * 10**9, 16 * 10**9, 131_072, 524_288, 0, 0, 295),
        295,
        "context taken as 0, weights in 2 bytes, so 2 FLOPs for 2 bytes",
        mistakes={
            "Did you read the weights anew for each request?": None,
            "One too many: at least `ridge` is enough.": 296,
        },
    )
    expect(
        requests_needed(8 * 10**9, 16 * 10**9, 131_072, 524_288, 0, 0, 295),
        148,
        "context taken as 0, weights in 1 byte",
        mistakes={"With 147 it is not yet reached: round up.": 147},
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(3):
        weight_bytes, weight_flops = draw.randint(10**6, 10**8), draw.randint(10**6, 10**8)
        ridge = draw.randint(2, 400)
        wanted = -(-ridge * weight_bytes // weight_flops)
        expect(requests_needed(weight_bytes, weight_flops, 5, 7, 0, 0, ridge), wanted)
    ### END HIDDEN TESTS

# %% id="e03-ridge-context" role="check" points=1
with check(
    "contexts of 256 and of 8,192 tokens, nothing shared",
    why="K and V are each request's own. Each further request brings its bytes along, and with long contexts they never get "
    "enough FLOPs.",
    hint="Compare what ONE further request brings: weight_flops + context x pair_flops against ridge x its bytes.",
):
    expect(
        requests_needed(16 * 10**9, 16 * 10**9, 131_072, 524_288, 256, 0, 295),
        757,
        "256 tokens each",
        mistakes={
            "The K and V of one context are read for all requests together. But each has its own.": lambda got: (
                290 <= got <= 300
            ),
            "The FLOPs of attention are missing.": 774,
        },
    )
    expect(
        requests_needed(16 * 10**9, 16 * 10**9, 131_072, 524_288, 8192, 0, 295),
        None,
        "8,192 tokens each",
        mistakes={
            "A negative number of requests: what does it mean when each request brings more bytes than its FLOPs can make up for?": lambda got: (
                got < 0
            ),
            "So many will not do either: more requests bring more K and V.": lambda got: got > 0,
        },
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for context in (1, 3, 10, 30, 100, 300):
        a_token, pair_flops, ridge = draw.randint(1, 9), draw.randint(1, 20), draw.randint(2, 9)
        enough = next(
            (n for n in range(1, 15_000)
             if n * (2000 + context * pair_flops) >= ridge * (1000 + n * context * a_token)),
            None,
        )  # fmt: skip
        expect(requests_needed(1000, 2000, a_token, pair_flops, context, 0, ridge), enough)
    ### END HIDDEN TESTS

# %% id="e03-ridge-shared" role="check" points=1
with check(
    "8,192 tokens each, of which 8,000 are the same for all",
    why="What is read once for all weighs like a weight. A shared prefix makes a step lighter by nearly all its K and V.",
    hint="Shared tokens: bytes once, FLOPs for every request, since every new token still looks at all of its context.",
):
    expect(
        requests_needed(16 * 10**9, 16 * 10**9, 131_072, 524_288, 8192, 8000, 295),
        391,
        mistakes={
            "No number at all? Only 192 tokens are read anew for each request.": None,
            "The shared K and V are not read at all. Once they must be.": 367,
            "Each request's query still multiplies with the shared keys: their FLOPs count n times.": lambda got: (
                500 <= got <= 600
            ),
        },
    )
    expect(
        requests_needed(1000, 2000, 1, 10, 100, 100, 2),
        1,
        "everything shared, and one request is enough",
        mistakes={"With no request there is no step.": 0},
    )
    ### BEGIN HIDDEN TESTS
    draw = hidden_random()
    for _ in range(5):
        context = draw.randint(2, 90)
        shared, ridge = draw.randint(1, context), draw.randint(2, 9)
        each = 4000 + 9 * context
        wanted = next(
            (n for n in range(1, 15_000)
             if n * each >= ridge * (1000 + 5 * shared + 5 * n * (context - shared))),
            None,
        )  # fmt: skip
        expect(requests_needed(1000, 4000, 5, 9, context, shared, ridge), wanted)
    ### END HIDDEN TESTS
