"""The exactness matrix: however a prompt is cut into pieces, whoever runs beside it, the logits are those of one uncached pass.

What is covered, each with every row's logits compared:

    caches        NoCache (a ragged batch against one sequence alone), Contiguous, Paged with the kernels "reference" and "cpu",
                  Paged with steps padded to a multiple of 8 tokens (block sizes up to 4)
    block sizes   1, 3, 4, 16
    prompts       1 to 2 B + 1 tokens
    splits        B <= 4: every composition of every length. B = 16: for every length the whole, every single cut, chunks of
                  1, B - 1, B and B + 1; and 200 random compositions
    batches       all splits of a block size are sequences of one ragged batch: they start in different steps, advance together in
                  shuffled order, and end at different times
    GQA groups    1 and 2 with two KV heads, 4 with a single one
    dtypes        float64 within 1e-10 of the uncached float64 pass, float32 within 1e-4 of it

The pool is filled with nan beforehand and the blocks of a table lie all over it, so that a slot read before it was written, or
somebody else's, shows. Behind the matrix stand the rows of the list of public KV-cache bugs (CASES) that it generalises.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Hashable, Iterator, Sequence

import pytest
import torch

import minikv
from minikv.cache.blocks import BlockTable, blocks_for
from minikv.cache.contiguous import Contiguous
from minikv.cache.no_cache import NoCache
from minikv.cache.paged import Paged
from minikv.cache.step import Piece
from minikv.model.sampling import Draw, Sampling, choose
from minikv.model.weights import Model, random_weights

VOCAB = 61
GROUPS = {"group1": (2, 2), "group2": (4, 2), "group4": (4, 1)}  # heads, KV heads
CACHES = ("contiguous", "paged-reference", "paged-cpu")
PADDED = ("paged-reference-padded", "paged-cpu-padded")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


@functools.cache
def tiny(group: str = "group2", dtype: torch.dtype = torch.float64) -> Model:
    """A random model of two layers; its norms are random too, and it has biases or normalised q and k by turns."""
    heads, kv_heads = GROUPS[group]
    shape = minikv.ModelShape(
        layers=2, hidden=24, heads=heads, kv_heads=kv_heads, head_dim=8, vocab=VOCAB, ffn=40, max_context=64,
        qk_norm=group == "group2", qkv_bias=group == "group4",
    )  # fmt: skip
    weights = random_weights(shape, seed=heads)
    generator = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            weight += 0.3 * torch.randn(weight.shape, generator=generator)
    weights["model.embed_tokens.weight"] *= 20  # so that logits are of size 1 and more
    return Model(shape, weights, dtype)


class Store:
    """A cache of any kind, driven by sequence names: pieces in, logits of all their rows out."""

    def __init__(self, kind: str, model: Model, most_tokens: int = 64, block_size: int = 4, num_blocks: int = 64) -> None:
        self.model = model
        self.lengths: dict[Hashable, int] = {}
        self.tables: dict[Hashable, BlockTable] = {}
        name, _, rest = kind.partition("-")
        if name == "contiguous":
            self.kv = Contiguous(model.shape, most_tokens, model.dtype)
            return
        attention, _, padded = rest.partition("-")
        bucket = (lambda tokens: -(-tokens // 8) * 8) if padded else (lambda tokens: tokens)
        self.kv = Paged(model.shape, num_blocks, block_size, model.dtype, attention=attention, bucket=bucket)
        self.kv.pool.fill_(torch.nan)
        self.free = random.Random(2).sample(range(num_blocks), num_blocks)

    def piece(self, sequence: Hashable, tokens: Sequence[int]) -> Piece:
        """The next piece of a sequence, every row wanted, with blocks for it."""
        start = self.lengths.get(sequence, 0)
        table = None
        if isinstance(self.kv, Paged):
            table = self.tables.setdefault(sequence, BlockTable(self.kv.block_size))
            while len(table) < blocks_for(start + len(tokens), self.kv.block_size):
                table.blocks.append(self.free.pop())
        return Piece(sequence, tokens, start, table, "all")

    def run(self, *share: tuple[Hashable, Sequence[int]]) -> list[torch.Tensor]:
        """One step; for each (sequence, tokens) its logits [tokens, vocab]."""
        pieces = [self.piece(sequence, tokens) for sequence, tokens in share]
        step = self.kv.begin(pieces)
        with torch.inference_mode():
            rows = self.model(step.token_ids, step.positions, self.kv, step.logit_rows)
        for piece in pieces:
            self.lengths[piece.sequence] = piece.end
        return list(rows.split([len(piece.tokens) for piece in pieces]))

    def drop(self, sequence: Hashable) -> None:
        """The sequence ends; its blocks are the next to be given away, with its old data in them."""
        del self.lengths[sequence]
        if isinstance(self.kv, Paged):
            self.free += self.tables.pop(sequence).blocks
        else:
            self.kv.drop(sequence)


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(VOCAB), k=length)


def oracle(tokens: Sequence[int], model: Model | None = None) -> torch.Tensor:
    return minikv.logits(model or tiny(), tokens)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = torch.float64) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=TOLERANCE[dtype])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """float64 numbers as whole ones: memory that nobody has written yet may hold nan, which is not even equal to itself."""
    return tensor.view(torch.int64)


# ---------------------------------------------------------------- the matrix


def compositions(length: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut ``length`` tokens into chunks: there are 2 ** (length - 1)."""
    if length == 0:
        yield ()
    for first in range(1, length + 1):
        for rest in compositions(length - first):
            yield (first, *rest)


