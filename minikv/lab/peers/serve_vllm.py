"""vLLM on a CPU as a peer: float32, compiled (not eager), prompts as token ids.

Everything runs in this one process, engine and worker too: its steps can then be driven one by one, nothing waits for
another process, and whoever stops this process has stopped all of it.

The four workloads run without prefix caching. minikv's engine is a new one for every run, with nothing in its cache; an
engine that keeps its cache would find the prompts of the run before. The loop of agents is about the cache and has it on,
with exactly as many blocks as minikv.
"""

from __future__ import annotations

import os
from typing import Any

import conversations
from lines import Prompts, serve


class VLLM:
    """The peer over the model in ``folder``; ``blocks`` of ``block_size`` tokens with prefix caching, or vLLM's own choice."""

    alone = together = ("vllm",)

    def __init__(
        self, folder: str, threads: int, max_context: int, max_batch_tokens: int, max_batch_requests: int,
        blocks: int | None = None, block_size: int | None = None,
    ) -> None:  # fmt: skip
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        import torch
        import vllm

        torch.set_num_threads(threads)
        self.version = f"vllm {vllm.__version__}, compiled"
        self._vllm = vllm
        sizes: dict[str, Any] = {}
        if blocks is not None:  # one block more: vLLM keeps one that nobody may use
            sizes = {"num_gpu_blocks_override": blocks + 1, "block_size": block_size}
        self._llm = vllm.LLM(
            model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=max_context,
            max_num_batched_tokens=max_batch_tokens, max_num_seqs=max_batch_requests,
            enable_prefix_caching=blocks is not None, disable_log_stats=True, **sizes,
        )  # fmt: skip

    def prepare(self, prompts: Prompts, new_tokens: int) -> None:
        """Nothing: blocks are there, and nothing is kept."""

    def generate(self, way: str, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = self._llm.generate(asked, self._sampling(new_tokens), use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def sessions(self, **loop: Any) -> list[dict[str, Any]]:
        """The loop of agents, from an empty cache."""
        self._llm.reset_prefix_cache()
        return conversations.run(self, **loop)

    def add(self, number: int, prompt: list[int], new_tokens: int) -> None:
        self._llm.llm_engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, self._sampling(new_tokens))

    def step(self) -> list[tuple[int, list[int], bool, int]]:
        return [
            (int(answer.request_id), list(answer.outputs[0].token_ids), answer.finished, answer.num_cached_tokens or 0)
            for answer in self._llm.llm_engine.step()
        ]

    def _sampling(self, new_tokens: int) -> Any:
        return self._vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)


if __name__ == "__main__":
    serve(VLLM)
