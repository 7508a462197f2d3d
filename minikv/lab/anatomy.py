"""Where the time of one step goes, and what paging costs the attention kernel.

A step is: plan who runs, fill the step's tensors (begin), multiply with the weights, attend, sample, book the result.
``anatomy`` runs real steps of an engine and puts a clock around each of these; inside the compiled step, where there is
no function to put one around, the clock stands between the kernels (``lab/kernel_clock.py``). ``kernel_bandwidth`` sets the paged
kernel, which walks a block table, against torch's own attention over K and V that lie in one piece: the same bytes,
without any pages. Bytes of K and V a second is the figure that decides how fast a long context can be decoded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import fmean, median
from time import perf_counter
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from minikv.cache.blocks import BlockTable, blocks_for
from minikv.cache.paged import Paged
from minikv.cache.step import Piece
from minikv.compiled import threads
from minikv.engine import runner as runner_module
from minikv.engine.engine import Engine
from minikv.engine.runner import TorchRunner
from minikv.lab.kernel_clock import clocked
from minikv.model import transformer as transformer_module
from minikv.model.sampling import Sampling
from minikv.shape.model_shape import ModelShape

if TYPE_CHECKING:
    from minikv.model.weights import Model

# The parts of a step, in the order in which they come. "attention" is everything between q, k, v and its result; in the
# compiled step that includes rotary and storing, and the products include norms and sums, which are "rest" in torch's pass.
LAYER_PARTS = ("q, k, v product", "attention", "out product", "gate and up product", "down product")
PARTS = ("plan", "begin", *LAYER_PARTS, "head product", "sampling", "rest")


class Clock:
    """Adds up the seconds of the steps of ``engine``, by part."""

    def __init__(self, engine: Engine, runner: TorchRunner) -> None:
        self.engine, self.runner = engine, runner
        self.seconds = dict.fromkeys(PARTS, 0.0)
        model = runner.model
        self._kinds = {id(model.head): "head product"}  # by the weight that is multiplied with
        for layer in model.layers:
            products = (part for part in LAYER_PARTS if part != "attention")
            self._kinds |= dict(zip(map(id, (layer.qkv, layer.out, layer.gate_up, layer.down)), products, strict=True))

    def step(self) -> dict[str, float]:
        """One step of the engine: the seconds of each part."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        with self._inside():
            start = perf_counter()
            self.engine.step()
            self.seconds["rest"] += perf_counter() - start - sum(self.seconds.values())
        return self.seconds

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Put clocks around the parts: around functions, and in the compiled step between its kernels."""
        engine, kv = self.engine, self.runner.kv

        def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return self._around(self._kinds.get(id(weight), "rest"), plain_linear)(x, weight, bias)

        plain_linear = transformer_module.linear
        wraps: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
            (engine.scheduler, "plan", self._around("plan", engine.scheduler.plan)),
            (engine.scheduler, "commit", self._around("plan", engine.scheduler.commit)),
            (kv, "begin", self._around("begin", kv.begin)),
            (Paged, "attend", self._around("attention", Paged.attend)),  # in the object, the compiled step would give way to it
            (runner_module, "choose", self._around("sampling", runner_module.choose)),
            (transformer_module, "linear", linear),
            (threads, "run", clocked(threads.run, self._book_kernels)),
        )
        with ExitStack() as patches:
            for owner, name, timed in wraps:
                patches.enter_context(patch.object(owner, name, timed))
            yield

    def _around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += perf_counter() - start

        return timed

    def _book_kernels(self, seconds: list[float]) -> None:
        """The kernels of the compiled step: embedding, five a layer, and if logits were wanted, the head's product and the best of each."""
        layers = len(self.runner.model.layers)
        parts = ["rest", *LAYER_PARTS * layers, "head product", "sampling"]
        if len(seconds) in (len(parts) - 2, len(parts)):
            for part, taken in zip(parts, seconds, strict=False):
                self.seconds[part] += taken