def chunks(length: int, size: int) -> tuple[int, ...]:
    return (size,) * (length // size) + ((length % size,) if length % size else ())


@functools.cache
def splits(block_size: int) -> tuple[tuple[int, ...], ...]:
    lengths = range(1, 2 * block_size + 2)
    if block_size <= 4:
        return tuple(split for length in lengths for split in compositions(length))
    chosen = [(cut, length - cut) if cut else (length,) for length in lengths for cut in range(length)]
    chosen += [chunks(length, size) for length in lengths for size in (1, block_size - 1, block_size, block_size + 1)]
    draw = random.Random(3)
    for _ in range(200):
        length = draw.randint(1, 2 * block_size + 1)
        cuts = sorted(draw.sample(range(1, length), draw.randint(0, length - 1)))
        chosen.append(tuple(b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)))
    return tuple(chosen)


@functools.cache
def prompts(block_size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tokens_of(sum(split), seed)) for seed, split in enumerate(splits(block_size)))


@functools.cache
def expected(block_size: int, group: str) -> torch.Tensor:
    """The oracle's logits of all prompts, each computed alone and uncached in float64: [tokens, vocab]."""
    return torch.cat([oracle(prompt, tiny(group)) for prompt in prompts(block_size)])


def run_ragged(store: Store, block_size: int) -> torch.Tensor:
    """All splits as sequences of one ragged batch; their logits in the order of ``expected``."""
    draw = random.Random(4)
    waiting = {i: (draw.randrange(4), list(split)) for i, split in enumerate(splits(block_size))}  # first step, chunks left
    rows: list[list[torch.Tensor]] = [[] for _ in waiting]
    step = 0
    while waiting:
        ready = [i for i, (begins, _) in waiting.items() if begins <= step]
        draw.shuffle(ready)
        share = []
        for i in ready:
            start = store.lengths.get(i, 0)
            share.append((i, prompts(block_size)[i][start : start + waiting[i][1].pop(0)]))
            if not waiting[i][1]:
                del waiting[i]
        for i, logits in zip(ready, store.run(*share), strict=True):
            rows[i].append(logits)
        step += 1
    return torch.cat([logits for sequence in rows for logits in sequence])


