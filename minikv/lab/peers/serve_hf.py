"""Hugging Face transformers as a peer: ``generate`` with its contiguous cache, and its continuous batching.

Three ways to serve the same prompts from the same folder of weights:

    hf generate                one call for all prompts; shorter ones are padded on the left
    hf generate, one by one    a call a prompt: what a loop around ``generate`` does
    hf continuous batching     ``generate_batch`` over a paged cache

All are greedy and never stop early. The model is loaded in float32 with torch's own attention (SDPA).
"""

from __future__ import annotations

import logging
from typing import Any

from lines import Prompts, serve

BLOCK_SIZE = 16
SPARE_BLOCKS = 8


class HuggingFace:
    """The peer over the model in ``folder``."""

    alone = ("hf generate",)
    together = ("hf generate", "hf generate, one by one", "hf continuous batching")

    def __init__(self, folder: str, threads: int, max_batch_tokens: int, **_: Any) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        self.version = f"transformers {transformers.__version__}"
        self._torch, self._transformers, self._folder, self._batch_tokens = torch, transformers, folder, max_batch_tokens
        self._model = self._load()
        self._paged_model: Any = None

    def _load(self) -> Any:
        load = self._transformers.AutoModelForCausalLM.from_pretrained
        return load(self._folder, dtype=self._torch.float32, attn_implementation="sdpa").eval()

    def prepare(self, prompts: Prompts, new_tokens: int) -> None:
        """Nothing: every call makes its own cache."""

    def generate(self, way: str, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        if way == "hf continuous batching":
            return self._continuous(prompts, new_tokens)
        if way == "hf generate":
            return self._padded(prompts, new_tokens)
        return [self._padded([prompt], new_tokens)[0] for prompt in prompts]

    def _padded(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        """One batch, padded on the left to its longest prompt."""
        torch = self._torch
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=mask, generation_config=self._config(new_tokens))
        return [tokens.tolist() for tokens in out[:, longest:]]

    def _continuous(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        """All prompts through the continuous-batching manager, with the same budget of tokens a step as ours."""
        if self._paged_model is None:  # one for itself: continuous batching changes the attention of the one that it is given
            self._paged_model = self._load()
        blocks = sum(-(-(len(prompt) + new_tokens) // BLOCK_SIZE) for prompt in prompts) + SPARE_BLOCKS
        config = self._transformers.ContinuousBatchingConfig(page_size=BLOCK_SIZE, num_blocks=blocks, max_batch_tokens=self._batch_tokens)
        results = self._paged_model.generate_batch(
            inputs=prompts, generation_config=self._config(new_tokens), continuous_batching_config=config, progress_bar=False
        )
        return [result.generated_tokens for result in results.values() if len(result.generated_tokens) == new_tokens]

    def _config(self, new_tokens: int) -> Any:
        return self._transformers.GenerationConfig(
            max_new_tokens=new_tokens, min_new_tokens=None, do_sample=False, eos_token_id=None, pad_token_id=0
        )


if __name__ == "__main__":
    serve(HuggingFace)
