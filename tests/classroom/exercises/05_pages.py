"""Answers that people give to the exercises of chapter 5: wrong ones with what they should be told, and other right ones."""

from minikv.classroom.rehearse import Right, Wrong

BATCH = """\
def attend_batch(q, k_pool, v_pool, tables, lengths, running):
    rows = torch.tensor(running)
    keys = k_pool[tables[{tables}]].flatten(1, 2)
    values = v_pool[tables[{tables}]].flatten(1, 2)
    there = torch.arange(keys.shape[1]) < lengths[{lengths}][:, None]
    scores = (keys @ q[:, :, None]).squeeze(2) / math.sqrt(q.shape[1])
    return (scores.masked_fill(~there, -math.inf).softmax(1)[:, None] @ values).squeeze(1)"""

WRONG = [
    # 1. what each block holds
    Wrong(
        "e05-filled", "e05-filled-full", "the last block is full, not empty",
        """\
def filled(tokens, block_size):
    blocks = math.ceil(tokens / block_size)
    return [block_size] * (blocks - 1) + [tokens % block_size]""",
    ),
    Wrong(
        "e05-filled", "e05-filled-full", "owns a block with nothing in it",
        "def filled(tokens, block_size):\n    full, rest = divmod(tokens, block_size)\n    return [block_size] * full + [rest]",
    ),
    Wrong(
        "e05-filled", "e05-filled-full", "needs at least one token",
        """\
def filled(tokens, block_size):
    blocks = -(-tokens // block_size)
    return [block_size] * (blocks - 1) + [(tokens - 1) % block_size + 1]""",
    ),
    Wrong(
        "e05-filled", "e05-filled-part", "only just been begun is missing",
        "def filled(tokens, block_size):\n    return [block_size] * (tokens // block_size)",
    ),
    Wrong(
        "e05-filled", "e05-filled-part", "not only for the last",
        "def filled(tokens, block_size):\n    return (tokens - 1) % block_size + 1",
    ),
    Wrong(
        "e05-filled", "e05-filled-part", "EMPTY slots",
        "def filled(tokens, block_size):\n    full, rest = divmod(tokens, block_size)\n    return [0] * full + [block_size - rest]",
    ),
    # 2. room
    Wrong(
        "e05-room", "e05-room-one", "You took a block when the fourth token came",
        """\
def make_room(new, tables, tokens, free, block_size):
    for name, more in new.items():
        tokens[name] = tokens.get(name, 0) + more
        table = tables.setdefault(name, [])
        while len(table) < tokens[name] // block_size + 1:
            table.append(free.pop())""",
    ),
    Wrong(
        "e05-room", "e05-room-one", "The fifth token has no block",
        """\
def make_room(new, tables, tokens, free, block_size):
    for name, more in new.items():
        tokens[name] = tokens.get(name, 0) + more
        table = tables.setdefault(name, [])
        if tokens[name] % block_size == 0 and tokens[name] > len(table) * block_size:
            table.append(free.pop())""",
    ),
    Wrong(
        "e05-room", "e05-room-one", "still free",
        """\
def make_room(new, tables, tokens, free, block_size):
    for name, more in new.items():
        tokens[name] = tokens.get(name, 0) + more
        table = tables.setdefault(name, [])
        while len(table) * block_size < tokens[name]:
            table.append(free[0])
            free = free[1:]""",
    ),
    Wrong(
        "e05-room", "e05-room-many", "round the 6 new tokens up by themselves",
        """\
def make_room(new, tables, tokens, free, block_size):
    for name, more in new.items():
        if tokens.get(name, 0) + more > len(tables.get(name, [])) * block_size:
            for _ in range(math.ceil(more / block_size)):
                tables.setdefault(name, []).append(free.pop())
        tokens[name] = tokens.get(name, 0) + more""",
    ),
    Wrong(
        "e05-room", "e05-room-many", "take as many as are needed",
        """\
def make_room(new, tables, tokens, free, block_size):
    for name, more in new.items():
        tokens[name] = tokens.get(name, 0) + more
        if tokens[name] > len(tables.setdefault(name, [])) * block_size:
            tables[name].append(free.pop())""",
    ),
    Wrong(
        "e05-room", "e05-room-many", "only whether the last block is full",
        """\
def make_room(new, tables, tokens, free, block_size):
    for name, more in new.items():
        table = tables.setdefault(name, [])
        if tokens.get(name, 0) == len(table) * block_size:
            table.append(free.pop())
        tokens[name] = tokens.get(name, 0) + more""",
    ),
    Wrong(
        "e05-room", "e05-room-many", "must change the list that you are given",
        """\
def make_room(new, tables, tokens, free, block_size):
    for name, more in new.items():
        tokens[name] = tokens.get(name, 0) + more
        table = tables.setdefault(name, [])
        while len(table) * block_size < tokens[name]:
            table.append(free[0])
            free = free[1:]""",
    ),
    Wrong(  # how many are lacking
        "e05-room", "e05-room-refused", "not how many are lacking",
        """\
def make_room(new, tables, tokens, free, block_size):
    after = {name: tokens.get(name, 0) + more for name, more in new.items()}
    needed = {name: math.ceil(n / block_size) - len(tables.get(name, [])) for name, n in after.items()}
    if sum(needed.values()) > len(free):
        raise MemoryError(f"{sum(needed.values()) - len(free)} too few, {len(free)} free")
    for name, blocks in needed.items():
        tables.setdefault(name, []).extend(free.pop() for _ in range(blocks))
    tokens.update(after)""",
    ),
    Wrong(
        "e05-room", "e05-room-refused", "Somebody got blocks before",
        """\
def make_room(new, tables, tokens, free, block_size):
    for name, more in new.items():
        needed = math.ceil((tokens.get(name, 0) + more) / block_size) - len(tables.get(name, []))
        if needed > len(free):
            raise MemoryError(f"{needed} needed, {len(free)} free")
        tables.setdefault(name, []).extend(free.pop() for _ in range(needed))
        tokens[name] = tokens.get(name, 0) + more""",
    ),
    Wrong(
        "e05-room", "e05-room-refused", "newcomer with no block",
        """\
def make_room(new, tables, tokens, free, block_size):
    needed = 0
    for name, more in new.items():
        needed += math.ceil((tokens.get(name, 0) + more) / block_size) - len(tables.setdefault(name, []))
    if needed > len(free):
        raise MemoryError(f"{needed} needed, {len(free)} free")
    for name, more in new.items():
        tokens[name] = tokens.get(name, 0) + more
        while len(tables[name]) * block_size < tokens[name]:
            tables[name].append(free.pop())""",
    ),
    # 3. merge
    Wrong(
        "e05-merge", "e05-merge-two", "plain mean",
        "def merge(parts):\n    return sum(out for out, _ in parts) / len(parts), torch.stack([s for _, s in parts]).logsumexp(0)",
    ),
    Wrong(
        "e05-merge", "e05-merge-two", "You weigh by the logarithms",
        "def merge(parts):\n    total = sum(s for _, s in parts)\n    return sum(o * s[:, None] for o, s in parts) / total[:, None], total",
    ),
    Wrong(
        "e05-merge", "e05-merge-two", "not divided",
        "def merge(parts):\n    return sum(o * s.exp()[:, None] for o, s in parts), torch.stack([s for _, s in parts]).logsumexp(0)",
    ),
    Wrong(
        "e05-merge", "e05-merge-large", "an exponential was too large",
        """\
def merge(parts):
    total = sum(s.exp() for _, s in parts)
    return sum(o * s.exp()[:, None] for o, s in parts) / total[:, None], total.log()""",
    ),
    Wrong(
        "e05-merge", "e05-merge-many", "only the largest of them",
        """\
def merge(parts):
    largest = torch.stack([s for _, s in parts]).amax(0)
    weights = [(s - largest).exp() for _, s in parts]
    return sum(w[:, None] * o for w, (o, _) in zip(weights, parts)) / sum(weights)[:, None], largest""",
    ),
    Wrong(
        "e05-merge", "e05-merge-many", "no tokens and log_sum -inf",
        """\
def merge(parts):
    out, total = torch.zeros_like(parts[0][0]), torch.zeros_like(parts[0][1])
    largest = torch.full_like(total, -math.inf)
    for o, s in parts:
        new = torch.maximum(largest, s)
        shrink, weight = (largest - new).exp(), (s - new).exp()
        out, total, largest = out * shrink[:, None] + o * weight[:, None], total * shrink + weight, new
    return out / total[:, None], largest + total.log()""",
    ),
    Wrong(
        "e05-merge", "e05-merge-two", "merge gives one tensor",
        """\
def merge(parts):
    log_sums = torch.stack([s for _, s in parts])
    return (log_sums.softmax(0)[:, :, None] * torch.stack([o for o, _ in parts])).sum(0)""",
    ),
    Wrong(
        "e05-merge", "e05-merge-two", "add up to more than 1",
        """\
def merge(parts):
    log_sums = torch.stack([s for _, s in parts])
    weights = (log_sums - log_sums.amax(0)).exp()
    return (weights[:, :, None] * torch.stack([o for o, _ in parts])).sum(0), log_sums.logsumexp(0)""",
    ),
    # 4. find the bug
    Wrong(
        "e05-bug", "e05-bug-left", "While A was there, the same query of B gave the right answer",
        BATCH.format(tables=": len(rows)", lengths=": len(rows)"),
    ),
    Wrong("e05-bug", "e05-bug-left", "they are not B's", BATCH.format(tables=": len(rows)", lengths="rows")),
    Wrong("e05-bug", "e05-bug-left", "Every sequence looks up sequence 0's table", BATCH.format(tables="[0] * len(rows)", lengths="rows")),
    Wrong("e05-bug", "e05-bug-left", "B reads its own blocks now", BATCH.format(tables="rows", lengths=": len(rows)")),
    Wrong("e05-bug", "e05-bug-order", "come out otherwise than alone", BATCH.format(tables="sorted(running)", lengths="sorted(running)")),
    Wrong("e05-bug", "e05-bug-order", "they are not B's", BATCH.format(tables="sorted(running)", lengths="rows")),
    Wrong("e05-bug", "e05-bug-order", "not the right number", BATCH.format(tables="rows", lengths="sorted(running)")),
    # 5. which block size
    Wrong(
        "e05-measure", "e05-measure-empty", "each sequence's own share",
        """\
def measure(lengths, block_size):
    blocks = [math.ceil(n / block_size) for n in lengths]
    return sum(1 - n / (b * block_size) for n, b in zip(lengths, blocks)) / len(lengths), sum(blocks) / len(lengths)""",
    ),
    Wrong(
        "e05-measure", "e05-measure-empty", "You divide by the tokens",
        """\
def measure(lengths, block_size):
    blocks = sum(math.ceil(n / block_size) for n in lengths)
    return blocks * block_size / sum(lengths) - 1, blocks / len(lengths)""",
    ),
    Wrong(
        "e05-measure", "e05-measure-empty", "one block too many",
        """\
def measure(lengths, block_size):
    blocks = sum(n // block_size + 1 for n in lengths)
    return 1 - sum(lengths) / (blocks * block_size), blocks / len(lengths)""",
    ),
    Wrong(
        "e05-measure", "e05-measure-empty", "not per cent",
        """\
def measure(lengths, block_size):
    blocks = sum(math.ceil(n / block_size) for n in lengths)
    return round(100 - 100 * sum(lengths) / (blocks * block_size), 1), blocks / len(lengths)""",
    ),
    Wrong(
        "e05-measure", "e05-measure-table", "one block too many",
        """\
def measure(lengths, block_size):
    blocks = sum(n // block_size + 1 for n in lengths)
    return 1 - sum(lengths) / (blocks * block_size), blocks / len(lengths)""",
    ),
    Wrong(
        "e05-measure", "e05-measure-table", "the mean is wanted",
        """\
def measure(lengths, block_size):
    blocks = sum(math.ceil(n / block_size) for n in lengths)
    return 1 - sum(lengths) / (blocks * block_size), blocks""",
    ),
    Wrong(
        "e05-measure", "e05-measure-table", "round up for each",
        """\
def measure(lengths, block_size):
    slots = sum(math.ceil(n / block_size) for n in lengths) * block_size
    return 1 - sum(lengths) / slots, sum(lengths) / block_size / len(lengths)""",
    ),
]  # fmt: skip