def test_the_matrix_holds_the_splits_that_it_says() -> None:
    assert [len(splits(block_size)) for block_size in (1, 3, 4)] == [7, 127, 511]  # sums of 2 ** (length - 1)
    assert len(set(splits(4))) == 511
    assert {(n - cut, cut) for n in range(2, 34) for cut in range(1, n)} <= set(splits(16))
    assert all(chunks(n, size) in splits(16) for n in range(1, 34) for size in (1, 15, 16, 17))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("cache", "block_size"), [(c, b) for b in (1, 3, 4, 16) for c in CACHES] + [(c, b) for b in (1, 3, 4) for c in PADDED]
)
def test_every_split_in_a_ragged_batch_is_the_uncached_pass(cache: str, block_size: int, group: str, dtype: torch.dtype) -> None:
    num_blocks = sum(blocks_for(sum(split), block_size) for split in splits(block_size))
    store = Store(cache, tiny(group, dtype), 2 * block_size + 1, block_size, num_blocks)
    close(run_ragged(store, block_size), expected(block_size, group), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("group", GROUPS)
def test_a_ragged_batch_without_a_cache_is_each_sequence_alone(group: str, dtype: torch.dtype) -> None:
    model, kv = tiny(group, dtype), NoCache()
    step = kv.begin([Piece(i, prompt, logits="all") for i, prompt in enumerate(prompts(4))])
    with torch.inference_mode():
        close(model(step.token_ids, step.positions, kv), expected(4, group), dtype)


# ---------------------------------------------------------------- positions and masks, one by one

every_cache = pytest.mark.parametrize("cache", CACHES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


@every_cache
@pytest.mark.parametrize("queries", [1, 2, 3, 4])
def test_fewer_queries_than_keys_are_the_last_rows_of_the_full_pass(cache: str, queries: int) -> None:
    """CASES row 1: the mask aligns at the bottom right; q=1 and q=2 over 5 keys."""
    tokens = tokens_of(5)
    store = Store(cache, tiny())
    store.run(("a", tokens[:-queries]))
    close(store.run(("a", tokens[-queries:]))[0], oracle(tokens)[-queries:])


@every_cache
@pytest.mark.parametrize("changed", [1, 4, 5, 6, 7, 8])
def test_a_changed_token_leaves_all_rows_before_it_as_they_were(cache: str, changed: int) -> None:
    """CASES row 2: P=6 into an empty cache, then a chunk of 3; the mask is there in both and at the right place."""
    tokens = tokens_of(9)
    other = tokens.copy()
    other[changed] = (other[changed] + 1) % VOCAB
    rows = []
    for sequence in (tokens, other):
        store = Store(cache, tiny())
        rows.append(torch.cat(store.run(("a", sequence[:6])) + store.run(("a", sequence[6:]))))
    assert torch.equal(rows[0][:changed], rows[1][:changed]), "a row saw a token behind it"
    assert (rows[0][changed:] - rows[1][changed:]).abs().amax(-1).min() > 1e-6, "a row did not see a token before it"


@pytest.mark.parametrize("cache", [*CACHES, *PADDED])
def test_positions_go_on_where_the_cache_ends(cache: str) -> None:
    """CASES row 3: P=6 has the positions 0 to 5, then come 6, 7, 8, one by one or as a chunk."""
    store = Store(cache, tiny())
    seen = []
    for size in (6, 1, 1, 1, 3):
        piece = store.piece("a", tokens_of(size))
        seen.append(store.kv.begin([piece]).positions[:size].tolist())
        store.lengths["a"] = piece.end
    assert seen == [[0, 1, 2, 3, 4, 5], [6], [7], [8], [9, 10, 11]]


@every_cache
@pytest.mark.parametrize("lengths", [(3, 7), (7, 3), (1, 1), (4, 8), (1, 9, 2, 5)])
def test_two_lengths_in_one_batch_are_each_as_if_alone(cache: str, lengths: tuple[int, ...]) -> None:
    """CASES row 4: no sequence takes another's positions, in prefill and in the steps after it."""
    sequences = [tokens_of(length + 4, seed) for seed, length in enumerate(lengths)]
    store = Store(cache, tiny())
    rows = [[logits] for logits in store.run(*((i, s[:-4]) for i, s in enumerate(sequences)))]
    for back in (-4, -3, -2, -1):
        for i, logits in enumerate(store.run(*((i, [s[back]]) for i, s in enumerate(sequences)))):
            rows[i].append(logits)
    for sequence, parts in zip(sequences, rows, strict=True):
        close(torch.cat(parts), oracle(sequence))


@every_cache
def test_a_cache_that_is_used_again_is_as_good_as_new(cache: str) -> None:
    """CASES row 5: run A, reset, run B in A's place: B is as in a fresh cache."""
    store = Store(cache, tiny(), num_blocks=3)
    first, second = tokens_of(11, 1), tokens_of(7, 2)
    for sequence in (first, second, first):
        close(torch.cat(store.run(("a", sequence[:5])) + store.run(("a", sequence[5:]))), oracle(sequence))
        store.drop("a")


@every_cache
def test_whoever_takes_the_place_of_a_finished_sequence_reads_its_own_past(cache: str) -> None:
    """CASES row 10: A and B run, A ends, C takes its place in the batch and its memory."""
    a, b, c = (tokens_of(9, seed) for seed in range(3))
    store = Store(cache, tiny(), num_blocks=6)
    rows_b = [store.run(("a", a[:6]), ("b", b[:6]))[1]]
    store.drop("a")
    logits_c, logits_b = store.run(("c", c[:8]), ("b", b[6:8]))
    last_c, last_b = store.run(("c", c[8:]), ("b", b[8:]))
    close(torch.cat([*rows_b, logits_b, last_b]), oracle(b))
    close(torch.cat([logits_c, last_c]), oracle(c))


def test_a_full_contiguous_buffer_refuses_with_both_numbers_and_stays_usable() -> None:
    """CASES row 6: room for 16, and 20 are wanted; neither the sequence nor its neighbour has moved."""
    tokens, other = tokens_of(20), tokens_of(6, 1)
    store = Store("contiguous", tiny(), most_tokens=16)
    rows = store.run(("a", tokens[:12]), ("b", other[:3]))
    buffers = {name: bits(buffer).clone() for name, buffer in store.kv._buffers.items()}
    with pytest.raises(ValueError, match=r"20 tokens.*holds 16"):
        store.run(("new", [1]), ("b", other[3:]), ("a", tokens[12:]))
    assert store.kv.lengths == {"a": 12, "b": 3}
    assert all(torch.equal(bits(buffer), buffers[name]) for name, buffer in store.kv._buffers.items())
    more = store.run(("a", tokens[12:16]), ("b", other[3:]))
    close(torch.cat([rows[0], more[0]]), oracle(tokens[:16]))
    close(torch.cat([rows[1], more[1]]), oracle(other))
    with pytest.raises(ValueError, match=r"17 tokens.*holds 16"):
        store.run(("a", [1]))


@pytest.mark.parametrize("cache", ["paged-reference", "paged-cpu"])
def test_a_table_that_is_too_short_is_refused_with_both_numbers_and_the_cache_stays_usable(cache: str) -> None:
    """CASES row 6, paged: 9 tokens in blocks of 4 need 3 blocks, the table has 2."""
    tokens = tokens_of(9)
    store = Store(cache, tiny())
    store.run(("a", tokens[:6]))
    pool = bits(store.kv.pool).clone()
    with pytest.raises(ValueError, match=r"need 3 blocks.*has 2"):
        store.kv.begin([store.piece("b", [1]), Piece("a", tokens[6:], 6, store.tables["a"])])
    assert torch.equal(bits(store.kv.pool), pool)
    close(store.run(("a", tokens[6:]))[0], oracle(tokens)[6:])


def test_a_sequence_that_outgrows_the_context_is_refused_with_both_numbers() -> None:
    """CASES row 6, the model: a context of 64 and 60 + 6 tokens."""
    for generate in (minikv.generate_with_cache, minikv.generate_without_cache):
        with pytest.raises(minikv.RequestError, match=r"65, more than the model's context of 64"):
            generate(tiny(), tokens_of(60), 6)
    assert len(minikv.generate_with_cache(tiny(), tokens_of(60), 5).tokens) == 5


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([], "at least one piece"),
        ([Piece("a", [], 3)], "at least one token"),
        ([Piece("a", [1], 5)], "has 3 tokens in the cache and cannot go on at 5"),
        ([Piece("a", [1], 2)], "has 3 tokens in the cache and cannot go on at 2"),
        ([Piece("b", [1], 1)], "has 0 tokens in the cache and cannot go on at 1"),
        ([Piece("a", [1], 3), Piece("a", [1], 4)], "named twice"),
    ],
)
def test_a_contiguous_cache_that_is_misused_complains_and_goes_on(pieces: list[Piece], message: str) -> None:
    tokens = tokens_of(5)
    store = Store("contiguous", tiny())
    store.run(("a", tokens[:3]))
    with pytest.raises(ValueError, match=message):
        store.kv.begin(pieces)
    close(store.run(("a", tokens[3:]))[0], oracle(tokens)[3:])


