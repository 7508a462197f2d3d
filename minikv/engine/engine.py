"""The engine: many requests at once, step by step.

    add      checks a request and queues it
    step     plans, computes and books one step, and hands out what each request got
    generate is a loop around the two

Everything that could refuse a request happens in ``add``, before anything is touched, so that a bad request harms
nobody else's.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from minikv.cache.blocks import BlockPool, EvictionPolicy, blocks_for
from minikv.cache.prefix import KeyChain, PrefixCache, namespace
from minikv.cache.step import to_token_ids
from minikv.engine.metrics import Stats
from minikv.engine.request import Output, Request, State
from minikv.engine.request import Sequence as Text
from minikv.engine.runner import Runner, TorchRunner
from minikv.engine.scheduler import Admission, Scheduler
from minikv.errors import RequestError
from minikv.model.sampling import Sampling

if TYPE_CHECKING:
    from minikv.model.weights import Model

DEFAULT_POOL_BYTES = 512 * 2**20


class Engine:
    """Serves requests from one pool of KV blocks.

    Give a ``model`` and the engine makes a ``TorchRunner`` for it, with ``num_blocks`` blocks of ``block_size`` tokens
    (default: 512 MiB of them, at least one full context and at most sixteen), or give a ``runner`` of your own, which
    has its own blocks. A step computes at most ``max_batch_tokens`` tokens, of at most ``max_batch_requests`` sequences
    (and never more sequences than tokens). ``attention`` chooses the kernel, ``admission`` and ``eviction`` replace the
    policies. An engine is for one thread at a time; threads may have one each. ValueError for sizes that cannot work.
    """

    def __init__(
        self,
        model: Model | None = None,
        *,
        runner: Runner | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_batch_tokens: int = 512,
        max_batch_requests: int = 64,
        prefix_caching: bool = True,
        tiers: Iterable[Any] = (),
        attention: str = "auto",
        admission: Admission | None = None,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        if (model is None) == (runner is None):
            raise ValueError("an engine needs exactly one of a model and a runner")
        sizes = {"num_blocks": num_blocks, "block_size": block_size}
        sizes |= {"max_batch_tokens": max_batch_tokens, "max_batch_requests": max_batch_requests}
        for name, size in sizes.items():
            if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
                raise ValueError(f"{name} must be a whole number, not {size!r}")
        if runner is not None and num_blocks is not None:
            raise ValueError(f"num_blocks={num_blocks} beside a runner, which has {runner.num_blocks} blocks of its own: leave it out")
        if list(tiers):
            raise ValueError("tiers below the pool are not there yet: leave tiers empty")
        if runner is None:
            assert model is not None
            if num_blocks is None:
                num_blocks = _default_blocks(model, block_size)
            runner = TorchRunner(model, num_blocks, block_size, attention)
        self.runner = runner
        self.pool = BlockPool(runner.num_blocks, runner.block_size, eviction)
        self.prefix = PrefixCache(self.pool) if prefix_caching else None
        self.scheduler = Scheduler(self.pool, self.prefix, max_batch_tokens, max_batch_requests, admission)
        self._requests: dict[Hashable, Request] = {}
        self._content: str | None = None  # found when the first request needs it: it takes a look at every weight
        self._computed_tokens = self._generated_tokens = self._steps = 0
        self._next_id = 0
        self._stepping = threading.Lock()
        self._undelivered: dict[int, tuple[Output, list[int], str]] = {}  # what other requests got while generate ran

    # ---------------------------------------------------------------- requests

    def add(
        self,
        request_id: Hashable,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        salt: str | None = None,
        now: float | None = None,
    ) -> None:
        """Queue a request. ``prompt`` is text or token ids; requests of different ``salt`` never share cached blocks.

        ``now`` is its time of arrival on the runner's clock (default: now). Raises RequestError, with nothing changed:
        empty prompt, token outside the vocabulary, text without a tokenizer, senseless sampling, more tokens than the
        model's context or the pool can hold, an id that is in use or cannot be hashed, or a salt that is no text.
        """
        sampling = Sampling() if sampling is None else sampling
        tokens = self._check(prompt, sampling)
        if now is not None and not (isinstance(now, (int, float)) and not isinstance(now, bool) and abs(now) < 1e15):
            raise RequestError(f"now is a time in seconds, not {now!r}")
        try:
            hash(request_id)
        except TypeError:
            raise RequestError(f"a request id must be hashable: a text, a number or a tuple of them, not {request_id!r}") from None
        if not (salt is None or isinstance(salt, str)):
            raise RequestError(f"a salt is text or None, not {salt!r}")
        kept = any(output.request_id == request_id for output, _, _ in self._undelivered.values())
        if request_id in self._requests or kept:
            raise RequestError(f"request id {request_id!r} is in use; wait until it has finished, abort it, or choose another id")
        self._queue(request_id, tokens, sampling, salt, now)

    def _queue(self, request_id: Hashable, tokens: list[int], sampling: Sampling, salt: str | None, now: float | None) -> Request:
        stop = frozenset(sampling.stop_tokens) | (frozenset() if sampling.ignore_eos else frozenset(self.runner.stop_tokens))
        arrived = self.runner.now() if now is None else now
        request = Request(request_id, tokens, sampling, salt, arrived, stop)
        request.namespace = self._namespace(salt)
        self._requests[request_id] = request
        self._join(request, Text(request, 0, self.pool.block_size))
        self.scheduler.add(request.sequences[0])
        return request

    def _join(self, request: Request, text: Text) -> None:
        request.sequences.append(text)
        if self.runner.tokenizer is not None:
            text.text_stream = self.runner.tokenizer.stream(request.prompt)
            text.output.text = ""

    def _check(self, prompt: str | Sequence[int], sampling: Sampling) -> list[int]:
        if not isinstance(sampling, Sampling):
            raise RequestError(f"sampling is a minikv.Sampling, not {sampling!r}")
        sampling.check()
        runner, pool = self.runner, self.pool
        if sampling.stop and runner.tokenizer is None:
            raise RequestError("stop strings need a model with a tokenizer; use stop_tokens")
        tokens = to_token_ids(prompt, runner.tokenizer, runner.vocab)
        stored = len(tokens) + sampling.max_new_tokens - 1  # the last generated token is never fed back
        if stored > runner.max_context:
            raise RequestError(
                f"{len(tokens)} prompt tokens and {sampling.max_new_tokens} new ones need {stored} positions, more than the "
                f"model's context of {runner.max_context}; shorten the prompt or lower max_new_tokens"
            )
        needed = blocks_for(stored, pool.block_size)
        if needed > pool.num_blocks:
            raise RequestError(
                f"{len(tokens)} prompt tokens and {sampling.max_new_tokens} new ones need {needed} blocks of {pool.block_size}, "
                f"the pool has {pool.num_blocks}; shorten the prompt, lower max_new_tokens or make the pool larger"
            )
        return tokens

    def abort(self, request_id: Hashable) -> bool:
        """End a request now, wherever it is, and give its blocks back. False when there is nothing to abort."""
        try:
            request = self._requests.pop(request_id, None)
        except TypeError:  # not hashable: no request can have this id
            return False
        kept = [key for key, (output, _, _) in self._undelivered.items() if output.request_id == request_id]
        for key in kept:
            del self._undelivered[key]
        for text in request.sequences if request is not None else ():
            if text.state is not State.FINISHED:
                self.scheduler.finish(text)
                text.output.finish_reason = "abort"
                if text.output.text is not None:  # what might have become a stop string is text now
                    text.output.text += text.held_text
        return request is not None or bool(kept)

    @property
    def has_work(self) -> bool:
        """True while a request is waiting or running, or has got something that no ``step`` has handed out."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._undelivered)

    @property
    def next_event_at(self) -> float | None:
        """When something that is under way will let a step run again (runner's clock); None when nothing is under way."""
        return None

    # ---------------------------------------------------------------- steps

    def step(self, now: float | None = None) -> list[Output]:
        """One step; returns the outputs that grew in it, with ``new_tokens`` and ``new_text``.

        Returns an empty list at once when nothing can run (an admission policy of yours may say no to all who wait), and
        also after a step that only computed a part of a prompt.
        ``now`` is when the step begins, on the runner's clock. The first step after ``generate`` computes nothing and
        hands out what other requests got meanwhile.
        """
        if self._undelivered:
            return self._deliver()
        return self._step(now)

    def _step(self, now: float | None = None) -> list[Output]:
        if not self._stepping.acquire(blocking=False):
            raise RuntimeError("this engine is in a step of another thread: use it from one thread, or give each thread its own")
        try:
            return self._step_alone(now)
        finally:
            self._stepping.release()

    def _step_alone(self, now: float | None) -> list[Output]:
        plan = self.scheduler.plan()
        if not plan.pieces:
            return []
        result = self.runner.execute(plan, self.runner.now() if now is None else now)
        drawn = list(zip(plan.receivers, plan.draws, result.tokens, result.logprobs, strict=True))
        self.scheduler.commit(plan)
        self._steps += 1
        self._computed_tokens += plan.num_tokens
        drawn = [each for each in drawn if each[0].state is not State.FINISHED]  # not aborted while it was computed
        self._generated_tokens += len(drawn)
        # Forks first: they copy the parent before it gets its own first token.
        texts = [text if draw.sample == text.sample else self._fork(text, draw.sample) for text, draw, _, _ in drawn]
        for text, (_, _, token, logprob) in zip(texts, drawn, strict=True):
            self._give(text, token, logprob, result.ended_at)
        return [text.output for text in texts]

    def _fork(self, text: Text, sample: int) -> Text:
        other = self.scheduler.fork(text, sample)
        self._join(text.request, other)
        return other

    def _give(self, text: Text, token: int, logprob: float, at: float) -> None:
        """Book one new token, and finish the sequence if it was the last."""
        request, output = text.request, text.output
        text.tokens.append(token)
        output.tokens.append(token)
        output.logprobs.append(logprob)
        output.token_times_s.append(at - request.arrived_at)
        output.new_tokens, output.new_text = [token], ""
        ends = token in request.stop_tokens
        if ends:
            output.finish_reason = "stop"
        elif len(output.tokens) == request.sampling.max_new_tokens:
            output.finish_reason = "length"
        if text.text_stream is not None:
            self._give_text(text, token, ends)
        if output.finish_reason is not None:
            self.scheduler.finish(text)
            if all(other.state is State.FINISHED for other in request.sequences):
                del self._requests[request.request_id]

    def _give_text(self, text: Text, token: int, ends: bool) -> None:
        """Hand out the token's text, except what may still turn out to be the beginning of a stop string."""
        output, stops = text.output, text.request.sampling.stop
        known = text.held_text + ("" if ends else text.text_stream.push(token))
        if output.finish_reason is not None:
            known += text.text_stream.finish()
        found = [place for stop in stops if (place := known.find(stop)) >= 0]
        if found:
            known, output.finish_reason = known[: min(found)], "stop"
        hold = 0 if output.finish_reason is not None else _may_begin(stops, known)
        output.new_text, text.held_text = known[: len(known) - hold], known[len(known) - hold :]
        assert output.text is not None
        output.text += output.new_text

    def generate(self, prompts: Sequence[str | Sequence[int]] | str, sampling: Sampling | None = None) -> list[Output]:
        """Run prompts (text or token ids) to their ends; outputs keep the order, n after each other per prompt.

        All prompts are checked before any runs: RequestError names the first bad one. Requests that were added before
        run along; what they get meanwhile is handed out by the next ``step``.
        """
        if isinstance(prompts, str):
            raise RequestError("generate takes a list of prompts; write [prompt]")
        sampling = Sampling() if sampling is None else sampling
        checked = []
        for place, prompt in enumerate(prompts):
            if isinstance(prompt, int):
                raise RequestError("generate takes a list of prompts; a single prompt of token ids is written [[...]]")
            try:
                checked.append(self._check(prompt, sampling))
            except RequestError as wrong:
                raise RequestError(f"prompt {place}: {wrong}") from None
        requests: list[Request] = []
        try:
            for tokens in checked:
                while f"generate-{self._next_id}" in self._requests:
                    self._next_id += 1
                requests.append(self._queue(f"generate-{self._next_id}", tokens, sampling, None, None))
            own = {request.request_id for request in requests}
            while not own.isdisjoint(self._requests):
                before = self._steps
                for output in self._step():
                    if output.request_id not in own:
                        self._keep(output)
                if self._steps == before:
                    raise RuntimeError("nothing can run: the admission policy refuses every waiting request")
        except BaseException:  # interrupted: nobody will ask for these outputs
            for request in requests:
                self.abort(request.request_id)
            raise
        return [text.output for request in requests for text in request.sequences]

    def _keep(self, output: Output) -> None:
        """Remember the news of a request that ran along with ``generate``, for whoever calls ``step`` next."""
        _, tokens, text = self._undelivered.get(id(output), (output, [], ""))
        self._undelivered[id(output)] = (output, tokens + output.new_tokens, text + output.new_text)

    def _deliver(self) -> list[Output]:
        kept, self._undelivered = list(self._undelivered.values()), {}
        for output, tokens, text in kept:
            output.new_tokens, output.new_text = tokens, text
        return [output for output, _, _ in kept]

    # ---------------------------------------------------------------- looking in

    def stats(self) -> Stats:
        """The engine's counters as they are now."""
        scheduler, pool = self.scheduler, self.pool
        return Stats(
            total_blocks=pool.num_blocks, free_blocks=pool.num_free, cached_blocks=pool.num_cached,
            prompt_tokens=scheduler.prompt_tokens, hit_tokens=scheduler.hit_tokens,
            computed_tokens=self._computed_tokens, generated_tokens=self._generated_tokens,
            preemptions=scheduler.preemptions, evictions=pool.evictions, steps=self._steps,
            running=len(scheduler.running), waiting=len(scheduler.waiting),
        )  # fmt: skip

    def check_integrity(self) -> None:
        """AssertionError unless every block is in exactly one place, all counts add up, and no request is lost."""
        self.scheduler.check_integrity()
        alive = {id(text) for request in self._requests.values() for text in request.sequences if text.state is not State.FINISHED}
        scheduled = {id(text) for text in self.scheduler.sequences()}
        assert alive == scheduled, f"{len(alive)} sequences are alive and {len(scheduled)} are scheduled"
        if not alive:
            assert self.pool.num_free == self.pool.num_blocks, "nobody is there, and yet blocks have owners"

    def invalidate_cache(self) -> None:
        """Forget all cached KV, for instance because the weights changed.

        Raises RuntimeError while requests are running: their own KV would be a mixture of old and new weights.
        """
        if self.scheduler.running:
            raise RuntimeError(f"{len(self.scheduler.running)} sequences are running; let them finish or abort them first")
        if self.prefix is not None:
            self.prefix.clear()
        self.runner.weights_changed()
        self._content = None
        for request in self._requests.values():  # those that wait look up under the new content
            request.namespace = self._namespace(request.salt)
            for text in request.sequences:
                text.chain = KeyChain(request.namespace, self.pool.block_size)

    def _namespace(self, salt: str | None) -> bytes:
        if self.prefix is None:
            return b""
        if self._content is None:
            self._content = namespace(**self.runner.content()).decode()
        return namespace(content=self._content, salt=salt)


def _may_begin(stops: tuple[str, ...], text: str) -> int:
    """Characters at the end of ``text`` that are the beginning of one of ``stops``."""
    longest = max((len(stop) for stop in stops), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


def _default_blocks(model: Model, block_size: int) -> int:
    if block_size < 1:
        raise ValueError(f"a block needs at least one slot; got block_size={block_size}")
    shape = model.shape
    block_bytes = shape.kv_numbers_per_token * block_size * model.dtype.itemsize
    context = blocks_for(shape.max_context, block_size)
    return max(context, min(DEFAULT_POOL_BYTES // block_bytes, 16 * context))
