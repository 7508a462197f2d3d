"""llama.cpp as a peer, through the low-level API of llama-cpp-python: one batch a step, a sequence id for every request.

llama.cpp reads GGUF files only. So the folder of weights is written as one first, in float32 and in this process, and KV
is float32 too (llama.cpp would choose float16), as it is everywhere in the table. A batch holds as many tokens of the
prompts as a step of minikv; then every request decodes one token a step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lines import Prompts, serve

FLOAT32 = 0  # GGML_TYPE_F32
# Hugging Face's names for the parts of a layer -> GGUF's.
PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}


def write_gguf(folder: str, path: Path) -> None:
    """The Qwen3 model in the Hugging Face ``folder`` as a GGUF file in float32, without a vocabulary."""
    import gguf
    from safetensors import safe_open

    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("none")
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="numpy") as weights:
            for name in weights.keys():  # noqa: SIM118  it is no dictionary
                writer.add_tensor(_gguf_name(name), weights.get_tensor(name).astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    if name in WHOLE:
        return WHOLE[name]
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{PARTS[part.removesuffix('.weight')]}.weight"


class LlamaCpp:
    """The peer over the model in ``folder``."""

    alone = together = ("llama.cpp",)

    def __init__(self, folder: str, threads: int, max_batch_tokens: int, **_: Any) -> None:
        import llama_cpp
        import numpy

        self.version = f"llama-cpp-python {llama_cpp.__version__}, F32 weights and KV"
        self._llama, self._numpy, self._threads, self._batch_tokens = llama_cpp, numpy, threads, max_batch_tokens
        self._silent = llama_cpp.llama_log_callback(lambda level, text, data: None)  # must live as long as the library
        llama_cpp.llama_log_set(self._silent, None)
        llama_cpp.llama_backend_init()
        path = Path(folder) / "gguf" / "model.gguf"  # goes with the folder
        path.parent.mkdir(exist_ok=True)
        write_gguf(folder, path)
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError("llama.cpp could not load the GGUF file that was written for it")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(max_batch_tokens, 0, 1)
        self._context: Any = None
        self._room = (0, 0)

    def prepare(self, prompts: Prompts, new_tokens: int) -> None:
        """A context with room for these requests, or the one there is, emptied."""
        llama = self._llama
        room = (len(prompts), max(len(prompt) for prompt in prompts) + new_tokens)
        if room == self._room:
            llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
            return
        if self._context:
            llama.llama_free(self._context)
        options = llama.llama_context_default_params()
        options.n_seq_max = len(prompts)
        options.n_ctx = len(prompts) * -(-room[1] // 256) * 256  # shared out evenly, and in pieces of 256
        options.n_batch = options.n_ubatch = self._batch_tokens
        options.n_threads = options.n_threads_batch = self._threads
        options.type_k = options.type_v = FLOAT32
        options.no_perf = True
        self._context = llama.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError(f"llama.cpp could not make a context of {options.n_ctx} tokens")
        self._room = room

    def generate(self, way: str, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in prompts]
        waiting = [
            (number, place, token, place == len(prompt) - 1)
            for number, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]  # fmt: skip
        for first in range(0, len(waiting), self._batch_tokens):
            self._step(waiting[first : first + self._batch_tokens], outputs)
        for done in range(1, new_tokens):
            entries = [(number, len(prompts[number]) + done - 1, tokens[-1], True) for number, tokens in enumerate(outputs)]
            self._step(entries, outputs)
        return outputs

    def _step(self, entries: list[tuple[int, int, int, bool]], outputs: list[list[int]]) -> None:
        """One batch of (request, position, token, whether its logits are wanted); the greedy tokens go to ``outputs``."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for row, (number, place, token, wanted) in enumerate(entries):
            batch.token[row], batch.pos[row], batch.logits[row] = token, place, wanted
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, number
        status = self._llama.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode of {len(entries)} tokens returned {status}")
        for row, (number, _, _, wanted) in enumerate(entries):
            if wanted:
                logits = self._llama.llama_get_logits_ith(self._context, row)
                outputs[number].append(int(self._numpy.ctypeslib.as_array(logits, (self._vocab,)).argmax()))

    def sessions(self, **loop: Any) -> list[dict[str, Any]]:
        raise NotImplementedError("llama.cpp shares no prefixes between sequences by itself")


if __name__ == "__main__":
    serve(LlamaCpp)
