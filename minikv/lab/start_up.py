"""From nothing to the first token: what a user waits for before anything has been said.

A fresh process imports torch, reads the weights, and, if the machine has never run minikv, compiles the kernels, which
are kept on disk from then on. So the time is taken twice: with the kept kernels, and with an empty folder in their
place. The first token needs the kernels of prefill, the second those of decode.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from statistics import median
from time import perf_counter

# The clock runs outside, from before the process exists. A line for each token.
PROGRAM = """
import minikv
engine = minikv.Engine(minikv.load(), num_blocks=64)
engine.add("one", "The capital of France is", minikv.Sampling(max_new_tokens=2, ignore_eos=True))
while engine.has_work:
    for output in engine.step():
        print(output.new_tokens, flush=True)
"""


def measure(repeats: int = 3, compile_too: bool = True) -> dict[str, dict[str, float]]:
    """Seconds to the first and second token of the bundled model, by what the machine had: "warm" kernels, or an "empty" folder.

    "warm" is the median of ``repeats`` processes, after one that is not counted. The "empty" folder is tried once,
    unless ``compile_too`` is False.
    """
    seconds_to_tokens(None)
    warm = [seconds_to_tokens(None) for _ in range(repeats)]
    found = {"warm": {name: median(each[name] for each in warm) for name in warm[0]}}
    if compile_too:
        with tempfile.TemporaryDirectory(prefix="minikv-kernels-") as folder:
            found["empty"] = seconds_to_tokens(folder)
    return found


def seconds_to_tokens(kernel_folder: str | None) -> dict[str, float]:
    """One fresh process; compiled kernels are looked for in ``kernel_folder`` (None: where they always are)."""
    environment = dict(os.environ) | ({"NUMBA_CACHE_DIR": kernel_folder} if kernel_folder is not None else {})
    start = perf_counter()
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        times = [perf_counter() - start for _ in process.stdout]
    if process.returncode or len(times) != 2:
        raise RuntimeError(f"a fresh minikv ended with status {process.returncode} after {len(times)} of 2 tokens")
    return {"first_token_s": times[0], "second_token_s": times[1]}
