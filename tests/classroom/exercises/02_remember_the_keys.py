"""Answers that people give to the exercises of chapter 2: wrong ones with what they should be told, and other right ones."""

from minikv.classroom.rehearse import Right, Wrong

RESERVED = """\
class Reserved:
    def __init__(self, limit, heads, head_dim):
        self.limit, self.length = limit, 0
        self.k = torch.zeros(limit, heads, head_dim)
        self.v = torch.zeros(limit, heads, head_dim)

    def append(self, k, v):
"""

COUNTING = """\
def kept_vectors(prompt, new):
    return {kept}

def scores_computed(prompt, new, cached):
    lengths = range(prompt, prompt + new)
    return {with_cache} if cached else {without}

def kept_rows_read(prompt, new, piece):
    return {read}
"""


def counting(
    kept="2 * (prompt + new - 1)",
    with_cache="prompt * (prompt + 1) // 2 + sum(lengths[1:])",
    without="sum(n * (n + 1) // 2 for n in lengths)",
    read="sum(range(0, prompt, piece)) + sum(range(prompt, prompt + new - 1))",
):
    return COUNTING.format(kept=kept, with_cache=with_cache, without=without, read=read)


CONVERSATION = """\
class Conversation:
    def __init__(self, model, limit):
        shape = model.shape
        self.model, self.length = model, 0
        size = (shape.layers, limit, shape.kv_heads, shape.head_dim)
        self.k = torch.zeros(size, dtype=model.dtype)
        self.v = torch.zeros(size, dtype=model.dtype)

    def read(self, tokens):
        positions = torch.arange(self.length, self.length + len(tokens))
        rows = self.model(torch.tensor(tokens), positions, self)
        {after}
        return rows

    def attend(self, layer, q, k, v):
        end = self.length + len(k)
        self.k[layer, self.length : end] = k
        self.v[layer, self.length : end] = v
        return attention(q, self.k[layer, :end], self.v[layer, :end])

    def reset(self):
        {reset}
"""


def conversation(after="self.length += len(tokens)", reset="self.length = 0"):
    return CONVERSATION.format(after=after, reset=reset)


FREEING = """\
class Freeing:
    def __init__(self, window):
        self.window, self.k, self.v = window, torch.zeros(0, 8, dtype=torch.float64), torch.zeros(0, 8, dtype=torch.float64)

    def step(self, q, k, v):
"""

HOARDING = """\
everything = {}

class Freeing:
    def __init__(self, window):
        self.window = window
        everything[id(self)] = torch.zeros(2, 0, 8, dtype=torch.float64)

    def step(self, q, k, v):
        everything[id(self)] = torch.cat((everything[id(self)], torch.stack((k, v))), dim=1)
        k, v = everything[id(self)]
        self.k, self.v = k[-self.window :].clone(), v[-self.window :].clone()
        return window_head(q, k, v, self.window)
"""

