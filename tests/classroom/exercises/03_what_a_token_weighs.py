"""Answers that people give to the exercises of chapter 3: wrong ones with what they should be told, and other right ones."""

from minikv.classroom.rehearse import Right, Wrong

CONFIG = """\
def kept_numbers(config):
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    if "kv_lora_rank" in config:
        return {mla}
    kv_heads = {kv_heads}
    head_dim = {head_dim}
    return {numbers}

def kept_bytes(numbers, bits, group=None):
    scales = {scales}
    return {size}
"""


def config(
    mla='layers * (config["kv_lora_rank"] + config["qk_rope_head_dim"])',
    kv_heads='config.get("num_key_value_heads", heads)',
    head_dim='config.get("head_dim", config["hidden_size"] // heads)',
    numbers="2 * layers * kv_heads * head_dim",
    scales="math.ceil(numbers / group) if group else 0",
    size="math.ceil(numbers * bits / 8) + 2 * scales",
):
    return CONFIG.format(mla=mla, kv_heads=kv_heads, head_dim=head_dim, numbers=numbers, scales=scales, size=size)


TEAMS = """\
def for_each_team(memory, weights, spare, a_token, tokens, shared, teams):
    room = (memory - weights - spare) // a_token
    return {}"""

BUG = "def planned_bytes(shape, tokens, requests, bytes_a_number=2):\n    return requests * tokens * bytes_a_number * {}"

FLOPS = """\
def pairs_seen(kept, new, window=None):
    return sum({one} for place in range(kept, kept + new))

def prefill_flops(shape, kept, new, window=None):
    matrices = {matrices}
    return 2 * matrices + {pair} * pairs_seen(kept, new, window)
"""


def flops(
    one="min(place + 1, window or place + 1)",
    matrices="new * shape.layers * numbers_in_matrices(shape) + shape.hidden * shape.vocab",
    pair="4 * shape.layers * shape.heads * shape.head_dim",
):
    return FLOPS.format(one=one, matrices=matrices, pair=pair)


RIDGE = """\
def step_seconds(step_bytes, step_flops, bytes_per_s, flops_per_s):
    moving, computing = step_bytes / bytes_per_s, step_flops / flops_per_s
    return {seconds}

def requests_needed(weight_bytes, weight_flops, a_token, pair_flops, context, shared, ridge):
    own = context - shared
    gain = {each_flops} - ridge * {each_bytes}
    needed = {needed}
    return {answer}
"""


def ridge(
    seconds='max((moving, "memory"), (computing, "compute"))',
    each_flops="(weight_flops + context * pair_flops)",
    each_bytes="own * a_token",
    needed="math.ceil(ridge * (weight_bytes + shared * a_token) / gain) if gain else 0",
    answer="needed if gain > 0 else None",
):
    return RIDGE.format(seconds=seconds, each_flops=each_flops, each_bytes=each_bytes, needed=needed, answer=answer)


