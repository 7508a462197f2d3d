"""The kernels against attention computed densely, in float64, from K and V that never were in blocks."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from minikv.cache.attention import cpu, kernel
from minikv.cache.blocks import BlockTable, blocks_for
from minikv.cache.paged import Paged, StepTensors
from minikv.cache.step import Piece
from minikv.compiled import cfunction, threads
from minikv.shape.model_shape import ModelShape

DIALECTS = ["reference", "cpu"]
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}
FEW = 16


class Case:
    """A pool with sequences (tokens before this step, tokens in it) in shuffled blocks, and this step's q, k, v.

    Slots that nobody has written hold nan, so that a kernel which reads one shows it.
    """

    def __init__(
        self,
        spans: list[tuple[int, int]],
        block_size: int = 16,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        dtype: torch.dtype = torch.float64,
        layers: int = 2,
        seed: int = 0,
        padding: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.spans, self.layer = spans, layers - 1
        shape = ModelShape(layers=layers, hidden=8, heads=heads, kv_heads=kv_heads, head_dim=head_dim, vocab=8, ffn=8)
        needed = [blocks_for(start + count, block_size) for start, count in spans]
        self.paged = Paged(shape, sum(needed) + 3, block_size, dtype, attention="reference", bucket=lambda tokens: tokens + padding)
        order = list(range(sum(needed) + 3))
        random.Random(seed).shuffle(order)
        self.tables = []
        for blocks in needed:
            table = BlockTable(block_size)
            table.blocks.extend(order.pop() for _ in range(blocks))
            self.tables.append(table)
        self.paged.pool.fill_(math.nan)
        self.keys = [torch.randn(start + count, kv_heads, head_dim, dtype=dtype) for start, count in spans]
        self.values = [torch.randn(start + count, kv_heads, head_dim, dtype=dtype) for start, count in spans]
        self.put(self.paged.pool, only_cached=True)
        total = sum(count for _, count in spans) + padding
        # As in the model: q, k, v are parts of one tensor, a token's rows lie apart.
        fused = torch.randn(total, heads + 2 * kv_heads, head_dim, dtype=dtype)
        self.q, self.k, self.v = fused.split((heads, kv_heads, kv_heads), 1)
        first = 0
        for (start, count), keys, values in zip(spans, self.keys, self.values, strict=True):
            self.k[first : first + count], self.v[first : first + count] = keys[start:], values[start:]
            first += count

    def put(self, pool: Tensor, only_cached: bool) -> None:
        for (start, count), table, keys, values in zip(self.spans, self.tables, self.keys, self.values, strict=True):
            for position in range(start if only_cached else start + count):
                block, slot = table.locate(position)
                pool[block, self.layer, 0, :, slot], pool[block, self.layer, 1, :, slot] = keys[position], values[position]

    def begin(self) -> StepTensors:
        return self.paged.begin(
            [Piece(i, [1] * count, start, table) for i, ((start, count), table) in enumerate(zip(self.spans, self.tables, strict=True))]
        )

    def run(self, name: str) -> Tensor:
        attend = kernel(name, self.paged.pool.dtype, torch.device("cpu"))
        return attend(self.q, self.k, self.v, self.paged.pool, self.layer, self.begin())

    def dense(self) -> Tensor:
        """Query by query: softmax over the keys up to its own."""
        outs, first = [], 0
        for (start, count), keys, values in zip(self.spans, self.keys, self.values, strict=True):
            for i in range(count):
                q, seen = self.q[first + i].double(), start + i + 1
                group = q.shape[0] // keys.shape[1]
                k, v = (t[:seen].double().repeat_interleave(group, 1) for t in (keys, values))  # [seen, heads, head_dim]
                weights = (torch.einsum("hd,shd->hs", q, k) / math.sqrt(q.shape[1])).softmax(-1)
                outs.append(torch.einsum("hs,shd->hd", weights, v))
            first += count
        return torch.stack(outs)

    def check(self, name: str) -> None:
        before = self.paged.pool.clone()
        out, want = self.run(name), self.dense()
        dtype = self.paged.pool.dtype
        assert out.shape == self.q.shape
        assert out.dtype == dtype
        torch.testing.assert_close(out[: len(want)].double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        self.put(before, only_cached=False)
        scratch = self.paged.scratch
        assert_same(self.paged.pool[:scratch], before[:scratch])


def assert_same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def edges(block_size: int) -> list[tuple[int, int]]:
    """Decodes with the last block nearly full, full and just begun; then chunks of every kind over cached prefixes."""
    b = block_size
    lengths = sorted({1, 2, max(b - 1, 1), b, b + 1, 2 * b, 2 * b + 1, 5 * b - 1, 140})
    decodes = [(length - 1, 1) for length in lengths]
    chunks = [
        (0, 2),
        (0, FEW),
        (0, FEW + 1),
        (b, FEW + 2),
        (b + 1, 2),
        (3 * b - 1, b + 1),
        (2 * b, 2 * b + FEW),
        (130, FEW),
        (37, 40),
    ]
    return decodes + chunks


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 32, 200])
def test_block_edges_decodes_and_chunks_in_one_step(name: str, dtype: torch.dtype, block_size: int) -> None:
    Case(edges(block_size), block_size, dtype=dtype).check(name)


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("head_dim", [2, 16, 32, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (4, 1), (5, 1), (6, 2)])
def test_groups_and_head_dims(name: str, head_dim: int, heads: int, kv_heads: int) -> None:
    dtype = torch.float64 if head_dim in (16, 64) else torch.float32
    Case([(20, 1), (0, 1), (15, 3), (9, FEW + 9), (0, 20)], 4, heads, kv_heads, head_dim, dtype).check(name)


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("seed", range(6))
def test_random_steps(name: str, seed: int) -> None:
    rng = random.Random(seed)
    spans = [(rng.randrange(300), 1) for _ in range(rng.randrange(1, 9))]
    spans += [(rng.choice([0, rng.randrange(200)]), rng.randrange(1, 60)) for _ in range(rng.randrange(3))]
    rng.shuffle(spans)
    Case(spans, rng.choice([1, 3, 4, 16, 32]), seed=seed).check(name)


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("count", [1, 3, FEW + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_key_with_score_minus_infinity_weighs_nothing(name: str, count: int, dtype: torch.dtype) -> None:
    case = Case([(200, count)], dtype=dtype)
    case.q[..., 0] = case.q[..., 0].abs() + 0.1
    block, slot = case.tables[0].locate(5)
    for position in (0, 5, 150, 200):  # of the first tile, of the second, and of this step
        case.keys[0][position, :, 0] = -math.inf
    case.put(case.paged.pool, only_cached=True)
    case.k[0] = case.keys[0][200]
    assert torch.isneginf(case.paged.pool[block, case.layer, 0, :, slot, 0]).all()
    assert case.dense().isfinite().all()
    case.check(name)


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("count", [1, FEW + 3])
def test_a_whole_tile_of_minus_infinity_then_something(name: str, count: int) -> None:
    case = Case([(400, count)])
    case.q[..., 0] = 1
    case.keys[0][:300, :, 0] = -math.inf
    case.put(case.paged.pool, only_cached=True)
    case.check(name)


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("count", [1, 3, FEW + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_huge_scores_choose_one_key(name: str, count: int, dtype: torch.dtype) -> None:
    case = Case([(200, count)], dtype=dtype)
    case.q.mul_(1e18)
    case.check(name)


@pytest.mark.parametrize("name", DIALECTS)
def test_nan_stays_with_its_sequence_and_nothing_crashes(name: str) -> None:
    case = Case([(50, 1), (50, 1), (20, FEW + 1)], dtype=torch.float32)
    case.keys[0][3] = math.nan
    case.put(case.paged.pool, only_cached=True)
    out = case.run(name)
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("contiguous", [True, False])
def test_rows_that_lie_apart_or_in_another_order(name: str, contiguous: bool) -> None:
    case = Case([(30, 1), (7, 2), (5, FEW + 4)])
    if contiguous:
        case.q, case.k, case.v = (t.contiguous() for t in (case.q, case.k, case.v))
    else:  # heads before tokens in memory: nothing about a token is in one piece
        case.q, case.k, case.v = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (case.q, case.k, case.v))
        assert not case.q.is_contiguous()
    case.check(name)


@pytest.mark.parametrize("group", [cpu.ROWS_A_TILE + 1, 4 * cpu.ROWS_A_TILE])
def test_a_group_of_more_heads_than_a_tile_has_rows(group: int) -> None:
    Case([(30, 1), (3, 5)], heads=group, kv_heads=1, head_dim=8).check("cpu")


@pytest.mark.parametrize("name", DIALECTS)
def test_padding_writes_to_the_scratch_block_only(name: str) -> None:
    case = Case([(30, 1), (3, FEW + 4)], padding=5)
    case.check(name)
    assert case.paged.pool[case.paged.scratch, case.layer, :, :, 0].isfinite().all()
    assert case.paged.pool[case.paged.scratch, case.layer, :, :, 1:].isnan().all()
    assert case.paged.pool[:, 0].isnan().all(), "another layer was written to"


def test_layers_of_one_step_and_steps_of_one_layer() -> None:
    """What a kernel keeps between layers must not outlive the step."""
    cases = [Case([(20, 1), (9, FEW + 9)], layers=3, seed=seed) for seed in range(3)]
    for case in cases:
        step = case.begin()
        for case.layer in (0, 1, 2, 1):
            case.put(case.paged.pool, only_cached=True)
            out = cpu.attend(case.q, case.k, case.v, case.paged.pool, case.layer, step)
            torch.testing.assert_close(out, case.dense(), rtol=1e-12, atol=1e-12)


def test_float32_weights_are_as_exact_as_float32() -> None:
    """Two keys, one value 1 and one 0: the output is the weight itself."""
    case = Case([(1, 1)], heads=1, kv_heads=1, head_dim=2, dtype=torch.float32)
    for difference in (0.0, 0.1, 1.0, 5.0, 20.0, 80.0):
        case.q.fill_(0)
        case.q[..., 0] = difference * math.sqrt(2)
        case.keys[0][0], case.keys[0][1] = torch.tensor([-1.0, 0.0]), torch.tensor([0.0, 0.0])
        case.values[0][0], case.values[0][1] = torch.ones(2), torch.zeros(2)
        case.put(case.paged.pool, only_cached=True)
        case.k[0], case.v[0] = case.keys[0][1], case.values[0][1]
        got = case.run("cpu")[0, 0, 0].item()
        assert got == pytest.approx(math.exp(-difference) / (1 + math.exp(-difference)), rel=1e-5)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_two_threads_share_the_work(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    monkeypatch.setattr(cpu, "ALONE_BYTES", 0)
    for seed in range(20):
        Case([(100, 1)] * 5 + [(30, 30), (70, 20)], seed=seed).check("cpu")


def test_without_torchs_threads_python_threads_do(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    monkeypatch.setattr(threads, "_team", lambda: threads._run_on_python_threads)
    monkeypatch.setattr(cpu, "ALONE_BYTES", 0)
    for seed in range(20):
        Case([(100, 1)] * 5 + [(30, 30)], seed=seed).check("cpu")


def test_a_pool_in_pieces_is_refused() -> None:
    case = Case([(3, 1)])
    with pytest.raises(ValueError, match="contiguous"):
        cpu.attend(case.q, case.k, case.v, case.paged.pool.transpose(3, 4), 0, case.begin())


def test_a_layer_or_a_block_that_the_pool_does_not_have_is_refused() -> None:
    case = Case([(3, 1)])
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=f"no layer {layer} in a pool of 2"):
            cpu.attend(case.q, case.k, case.v, case.paged.pool, layer, case.begin())
    with pytest.raises(ValueError, match="1 sequences in blocks up to"):
        cpu.attend(case.q, case.k, case.v, case.paged.pool[:1].clone(), 0, case.begin())


def test_compiles_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> object:
        if kwargs.get("cache"):
            raise RuntimeError("cannot cache function '_work': no locator available for file 'cpu.py'")
        return type("Compiled", (), {"address": 42})

    monkeypatch.setattr(cfunction, "cfunc", lambda signature, **options: lambda function: refuse(**options))
    assert cfunction.compiled_function.__wrapped__(cpu._work, torch.float32, 16) == 42


TWO_THREADS = """
    import threading, torch
    from test_kernels import Case
    from minikv.cache.attention import cpu

    wrong = []
    def work(seed):
        case = Case([(300, 1)] * 6 + [(50, 40)], layers=2, seed=seed)
        want, step = case.dense(), case.begin()
        for _ in range(300):
            out = cpu.attend(case.q, case.k, case.v, case.paged.pool, case.layer, step)
            if not torch.allclose(out, want, rtol=1e-12, atol=1e-12):
                wrong.append(seed)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print("wrong:", len(wrong))
