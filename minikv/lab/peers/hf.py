"""Hugging Face transformers as a peer: ``generate`` with its contiguous cache, and its continuous batching.

Three ways to serve the same prompts from the same folder of weights:

    hf generate                one call for all prompts; shorter ones are padded on the left
    hf generate, one by one    a call a prompt: what a loop around ``generate`` does
    hf continuous batching     ``generate_batch`` over a paged cache

All are greedy and never stop early. The model is loaded in float32 with torch's own attention (SDPA).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Prompts = Sequence[Sequence[int]]
Generate = Callable[[Prompts, int], list[list[int]]]

BLOCK_SIZE = 16
MAX_BATCH_TOKENS = 512


class HuggingFace:
    """The peer over the model in ``folder``. ImportError when transformers is not installed."""

    name = "hf"

    def __init__(self, folder: str | Path) -> None:
        self._transformers = importlib.import_module("transformers")
        self._transformers.logging.set_verbosity_error()
        self._transformers.logging.disable_progress_bar()
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        import torch

        self._torch = torch
        load = self._transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
        # A model for itself: continuous batching changes the attention of the one that it is given.
        self._paged_model = load(folder, dtype=torch.float32, attn_implementation="sdpa").eval()

    @property
    def version(self) -> str:
        return f"transformers {self._transformers.__version__}"

    def engines(self, batched: bool) -> dict[str, Generate]:
        """The ways to run a workload of one request, or of many, by the name of the row in the table."""
        if not batched:
            return {"hf generate": self.generate}
        return {"hf generate": self.generate, "hf generate, one by one": self.one_by_one, "hf continuous batching": self.continuous}

    def generate(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        """One batch, padded on the left to its longest prompt."""
        torch = self._torch
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=mask, generation_config=self._config(new_tokens))
        return [tokens.tolist() for tokens in out[:, longest:]]

    def one_by_one(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        """A batch of one for each prompt."""
        return [self.generate([prompt], new_tokens)[0] for prompt in prompts]

    def continuous(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        """All prompts through the continuous-batching manager, with the same budget of tokens a step as ours."""
        blocks = sum(-(-(len(prompt) + new_tokens) // BLOCK_SIZE) for prompt in prompts) + 8
        config = self._transformers.ContinuousBatchingConfig(page_size=BLOCK_SIZE, num_blocks=blocks, max_batch_tokens=MAX_BATCH_TOKENS)
        results = self._paged_model.generate_batch(
            inputs=[list(prompt) for prompt in prompts],
            generation_config=self._config(new_tokens),
            continuous_batching_config=config,
            progress_bar=False,
        )
        outputs = [result.generated_tokens for result in results.values()]
        done = [tokens for tokens in outputs if len(tokens) == new_tokens]
        if len(done) != len(prompts):
            raise RuntimeError(f"continuous batching finished {len(done)} of {len(prompts)} requests")
        return outputs

    def _config(self, new_tokens: int) -> Any:
        return self._transformers.GenerationConfig(
            max_new_tokens=new_tokens, min_new_tokens=None, do_sample=False, eos_token_id=None, pad_token_id=0
        )
