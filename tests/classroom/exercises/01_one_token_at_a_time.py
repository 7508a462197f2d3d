"""Answers that people give to the exercises of chapter 1: wrong ones with what they should be told, and other right ones."""

from minikv.classroom.rehearse import Right, Wrong

WRONG = [
    Wrong(
        "e01-mask", "e01-mask-later", "offset is missing",
        "def causal_mask(new, earlier):\n    return torch.ones(new, earlier + new, dtype=torch.bool).tril()",
    ),
    Wrong(
        "e01-mask", "e01-mask-later", "may not be skipped",
        "def causal_mask(new, earlier):\n    full = torch.ones(new, earlier + new)\n    return full if earlier else full.tril()",
    ),
    Wrong(
        "e01-mask", "e01-mask-first", "look at themselves",
        "def causal_mask(new, earlier):\n    return torch.arange(earlier + new) < torch.arange(earlier, earlier + new)[:, None]",
    ),
    Wrong(
        "e01-mask", "e01-mask-first", "upside down",
        "def causal_mask(new, earlier):\n    return torch.arange(earlier + new) > torch.arange(earlier, earlier + new)[:, None]",
    ),
    Wrong("e01-again", "e01-again-one", "only the very first token", "def recomputed_tokens(prompt, new):\n    return (new - 1) ** 2"),
    Wrong(
        "e01-again", "e01-again-one", "count only the repetitions",
        "def recomputed_tokens(prompt, new):\n    return sum(prompt + i for i in range(new))",
    ),
    Wrong(
        "e01-again", "e01-again-prompt", "prompt seems to be missing",
        "def recomputed_tokens(prompt, new):\n    return new * (new - 1) // 2",
    ),
    Wrong(
        "e01-stop", "e01-stop-greedy", "stateless",
        """\
def write_until(next_logits, prompt, limit, stop_tokens):
    new, handed = [], prompt
    while len(new) < limit:
        token = int(next_logits(handed)[-1].argmax())
        if token in stop_tokens:
            break
        new.append(token)
        handed = [token]
    return new""",
    ),
    Wrong(
        "e01-stop", "e01-stop-greedy", "prompt is part of your answer",
        """\
def write_until(next_logits, prompt, limit, stop_tokens):
    ids = list(prompt)
    for _ in range(limit):
        ids.append(int(next_logits(ids)[-1].argmax()))
    return ids""",
    ),
    Wrong(
        "e01-stop", "e01-stop-stops", "it is a signal, not text",
        """\
def write_until(next_logits, prompt, limit, stop_tokens):
    new = []
    while len(new) < limit and not (new and new[-1] in stop_tokens):
        new.append(int(next_logits(prompt + new)[-1].argmax()))
    return new""",
    ),
    Wrong(
        "e01-stop", "e01-stop-stops", "stop token in the PROMPT",
        """\
def write_until(next_logits, prompt, limit, stop_tokens):
    ids = list(prompt)
    while len(ids) < len(prompt) + limit and not any(token in stop_tokens for token in ids):
        ids.append(int(next_logits(ids)[-1].argmax()))
    return ids[len(prompt):]""",
    ),
    Wrong(
        "e01-bug", "e01-bug-twice", "masked in place",
        "def weights_of(scores, allowed):\n    return scores.masked_fill_(~allowed, -math.inf).float().softmax(-1)",
    ),
    Wrong(
        "e01-bug", "e01-bug-twice", "shifted in place",
        """\
def weights_of(scores, allowed):
    scores = scores.float()
    scores -= scores.max(-1, keepdim=True).values
    return scores.masked_fill(~allowed, -math.inf).softmax(-1)""",
    ),
    Wrong(
        "e01-padded", "e01-padded-full", "look ahead",
        "def padded_head(q, k, v, lengths):\n    return (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).softmax(-1) @ v",
    ),
    Wrong(
        "e01-padded", "e01-padded-left", "looks at the padding",
        """\
def padded_head(q, k, v, lengths):
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    return (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf).softmax(-1) @ v""",
    ),
    Wrong(
        "e01-padded", "e01-padded-left", "nan",
        """\
def padded_head(q, k, v, lengths):
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    padding = torch.arange(q.shape[1]) < q.shape[1] - torch.tensor(lengths)[:, None]
    forbidden = future | padding[:, None, :]
    return (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).masked_fill(forbidden, -math.inf).softmax(-1) @ v""",
    ),
]  # fmt: skip

RIGHT = [
    Right("e01-mask", "def causal_mask(new, earlier):\n    return torch.ones(new, earlier + new).tril(diagonal=earlier).bool()"),
    Right(
        "e01-mask",
        "def causal_mask(new, earlier):\n    return [[key <= earlier + query for key in range(earlier + new)] for query in range(new)]",
    ),
    Right("e01-again", "def recomputed_tokens(prompt, new):\n    return max(new - 1, 0) * (2 * prompt + new - 2) / 2"),
    Right(
        "e01-stop",
        """\
def write_until(next_logits, prompt, limit, stop_tokens):
    ids = torch.tensor(prompt)
    for _ in range(limit):
        token = next_logits(ids.tolist())[-1].argmax()
        if token.item() in set(stop_tokens):
            break
        ids = torch.cat([ids, token[None]])
    return ids[len(prompt):]""",
    ),
    Right(
        "e01-bug",
        """\
def weights_of(scores, allowed):
    scores = scores.float().clone()
    scores.masked_fill_(~allowed, -math.inf)
    scores -= scores.max(-1, keepdim=True).values
    return scores.exp() / scores.exp().sum(-1, keepdim=True)""",
    ),
    Right(
        "e01-padded",
        """\
def padded_head(q, k, v, lengths):
    out = torch.zeros_like(q)
    for text, length in enumerate(lengths):
        for row in range(q.shape[1] - length, q.shape[1]):
            keys = k[text, q.shape[1] - length : row + 1]
            weights = (keys @ q[text, row] / q.shape[2] ** 0.5).softmax(0)
            out[text, row] = weights @ v[text, q.shape[1] - length : row + 1]
    return out""",
    ),
]
