"""stream text from a model

Continues each prompt in turn on one engine, so that a later prompt finds what it shares with an earlier one."""

from __future__ import annotations

import argparse
import sys

from minikv.errors import RequestError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="+", help="text to continue")
    parser.add_argument("--model", metavar="PATH", help="a Hugging Face folder (default: the bundled model)")
    parser.add_argument("--chat", action="store_true", help="put each prompt through the model's chat template")
    parser.add_argument("--max-new-tokens", type=int, default=40, metavar="N", help="default 40")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (the default) is greedy")
    parser.add_argument("--top-k", type=int, default=0, metavar="K")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--seed", type=int, help="the same seed gives the same text")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before this text (may be repeated)")
    parser.add_argument("--device", default="cpu", help="default cpu")


def run(arguments: argparse.Namespace) -> int:
    import minikv

    model = minikv.load(arguments.model, device=arguments.device)
    if model.tokenizer is None:
        raise RequestError(f"{arguments.model} has no tokenizer.json, so its tokens cannot be shown as text")
    engine = minikv.Engine(model)
    sampling = minikv.Sampling(
        arguments.max_new_tokens, arguments.temperature, arguments.top_k, arguments.top_p,
        seed=arguments.seed, stop=tuple(arguments.stop),
    )  # fmt: skip
    engine.generate([model.tokenizer.encode("a")[:1]], minikv.Sampling(max_new_tokens=2))  # load what is compiled, before any clock
    for number, prompt in enumerate(arguments.prompt):
        if arguments.chat:
            rendered = model.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
            engine.add(number, model.tokenizer.encode(rendered, special_tokens=False), sampling)
        else:
            engine.add(number, prompt, sampling)
        print(prompt, end="\n" if arguments.chat else "", flush=True)
        output = None
        while engine.has_work:
            for output in engine.step():
                print(output.new_text, end="", flush=True)
        print()
        assert output is not None
        assert output.ttft_s is not None
        decode_s = output.token_times_s[-1] - output.ttft_s
        speed = f"{(len(output.tokens) - 1) / decode_s:,.0f} tokens/s after it" if decode_s > 0 else "one token"
        prompt_tokens = output.cached_tokens + output.computed_tokens - (len(output.tokens) - 1)
        print(
            f"  {prompt_tokens} prompt tokens, {output.cached_tokens} of them cached; first token after "
            f"{1000 * output.ttft_s:,.1f} ms, {speed}; ended by {output.finish_reason}",
            file=sys.stderr,
        )
    return 0