def test_no_cache_refuses_a_piece_whose_past_it_cannot_know() -> None:
    with pytest.raises(ValueError, match="starts at 3"):
        NoCache().begin([Piece("a", [1], 3)])


@every_dtype
def test_greedy_text_with_a_cache_is_the_text_without(dtype: torch.dtype) -> None:
    """CASES row 7: tokens are compared where the oracle's two best logits are further apart than rounding reaches."""
    for seed in range(5):
        model, prompt = tiny("group4", dtype), tokens_of(seed + 1, seed)
        warm, cold = minikv.generate_with_cache(model, prompt, 20), minikv.generate_without_cache(model, prompt, 20)
        best = oracle(prompt + cold.tokens[:-1], tiny("group4")).topk(2).values[len(prompt) - 1 :]
        sure = [*(best[:, 0] - best[:, 1] > (0 if dtype == torch.float64 else 1e-3)).tolist(), False]
        until = sure.index(False)
        assert until > 0
        assert warm.tokens[:until] == cold.tokens[:until]
        assert warm.computed_tokens == len(prompt) + 19
        assert cold.computed_tokens == sum(range(len(prompt), len(prompt) + 20))


@pytest.mark.parametrize("cache", CACHES + PADDED)
def test_a_step_hands_out_the_rows_that_it_was_asked_for(cache: str) -> None:
    """None of a middle chunk, the last one to sample from, or all; padding never adds a row."""
    store = Store(cache, tiny())
    tokens = {name: tokens_of(4, seed) for seed, name in enumerate(("none", "last", "all"))}
    pieces = [store.piece(name, sequence) for name, sequence in tokens.items()]
    for piece in pieces:
        piece.logits = piece.sequence
    step = store.kv.begin(pieces)
    with torch.inference_mode():
        rows = tiny()(step.token_ids, step.positions, store.kv, step.logit_rows)
    close(rows, torch.cat([oracle(tokens["last"])[-1:], oracle(tokens["all"])]))