def anatomy(model: Model, prompt_tokens: int, requests: int, repeats: int = 20) -> dict[str, dict[str, Any]]:
    """Seconds of each part of a decode step (``requests`` at once) and of a prefill step (512 tokens of one prompt).

    Means over the half of ``repeats`` steps that were the fastest: what else the machine does only makes a step longer,
    and means of the same steps add up, which medians do not. The clocks cost a few us a call in torch's pass.
    """
    draw = random.Random(3)
    new_tokens = repeats + 2 + 2 * requests * blocks_for(prompt_tokens, 512)  # the first to decode wait for the last
    runner = TorchRunner(model, requests * blocks_for(prompt_tokens + new_tokens, 16) + 64, 16)
    engine = Engine(runner=runner, max_batch_tokens=512, prefix_caching=False)
    prefill_tokens = min(512, model.shape.max_context - 1)

    clock = Clock(engine, runner)
    prefills = []
    for number in range(max(2, repeats // 4)):
        engine.add(f"prefill {number}", [draw.randrange(model.shape.vocab) for _ in range(prefill_tokens)], Sampling(max_new_tokens=1))
        prefills.append(clock.step())
    for number in range(requests):
        prompt = [draw.randrange(model.shape.vocab) for _ in range(prompt_tokens)]
        engine.add(number, prompt, Sampling(max_new_tokens=new_tokens, ignore_eos=True))
    while any(not text.is_decoding for text in engine.scheduler.sequences()):
        engine.step()
    decodes = [clock.step() for _ in range(repeats)]
    for number in range(requests):
        engine.abort(number)
    return {
        f"prefill, {prefill_tokens} tokens": _usual(prefills[1:]),
        f"decode, {requests} x {prompt_tokens:,}": _usual(decodes),
    }


def _usual(steps: list[dict[str, float]]) -> dict[str, Any]:
    faster = sorted(steps, key=lambda seconds: sum(seconds.values()))[: max(1, len(steps) // 2)]
    return {part: fmean(step[part] for step in faster) for part in PARTS}


def kernel_bandwidth(shape: ModelShape, sequences: int, context: int, block_size: int = 16, repeats: int = 15) -> dict[str, Any]:
    """GB/s of K and V for one decode step's attention over all layers: paged, and contiguous SDPA, taking turns.

    The block tables are shuffled. SDPA is called in two ways (query heads of a group as rows, and its own GQA) and the
    faster one counts.
    """
    generator = torch.Generator().manual_seed(0)
    blocks = blocks_for(context, block_size)
    paged = Paged(shape, sequences * blocks, block_size)
    paged.pool.normal_(generator=generator)
    order = torch.randperm(sequences * blocks, generator=generator).tolist()
    pieces = []
    for number in range(sequences):
        table = BlockTable(block_size)
        table.blocks.extend(order[number * blocks : (number + 1) * blocks])
        pieces.append(Piece(number, [0], context - 1, table))
    q = torch.randn(sequences, shape.heads, shape.head_dim, generator=generator)
    k = torch.randn(sequences, shape.kv_heads, shape.head_dim, generator=generator)
    keys, values = (torch.randn(shape.layers, sequences, shape.kv_heads, context, shape.head_dim, generator=generator) for _ in "kv")
    rows = q.view(sequences, shape.kv_heads, shape.group, shape.head_dim)
    columns = q[:, :, None]  # [sequences, heads, 1, head_dim]

    def walk() -> None:
        paged.begin(pieces)
        for layer in range(shape.layers):
            paged.attend(layer, q, k, k)

    def contiguous() -> None:
        for layer in range(shape.layers):
            F.scaled_dot_product_attention(rows, keys[layer], values[layer])

    def contiguous_gqa() -> None:
        for layer in range(shape.layers):
            F.scaled_dot_product_attention(columns, keys[layer], values[layer], enable_gqa=True)

    ways: dict[str, Callable[[], None]] = {"paged": walk, "sdpa": contiguous, "sdpa gqa": contiguous_gqa}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        for turn in range(-2, repeats):
            for name, way in ways.items():
                start = perf_counter()
                way()
                if turn >= 0:
                    seconds[name].append(perf_counter() - start)
    gigabytes = sequences * context * shape.kv_bytes_per_token("float32") / 1e9
    paged_gb_s = gigabytes / median(seconds["paged"])
    contiguous_gb_s = max(gigabytes / median(times) for name, times in seconds.items() if name != "paged")
    return {
        "sequences": sequences, "context": context, "paged_gb_s": paged_gb_s, "contiguous_gb_s": contiguous_gb_s,
        "paged_of_contiguous": paged_gb_s / contiguous_gb_s,
    }  # fmt: skip