"""


def test_two_python_threads_at_once() -> None:
    """In a process of its own: a runtime that cannot bear it aborts the process."""
    code = f"import sys; sys.path[:0] = {[__file__.rsplit('/', 1)[0], *sys.path]!r}\n" + textwrap.dedent(TWO_THREADS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "wrong: 0"


# ---------------------------------------------------------------- the Triton kernel: on a GPU if there is one, or in the interpreter

GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# What rounding the inputs of the products costs: q, k, v come rounded, so only the weights and the result are.
CLOSE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def check_gpu(case: Case) -> None:
    """``case`` through the Triton kernel: its result, and that it wrote this step's K and V and nothing else."""
    pytest.importorskip("triton")
    before, dtype = case.paged.pool.clone(), case.paged.pool.dtype
    case.paged.pool, case.paged.device = case.paged.pool.to(GPU), GPU
    attend = kernel("gpu", dtype, GPU)
    out = attend(case.q.to(GPU), case.k.to(GPU), case.v.to(GPU), case.paged.pool, case.layer, case.begin()).cpu()
    want = case.dense()
    assert out.shape == case.q.shape
    assert out.dtype == dtype
    torch.testing.assert_close(out[: len(want)].double(), want, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    case.put(before, only_cached=False)
    assert_same(case.paged.pool.cpu()[: case.paged.scratch], before[: case.paged.scratch])


@pytest.mark.parametrize(
    ("block_size", "heads", "kv_heads", "head_dim", "dtype"),
    [
        (16, 4, 2, 32, torch.float32),
        (4, 4, 1, 64, torch.float32),
        (1, 2, 2, 32, torch.float32),
        (16, 4, 2, 128, torch.bfloat16),
        (4, 2, 2, 32, torch.bfloat16),
        (16, 4, 1, 64, torch.float16),
        (3, 6, 2, 6, torch.float32),  # nothing a power of 2
    ],
)
def test_triton_decodes_chunks_and_padding_around_block_edges(
    block_size: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    b = block_size
    decodes = [(length - 1, 1) for length in sorted({1, max(b - 1, 1), b, b + 1, 2 * b + 1, 33})]
    chunks = [(0, 2), (b, b + 1), (3 * b - 1, 5), (0, 2 * b + 3), (37, 19)]
    spans = decodes + chunks
    random.Random(1).shuffle(spans)
    check_gpu(Case(spans, b, heads, kv_heads, head_dim, dtype, padding=2))


@pytest.mark.parametrize("context", [31, 32, 33, 255, 300])
def test_triton_splits_a_long_context_and_joins_it_again(context: int) -> None:
    gpu = pytest.importorskip("minikv.cache.attention.gpu")
    assert (gpu._splits(2, context, 16, torch.device("cpu")) > 1) == (context > 32)
    check_gpu(Case([(context - 1, 1)], kv_heads=2, head_dim=32, dtype=torch.float32))
    check_gpu(Case([(context - 1, 1), (3, 1), (9, 4)], kv_heads=2, head_dim=32, dtype=torch.float32))


def test_triton_with_minus_infinity_and_huge_scores() -> None:
    for start, count in ((200, 1), (150, 9)):
        case = Case([(start, count)], head_dim=32, dtype=torch.float32)
        case.q[..., 0] = case.q[..., 0].abs() + 0.1
        case.keys[0][:120, :, 0] = -math.inf  # whole tiles, and whole shares of a split context
        case.put(case.paged.pool, only_cached=True)
        check_gpu(case)
    case = Case([(200, 1), (30, 5)], head_dim=32, dtype=torch.float32)
    case.q.mul_(1e18)
    check_gpu(case)


def test_triton_takes_rows_in_any_order_and_refuses_what_does_not_belong() -> None:
    case = Case([(30, 1), (7, 2)], head_dim=32, dtype=torch.float32)
    case.q, case.k, case.v = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (case.q, case.k, case.v))
    check_gpu(case)
    attend = kernel("gpu", torch.float32, GPU)
    q, k, v, step = case.q.to(GPU), case.k.to(GPU), case.v.to(GPU), case.begin()
    with pytest.raises(ValueError, match="do not belong"):
        attend(q, k[1:], v[1:], case.paged.pool, 0, step)
    with pytest.raises(ValueError, match="do not belong"):
        attend(q, k, v, case.paged.pool.transpose(3, 4), 0, step)


def test_who_chooses_which_kernel() -> None:
    pytest.importorskip("triton")
    cpu_device, cuda = torch.device("cpu"), torch.device("cuda")
    assert kernel("auto", torch.bfloat16, cpu_device).__module__.endswith("reference")
    assert kernel("auto", torch.float32, cpu_device).__module__.endswith("cpu")
    assert kernel("auto", torch.float64, cuda).__module__.endswith("reference")
    with pytest.raises(ValueError, match="float64"):
        kernel("gpu", torch.float64, GPU)
    if GPU.type == "cpu":
        with pytest.raises(ValueError, match="not on cuda in the interpreter"):
            kernel("gpu", torch.float32, cuda)
    else:
        assert kernel("auto", torch.bfloat16, cuda).__module__.endswith("gpu")


def test_without_the_interpreter_a_cpu_is_refused_with_what_to_do() -> None:
    pytest.importorskip("triton")
    code = "import torch; from minikv.cache.attention import kernel; kernel('gpu', torch.float32, torch.device('cpu'))"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert "TRITON_INTERPRET=1" in done.stderr
    assert "ValueError" in done.stderr