WRONG = [
    Wrong("e03-config", "e03-config-gqa", "All heads are counted", config(kv_heads="heads")),
    Wrong("e03-config", "e03-config-gqa", "not hidden / heads in every model", config(head_dim='config["hidden_size"] // heads')),
    Wrong("e03-config", "e03-config-gqa", "not hidden / heads in every model", config(numbers='2 * layers * config["hidden_size"]')),
    Wrong("e03-config", "e03-config-gqa", "A key AND a value", config(numbers="layers * kv_heads * head_dim")),
    Wrong("e03-config", "e03-config-gqa", "Queries are not kept", config(numbers="3 * layers * kv_heads * head_dim")),
    Wrong("e03-config", "e03-config-missing", "not ONE KV head", config(kv_heads='config.get("num_key_value_heads", 1)')),
    Wrong(
        "e03-config", "e03-config-missing", "not by the KV heads",
        config(head_dim='config.get("head_dim", config["hidden_size"] // kv_heads)'),
    ),
    Wrong(
        "e03-config", "e03-config-mla", "serves K and V",
        config(mla='2 * layers * (config["kv_lora_rank"] + config["qk_rope_head_dim"])'),
    ),
    Wrong("e03-config", "e03-config-mla", "carries the position", config(mla='layers * config["kv_lora_rank"]')),
    Wrong("e03-config", "e03-config-mla", "heads do not count", config(mla="2 * layers * heads * 128")),
    Wrong("e03-config", "e03-config-scales", "scales are missing", config(scales="0")),
    Wrong("e03-config", "e03-config-scales", "each GROUP", config(scales="numbers if group else 0")),
    Wrong("e03-config", "e03-config-scales", "last 4 numbers", config(scales="numbers // group if group else 0")),
    Wrong("e03-config", "e03-config-scales", "cannot be kept", config(size="numbers * bits // 8 + 2 * scales")),
    Wrong(
        "e03-teams", "e03-teams-one", "weights are missing",
        TEAMS.format("(memory // a_token - teams * shared) // (teams * (tokens - shared))"),
    ),
    Wrong("e03-teams", "e03-teams-one", "Rounded up", TEAMS.format("math.ceil((room - teams * shared) / (teams * (tokens - shared)))")),
    Wrong("e03-teams", "e03-teams-four", "paid for by every conversation", TEAMS.format("room // (teams * tokens)")),
    Wrong("e03-teams", "e03-teams-four", "ALL teams", TEAMS.format("(room - shared) // (teams * (tokens - shared))")),
    Wrong("e03-teams", "e03-teams-four", "all teams have together", TEAMS.format("(room - teams * shared) // (tokens - shared)")),
    Wrong("e03-teams", "e03-teams-none", "Fewer than none", TEAMS.format("(room - teams * shared) // (teams * (tokens - shared))")),
    Wrong("e03-bug", "e03-bug-mha", "half of what is needed", BUG.format("shape.layers * shape.kv_heads * shape.head_dim")),
    Wrong("e03-bug", "e03-bug-gqa", "width is right now", BUG.format("shape.layers * shape.kv_heads * shape.head_dim")),
    Wrong("e03-bug", "e03-bug-gqa", "width is still", BUG.format("2 * shape.layers * shape.hidden")),
    Wrong("e03-bug", "e03-bug-gqa", "width is still", BUG.format("shape.layers * shape.hidden")),
    Wrong("e03-bug", "e03-bug-gqa", "not hidden / heads", BUG.format("2 * shape.layers * shape.kv_heads * (shape.hidden // shape.heads)")),
    Wrong("e03-flops", "e03-flops-pairs", "whole rectangle", flops(one="min(kept + new, window or kept + new)")),
    Wrong("e03-flops", "e03-flops-pairs", "kept tokens are not seen", flops(one="min(place - kept + 1, window or place + 1)")),
    Wrong("e03-flops", "e03-flops-pairs", "sees itself as well", flops(one="min(place, window or place)")),
    Wrong("e03-flops", "e03-flops-window", "not looked at", flops(one="place + 1")),
    Wrong("e03-flops", "e03-flops-window", "1, 2, 3, 3", flops(one="(window or place + 1)")),
    Wrong("e03-flops", "e03-flops-all", "saves bytes, not operations", flops(pair="4 * shape.layers * shape.kv_heads * shape.head_dim")),
    Wrong("e03-flops", "e03-flops-all", "a share of a value", flops(pair="2 * shape.layers * shape.heads * shape.head_dim")),
    Wrong(
        "e03-flops", "e03-flops-all", "only the last one's are wanted",
        flops(matrices="new * (shape.layers * numbers_in_matrices(shape) + shape.hidden * shape.vocab)"),
    ),
    Wrong(
        "e03-flops", "e03-flops-all", "what the cache saves",
        flops(matrices="(kept + new) * shape.layers * numbers_in_matrices(shape) + shape.hidden * shape.vocab"),
    ),
    Wrong("e03-ridge", "e03-ridge-seconds", "both go on at the same time", ridge(seconds='(moving + computing, "memory")')),
    Wrong("e03-ridge", "e03-ridge-seconds", "words are swapped", ridge(seconds='max((moving, "compute"), (computing, "memory"))')),
    Wrong("e03-ridge", "e03-ridge-weights", "anew for each request", ridge(each_bytes="(weight_bytes + own * a_token)")),
    Wrong("e03-ridge", "e03-ridge-weights", "round up", ridge(needed="ridge * (weight_bytes + shared * a_token) // gain if gain else 0")),
    Wrong(
        "e03-ridge", "e03-ridge-context", "each has its own",
        ridge(each_bytes="0", needed="math.ceil(ridge * (weight_bytes + context * a_token) / gain)"),
    ),
    Wrong("e03-ridge", "e03-ridge-context", "negative number of requests", ridge(answer="needed")),
    Wrong("e03-ridge", "e03-ridge-context", "more requests bring more K and V", ridge(answer="abs(needed)")),
    Wrong("e03-ridge", "e03-ridge-shared", "read anew", ridge(each_bytes="context * a_token")),
    Wrong("e03-ridge", "e03-ridge-shared", "not read at all", ridge(needed="math.ceil(ridge * weight_bytes / gain) if gain else 0")),
    Wrong("e03-ridge", "e03-ridge-shared", "multiplies with the shared keys", ridge(each_flops="(weight_flops + own * pair_flops)")),
]  # fmt: skip