# ---------------------------------------------------------------- nothing is changed behind anyone's back (CASES row 33)


@pytest.mark.parametrize("group", GROUPS)
def test_float32_logits_are_those_of_float64(group: str) -> None:
    """CASES row 33: where ``x.float()`` is x itself, an in-place operation would change the residual in float32 only."""
    tokens = tokens_of(40)
    close(oracle(tokens, tiny(group, torch.float32)), oracle(tokens, tiny(group)), torch.float32)


@every_dtype
@pytest.mark.parametrize("group", GROUPS)
@every_cache
def test_a_forward_pass_leaves_weights_tables_and_inputs_as_they_were(cache: str, group: str, dtype: torch.dtype) -> None:
    """CASES row 33: twice the same pass gives the same bits, and nothing that it read has changed."""
    model, tokens = tiny(group, dtype), tokens_of(12)
    before = [(name, weight.clone()) for name, weight in model.named_weights()]
    cos, sin = model.cos.clone(), model.sin.clone()
    store = Store(cache, model)
    step = store.kv.begin([store.piece("a", tokens)])
    ids, positions = step.token_ids.clone(), step.positions.clone()
    with torch.inference_mode():
        first = model(step.token_ids, step.positions, store.kv)
        kept = first.clone()
        second = model(step.token_ids, step.positions, store.kv)
    assert torch.equal(first, kept)
    assert torch.equal(first, second)
    assert torch.equal(step.token_ids, ids)
    assert torch.equal(step.positions, positions)
    assert torch.equal(model.cos, cos)
    assert torch.equal(model.sin, sin)
    for (name, weight), (_, old) in zip(model.named_weights(), before, strict=True):
        assert torch.equal(weight, old), f"{name} has changed"