RIGHT = [
    Right(
        "e05-filled",
        "def filled(tokens, block_size):\n    return [min(block_size, tokens - start) for start in range(0, tokens, block_size)]",
    ),
    Right(
        "e05-filled",
        """\
def filled(tokens, block_size):
    blocks = []
    for _ in range(tokens):
        if not blocks or blocks[-1] == block_size:
            blocks.append(0)
        blocks[-1] += 1
    return blocks""",
    ),
    Right(  # tries on copies, takes the lowest block first
        "e05-room",
        """\
def make_room(new, tables, tokens, free, block_size):
    trial, left, short = {name: list(table) for name, table in tables.items()}, sorted(free), 0
    for name, more in new.items():
        table = trial.setdefault(name, [])
        while len(table) * block_size < tokens.get(name, 0) + more:
            short += not left
            table.append(left.pop(0) if left else None)
    if short:
        raise MemoryError(f"{len(free)} free, {len(free) + short} wanted")
    tables.update(trial)
    free[:] = left
    for name in new:
        tokens[name] = tokens.get(name, 0) + new[name]""",
    ),
    Right(  # one after the other, undivided sums under a running maximum
        "e05-merge",
        """\
def merge(parts):
    heads, head_dim = parts[0][0].shape
    out, total, largest = torch.zeros(heads, head_dim), torch.zeros(heads), torch.full((heads,), -math.inf)
    for part, log_sum in parts:
        for head in range(heads):
            if log_sum[head] == -math.inf:
                continue
            new = max(largest[head], log_sum[head])
            shrink, weight = math.exp(largest[head] - new), math.exp(log_sum[head] - new)
            out[head] = out[head] * shrink + part[head] * weight
            total[head] = total[head] * shrink + weight
            largest[head] = new
    return out / total[:, None], largest + total.log()""",
    ),
    Right(  # one sequence at a time, only the blocks that it needs
        "e05-bug",
        """\
def attend_batch(q, k_pool, v_pool, tables, lengths, running):
    outs = []
    for query, row in zip(q, running):
        length = int(lengths[row])
        table = tables[row, : -(-length // k_pool.shape[1])]
        keys, values = k_pool[table].flatten(0, 1)[:length], v_pool[table].flatten(0, 1)[:length]
        outs.append((keys @ query / len(query) ** 0.5).softmax(0) @ values)
    return torch.stack(outs)""",
    ),
    Right(
        "e05-measure",
        """\
def measure(lengths, block_size):
    entries = [len(range(0, length, block_size)) for length in lengths]
    empty = [-length % block_size for length in lengths]
    return sum(empty) / (block_size * sum(entries)), torch.tensor(entries, dtype=torch.float64).mean()""",
    ),
]