WRONG = [
    Wrong(
        "e02-reserved", "e02-reserved-rows", "score of 0 is not a weight of 0",
        RESERVED + """\
        end = self.length + len(k)
        self.k[self.length : end], self.v[self.length : end], self.length = k, v, end
        return self.k, self.v""",
    ),
    Wrong("e02-reserved", "e02-reserved-rows", "overwrite the first", RESERVED + """\
        self.k[: len(k)], self.v[: len(k)] = k, v
        self.length += len(k)
        return self.k[: self.length], self.v[: self.length]"""),
    Wrong("e02-reserved", "e02-reserved-rows", "need all keys", RESERVED + """\
        start, self.length = self.length, self.length + len(k)
        self.k[start : self.length], self.v[start : self.length] = k, v
        return self.k[start : self.length], self.v[start : self.length]"""),
    Wrong(
        "e02-reserved", "e02-reserved-copies", "torch.cat",
        RESERVED + """\
        if self.length + len(k) > self.limit:
            raise ValueError(f"{self.length + len(k)} > {self.limit}")
        self.k, self.v = torch.cat((self.k[: self.length], k)), torch.cat((self.v[: self.length], v))
        self.length += len(k)
        return self.k, self.v""",
    ),
    Wrong(
        "e02-reserved", "e02-reserved-full", "does not name 20 and 16",
        RESERVED + """\
        end = self.length + len(k)
        if end > self.limit:
            raise ValueError("the cache is full")
        self.k[self.length : end], self.v[self.length : end], self.length = k, v, end
        return self.k[:end], self.v[:end]""",
    ),
    Wrong(
        "e02-reserved", "e02-reserved-full", "22",
        RESERVED + """\
        self.length += len(k)
        if self.length > self.limit:
            raise ValueError(f"{self.length} rows, room for {self.limit}")
        self.k[self.length - len(k) : self.length], self.v[self.length - len(k) : self.length] = k, v
        return self.k[: self.length], self.v[: self.length]""",
    ),
    Wrong(
        "e02-reserved", "e02-reserved-full", "end >= limit",
        RESERVED + """\
        end = self.length + len(k)
        if end >= self.limit:
            raise ValueError(f"{end} rows, room for {self.limit}")
        self.k[self.length : end], self.v[self.length : end], self.length = k, v, end
        return self.k[:end], self.v[:end]""",
    ),
    Wrong(
        "e02-places", "e02-places-middle", "taken for the last tokens",
        """\
def attend_by_position(q, q_positions, k, v, kv_positions):
    share, outs = q.shape[1] // k.shape[1], []
    for h in range(q.shape[1]):
        scores = q[:, h] @ k[:, h // share].T / math.sqrt(q.shape[2])
        future = torch.ones_like(scores, dtype=torch.bool).triu(diagonal=len(k) - len(q) + 1)
        outs.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[:, h // share])
    return torch.stack(outs, dim=1)""",
    ),
    Wrong(
        "e02-places", "e02-places-middle", "may not be left out",
        """\
def attend_by_position(q, q_positions, k, v, kv_positions):
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    return torch.einsum("hqk,khd->qhd", (torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])).softmax(-1), v)""",
    ),
    Wrong(
        "e02-places", "e02-places-middle", "query 0 is not token 0",
        """\
def attend_by_position(q, q_positions, k, v, kv_positions):
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)""",
    ),
    Wrong(
        "e02-places", "e02-places-middle", "its own position",
        """\
def attend_by_position(q, q_positions, k, v, kv_positions):
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    may = kv_positions < q_positions[:, None]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, may, enable_gqa=True).transpose(0, 1)""",
    ),
    Wrong(
        "e02-places", "e02-places-shuffled", "h // share",
        """\
def attend_by_position(q, q_positions, k, v, kv_positions):
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat(1, share, 1), v.repeat(1, share, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
    scores = scores.masked_fill(kv_positions > q_positions[:, None], -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)""",
    ),
    Wrong(
        "e02-places", "e02-places-shuffled", "as if they lay in order",
        """\
def attend_by_position(q, q_positions, k, v, kv_positions):
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    may = torch.arange(k.shape[1]) <= q_positions[:, None]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, may, enable_gqa=True).transpose(0, 1)""",
    ),
    Wrong("e02-counting", "e02-counting-kept", "Q seems to be cached too", counting(kept="3 * (prompt + new - 1)")),
    Wrong("e02-counting", "e02-counting-kept", "written and never read", counting(kept="2 * (prompt + new)")),
    Wrong("e02-counting", "e02-counting-kept", "AND a value", counting(kept="prompt + new - 1")),
    Wrong("e02-counting", "e02-counting-cached", "O(1)", counting(with_cache="prompt * (prompt + 1) // 2 + new - 1")),
    Wrong("e02-counting", "e02-counting-cached", "whole square", counting(with_cache="prompt * prompt + sum(lengths[1:])")),
    Wrong("e02-counting", "e02-counting-plain", "because their K and V are needed again", counting(without="sum(lengths)")),
    Wrong("e02-counting", "e02-counting-plain", "squares", counting(without="sum(n * n for n in lengths)")),
    Wrong("e02-counting", "e02-counting-pieces", "reads the rows of the first", counting(read="sum(range(prompt, prompt + new - 1))")),
    Wrong(
        "e02-counting", "e02-counting-pieces", "for all its queries",
        counting(read="sum(n * min(piece, prompt - n) for n in range(0, prompt, piece)) + sum(range(prompt, prompt + new - 1))"),
    ),
    Wrong(
        "e02-counting", "e02-counting-pieces", "own new rows",
        counting(read="sum(min(start + piece, prompt) for start in range(0, prompt, piece)) + sum(range(prompt + 1, prompt + new))"),
    ),
    Wrong(
        "e02-counting", "e02-counting-pieces", "one step too many",
        counting(read="sum(range(0, prompt, piece)) + sum(range(prompt, prompt + new))"),
    ),
    Wrong("e02-counting", "e02-counting-pieces", "cut into pieces as well", counting(read="sum(range(0, prompt + new - 1, piece))")),
    Wrong("e02-counting", "e02-counting-pieces", "cut into pieces as well", counting(read="sum(range(0, prompt + new, piece))")),
    Wrong("e02-counting", "e02-counting-pieces", "These are the scores", counting(read="sum(range(1, prompt + new))")),
    Wrong("e02-bug", "e02-bug-pieces", "is forgotten", conversation(after="self.length = len(tokens)")),
    Wrong(
        "e02-bug", "e02-bug-pieces", "counts the last step's tokens twice",
        conversation(after="self.length = int(positions[-1]) + len(tokens)"),
    ),
    Wrong("e02-bug", "e02-bug-pieces", "the third is not", conversation(after="self.length += int(positions[-1]) + 1")),
    Wrong("e02-bug", "e02-bug-pieces", "one too small", conversation(after="self.length = int(positions[-1])")),
    Wrong("e02-bug", "e02-bug-reset", "keeps the length", conversation(reset="self.k.zero_(), self.v.zero_()")),
    Wrong("e02-bug", "e02-bug-reset", "keeps the length", conversation(reset="self.k, self.v = self.k * 0, self.v * 0")),
    Wrong("e02-window", "e02-window-single", "not the storage", "class Freeing(ReadsLess):\n    pass"),
    Wrong("e02-window", "e02-window-pieces", "not the storage", "class Freeing(ReadsLess):\n    pass"),
    Wrong(
        "e02-window", "e02-window-pieces", "a slice is a view",
        FREEING + """\
        k, v = torch.cat((self.k, k)), torch.cat((self.v, v))
        self.k, self.v = k[-self.window :], v[-self.window :]
        return window_head(q, k, v, self.window)""",
    ),
    Wrong(
        "e02-window", "e02-window-pieces", "rows were let go BEFORE",
        FREEING + """\
        self.k = torch.cat((self.k, k))[-self.window :].clone()
        self.v = torch.cat((self.v, v))[-self.window :].clone()
        out = [window_head(q[i : i + 1], self.k, self.v, self.window) for i in range(len(q))]
        return torch.cat(out)""",
    ),
    Wrong(
        "e02-window", "e02-window-single", "a row too few",
        FREEING + """\
        k, v = torch.cat((self.k, k)), torch.cat((self.v, v))
        self.k, self.v = k[2 - self.window :].clone(), v[2 - self.window :].clone()
        return window_head(q, k, v, self.window)""",
    ),
    Wrong(
        "e02-window", "e02-window-pieces", "a row too few",
        FREEING + """\
        k, v = torch.cat((self.k, k)), torch.cat((self.v, v))
        self.k, self.v = k[2 - self.window :].clone(), v[2 - self.window :].clone()
        return window_head(q, k, v, self.window)""",
    ),
    Wrong(
        "e02-window", "e02-window-pieces", "fewer rows than queries",
        FREEING + """\
        self.k = torch.cat((self.k, k))[-self.window :].clone()
        self.v = torch.cat((self.v, v))[-self.window :].clone()
        return window_head(q, self.k, self.v, self.window)""",
    ),
    Wrong(
        "e02-window", "e02-window-single", "x[-0:] is the whole of x",
        FREEING + """\
        k, v = torch.cat((self.k, k)), torch.cat((self.v, v))
        self.k, self.v = k[-(self.window - 1) :].clone(), v[-(self.window - 1) :].clone()
        return window_head(q, k, v, self.window)""",
    ),
    *(Wrong("e02-window", check, "kept elsewhere", HOARDING) for check in ("e02-window-single", "e02-window-pieces")),
    Wrong(
        "e02-window", "e02-window-single", "not the storage",
        FREEING.replace("self.window,", "self.window, self.all_k, self.all_v,").replace("= window,", "= window, [], [],") + """\
        self.all_k, self.all_v = [*self.all_k, k.numpy().copy()], [*self.all_v, v.numpy().copy()]
        k, v = (torch.from_numpy(np.concatenate(each)) for each in (self.all_k, self.all_v))
        self.k, self.v = k[-self.window :].clone(), v[-self.window :].clone()
        return window_head(q, k, v, self.window)""",
    ),
]  # fmt: skip