@every_dtype
def test_every_operation_of_the_model_returns_a_new_tensor(dtype: torch.dtype) -> None:
    """CASES row 33: norm and projection neither write to what they are given nor hand it out again."""
    for group in GROUPS:
        model = tiny(group, dtype)
        x = torch.randn(5, model.shape.hidden, dtype=dtype, generator=torch.Generator().manual_seed(5))
        cos, sin = model.cos[:5], model.sin[:5]
        inputs = [x, cos, sin, model.norm]
        copies = [tensor.clone() for tensor in inputs]
        outputs = [model._norm(x, model.norm), *model._project(model.layers[0], x, cos, sin)]
        for output in outputs:
            output.fill_(7)  # were it an input or a weight, that would change now
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, copies, strict=True))
        assert not (model.layers[0].qkv == 7).any()


@every_dtype
@pytest.mark.parametrize("tokens", [1, 5, 12])
@pytest.mark.parametrize("cache", ["none", *CACHES])
def test_a_cache_copies_what_it_stores_and_leaves_q_k_v_alone(cache: str, tokens: int, dtype: torch.dtype) -> None:
    """CASES row 33: q, k and v are the caller's, who may reuse their memory for the next layer."""
    model = tiny("group2", dtype)
    shape = model.shape
    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(tokens, h, shape.head_dim, dtype=dtype, generator=generator) for h in (shape.heads, 2, 2))
    copies = [t.clone() for t in (q, k, v)]
    kv = NoCache() if cache == "none" else (store := Store(cache, model)).kv
    kv.begin([Piece("a", [0] * tokens) if cache == "none" else store.piece("a", [0] * tokens)])
    out = kv.attend(0, q, k, v)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip((q, k, v), copies, strict=True))
    kept = out.clone()
    for tensor in (q, k, v):
        tensor.fill_(torch.nan)
    assert torch.equal(out, kept)
    if cache != "none":  # a second layer's worth of the same memory must not reach into the first one's keys
        store.lengths["a"] = tokens
        kv.begin([store.piece("a", [0])])
        assert kv.attend(0, *(copy[:1] for copy in copies)).isfinite().all()


def test_a_model_owns_its_weights_and_choosing_a_token_leaves_the_logits_alone() -> None:
    """CASES row 33: float32 weights are copied, not borrowed, and sampling works on a copy."""
    shape = tiny().shape
    weights = random_weights(shape, 1)
    model = Model(shape, weights, torch.float32)
    before = oracle(tokens_of(6), model)
    for weight in weights.values():
        weight.zero_()
    assert torch.equal(oracle(tokens_of(6), model), before)
    for dtype in (torch.float32, torch.float64):
        logits = before.to(dtype)
        kept = logits.clone()
        sampling = Sampling(temperature=0.7, top_k=5, top_p=0.8)
        choose(logits, [Draw(row, sampling, seed=1, sample=0, index=row) for row in range(6)])
        assert torch.equal(logits, kept)


def test_a_paged_cache_that_cannot_work_is_refused_by_name() -> None:
    shape = tiny().shape
    for sizes in ((0, 4), (4, 0), (-1, 4)):
        with pytest.raises(ValueError, match=re.escape(f"not {sizes[0]} blocks of {sizes[1]}")):
            Paged(shape, *sizes)
    with pytest.raises(ValueError, match="unknown attention 'fast'"):
        Paged(shape, 4, attention="fast")
    with pytest.raises(ValueError, match="float32 or float64"):
        Paged(shape, 4, dtype=torch.bfloat16, attention="cpu")
    with pytest.raises(RuntimeError, match="begin"):
        Paged(shape, 4).attend(0, *(torch.zeros(1, h, 8) for h in (4, 2, 2)))