RIGHT = [
    Right(
        "e03-config",
        """\
def kept_numbers(config):
    if config.get("kv_lora_rank"):
        a_layer = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        heads = config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] / heads
        a_layer = (config.get("num_key_value_heads") or heads) * (width + width)
    return sum(a_layer for _ in range(config["num_hidden_layers"]))

def kept_bytes(numbers, bits, group=None):
    total_bits = numbers * bits
    size = total_bits // 8 + (total_bits % 8 > 0)
    while group and numbers > 0:
        size, numbers = size + 2, numbers - group
    return size""",
    ),
    Right(
        "e03-teams",
        """\
def for_each_team(memory, weights, spare, a_token, tokens, shared, teams):
    left = memory - weights - spare - teams * shared * a_token
    one_each = teams * (tokens - shared) * a_token
    return int(left // one_each) if left >= one_each else 0""",
    ),
    Right(
        "e03-bug",
        """\
def planned_bytes(shape, tokens, requests, bytes_a_number=2):
    k = v = shape.kv_heads * shape.head_dim * bytes_a_number
    return sum((k + v) * tokens * requests for _ in range(shape.layers))""",
    ),
    Right(
        "e03-flops",
        """\
def pairs_seen(kept, new, window=None):
    def triangle(n):  # pairs of the first n tokens of a text
        full = max(0, n - window) if window else 0
        return full * (window or 0) + (n - full) * (n - full + 1) // 2
    return triangle(kept + new) - triangle(kept)

def prefill_flops(shape, kept, new, window=None):
    total = 2 * shape.hidden * shape.vocab
    for _ in range(shape.layers):
        total += new * 2 * numbers_in_matrices(shape)
        for _ in range(shape.heads):
            total += (2 + 2) * shape.head_dim * pairs_seen(kept, new, window)
    return total""",
    ),
    Right(
        "e03-ridge",
        """\
def step_seconds(step_bytes, step_flops, bytes_per_s, flops_per_s):
    if step_flops * bytes_per_s > step_bytes * flops_per_s:
        return [step_flops / flops_per_s, "compute"]
    return [step_bytes / bytes_per_s, "memory"]

def requests_needed(weight_bytes, weight_flops, a_token, pair_flops, context, shared, ridge):
    def enough(n):
        moved = weight_bytes + shared * a_token + n * (context - shared) * a_token
        return n * (weight_flops + context * pair_flops) >= ridge * moved
    low, high = 0, 1
    while not enough(high):
        low, high = high, 2 * high
        if high > 10**12:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high""",
    ),
]  # fmt: skip