RIGHT = [
    Right(
        "e02-reserved",
        """\
class Reserved:
    def __init__(self, limit, heads, head_dim):
        self.rows, self.both = 0, torch.empty(2, heads, limit, head_dim)

    def append(self, k, v):
        first, limit = self.rows, self.both.shape[2]
        if len(k) > limit - first:
            raise ValueError(f"{first + len(k)} rows do not fit into {limit}")
        self.rows += len(k)
        for place, new in enumerate((k, v)):
            self.both[place, :, first : self.rows] = new.transpose(0, 1)
        return tuple(each[:, : self.rows].transpose(0, 1) for each in self.both)""",
    ),
    Right(
        "e02-places",
        """\
def attend_by_position(q, q_positions, k, v, kv_positions):
    order = kv_positions.argsort()
    k, v, kv_positions = k[order], v[order], kv_positions[order]
    share, out = q.shape[1] // k.shape[1], torch.zeros_like(q)
    for row, position in enumerate(q_positions.tolist()):
        seen = int((kv_positions <= position).sum())
        for head in range(q.shape[1]):
            weights = (k[:seen, head // share] @ q[row, head] / q.shape[2] ** 0.5).softmax(0)
            out[row, head] = weights @ v[:seen, head // share]
    return out""",
    ),
    Right(
        "e02-places",
        """\
def attend_by_position(q, q_positions, k, v, kv_positions):
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    may = kv_positions <= q_positions[:, None]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, may, enable_gqa=True).transpose(0, 1)""",
    ),
    Right(
        "e02-counting",
        """\
def kept_vectors(prompt, new):
    return (prompt + new - 1) + (prompt + new - 1)

def scores_computed(prompt, new, cached):
    total, text, kept = 0, prompt, 0
    for _ in range(new):
        for row in range(kept, text):
            total += row + 1
        kept = text if cached else 0
        text += 1
    return total

def kept_rows_read(prompt, new, piece):
    kept, read = 0, 0
    while kept < prompt + new - 1:
        read += kept
        kept += min(piece, prompt - kept) if kept < prompt else 1
    return float(read)""",
    ),
    Right("e02-bug", conversation(after="self.length = int(positions[-1]) + 1", reset="self.__init__(self.model, self.k.shape[1])")),
    Right(
        "e02-window",
        FREEING + """\
        for at in range(len(q)):
            k_at, v_at = torch.cat((self.k, k[at : at + 1])), torch.cat((self.v, v[at : at + 1]))
            q[at] = window_head(q[at : at + 1], k_at, v_at, self.window)[0]
            first = max(0, len(k_at) - (self.window - 1))
            self.k, self.v = k_at[first:].clone(), v_at[first:].clone()
        return q""",
    ),
    Right(
        "e02-window",
        """\
class Freeing:
    def __init__(self, window):
        self.window, self.rows = window, []

    def step(self, q, k, v):
        out = []
        for at in range(len(q)):
            self.rows = [*self.rows, (k[at].clone(), v[at].clone())][-self.window:]
            keys, values = (torch.stack(each) for each in zip(*self.rows))
            out.append((keys @ q[at] / q.shape[1] ** 0.5).softmax(0) @ values)
        return torch.stack(out)""",
    ),
    Right(
        "e02-window",
        """\
class Freeing:
    def __init__(self, window):
        self.window, self.seen = window, 0
        self.k = torch.zeros(window, 8, dtype=torch.float64)
        self.v = torch.zeros(window, 8, dtype=torch.float64)

    def step(self, q, k, v):
        out = torch.empty_like(q)
        for at in range(len(q)):
            place = self.seen % self.window
            self.k[place], self.v[place], self.seen = k[at], v[at], self.seen + 1
            full = min(self.seen, self.window)
            out[at] = (self.k[:full] @ q[at] / math.sqrt(8)).softmax(0) @ self.v[:full]
        return out""",
    ),
]  # fmt: skip
