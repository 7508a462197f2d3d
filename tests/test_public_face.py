"""What ``import minikv`` gives, what it does not load, and which wing may import which."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import minikv

ROOT = Path(minikv.__file__).parent
WINGS = ("shape", "compiled", "model", "cache", "tiers", "engine", "cluster", "lab", "serve")  # each imports only from those before it
WITHOUT_TORCH = (
    "minikv", "minikv.errors", "minikv.shape.model_shape", "minikv.cache.blocks", "minikv.cache.prefix", "minikv.cache.step",
    "minikv.engine.scheduler", "minikv.engine.request", "minikv.engine.runner", "minikv.engine.engine", "minikv.engine.metrics",
    "minikv.model.sampling", "minikv.shape.hardware", "minikv.shape.size", "minikv.shape.roofline", "minikv.lab.workload",
    "minikv.lab.cliff", "minikv.lab.simulate", "minikv.lab.replay", "minikv.cli.simulate", "minikv.cli.replay", "minikv.cli.size",
    "minikv.cli.cliff", "minikv.cache.arena", "minikv.lab.car_park",
    "minikv.classroom.claims", "minikv.classroom.audits", "minikv.classroom.notebook", "minikv.classroom.working_copy",
    "minikv.show.widgets", "minikv.cli.learn",
)  # fmt: skip
HEAVY = ("torch", "numpy", "numba", "transformers", "safetensors", "tokenizers", "matplotlib", "jinja2")


def _name(file: Path) -> str:
    return ".".join(("minikv", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


SOURCES = {_name(file): file for file in ROOT.rglob("*.py")}


def fresh(code: str) -> str:
    """What a new Python process prints for ``code``."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---------------------------------------------------------------- nothing heavy


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_arithmetic_and_policy_import_no_torch(module: str) -> None:
    assert fresh(f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])") == "[]"


def test_every_wing_marker_is_empty() -> None:
    """A wing's __init__ that imported its modules would load torch for whoever wants the arithmetic."""
    for wing in (*WINGS, "show", "classroom", "cli"):
        marker = ROOT / wing / "__init__.py"
        assert not marker.exists() or not list(imports(f"minikv.{wing}", marker)), f"{marker} imports something"


def test_policy_runs_without_torch() -> None:
    """The engine is driven to the end by a runner that computes nothing, in a process that has no torch."""
    code = """
import sys
import minikv
from minikv.engine.runner import StepResult

class Nothing:
    num_blocks, block_size, vocab, max_context, tokenizer, stop_tokens = 8, 4, 100, 100, None, ()
    def content(self): return {}
    def weights_changed(self): pass
    def now(self): return 0.0
    def execute(self, plan, now): return StepResult([1] * len(plan.draws), [0.0] * len(plan.draws), now + 1.0)

engine = minikv.Engine(runner=Nothing())
outs = engine.generate([[1, 2, 3], [1, 2, 3, 4, 5]], minikv.Sampling(max_new_tokens=3))
engine.check_integrity()
print([len(out.tokens) for out in outs], minikv.ModelShape is not None, "torch" in sys.modules)
"""
    assert fresh(code) == "[3, 3] True False"


# ---------------------------------------------------------------- the public face


def test_every_public_name_exists_and_is_listed() -> None:
    promised = {"load", "Engine", "Sampling", "ModelShape", "RequestError", "ModelError", "logits"}
    promised |= {"generate_without_cache", "generate_with_cache"}
    assert promised <= set(dir(minikv)) == set(minikv.__all__)
    for name in dir(minikv):
        assert getattr(minikv, name) is not None
    assert issubclass(minikv.RequestError, ValueError)
    assert issubclass(minikv.ModelError, ValueError)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'no_such_thing'"):
        _ = minikv.no_such_thing
    assert not hasattr(minikv, "generate")


def test_star_import_and_submodules_work_in_a_fresh_process() -> None:
    assert fresh("from minikv import *; print(Engine.__name__, load.__name__, Sampling().max_new_tokens)") == "Engine load 16"
    assert fresh("import minikv.cache.blocks as b; print(b.blocks_for(5, 4))") == "2"


# ---------------------------------------------------------------- no import runs back up


def imports(module: str, file: Path, at_run_time: bool = False) -> Iterator[str]:
    """The minikv modules that a file imports, inside functions too; ``at_run_time`` leaves out ``if TYPE_CHECKING``."""
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    tree = ast.parse(file.read_text(encoding="utf-8"))
    if at_run_time:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                node.body = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in SOURCES else origin for alias in node.names]
        yield from (name for name in names if name.split(".")[0] == "minikv")


def wing(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_no_import_runs_back_up_the_wings(module: str) -> None:
    mine = wing(module)
    for other in set(imports(module, SOURCES[module])):
        theirs = wing(other)
        if mine in WINGS:
            assert theirs == "errors" or (theirs in WINGS and WINGS.index(theirs) <= WINGS.index(mine)), f"{module} imports {other}"
        elif mine == "show":
            assert theirs in ("show", "shape", "errors"), f"{module} draws what others hand in, and imports {other}"
        elif mine == "classroom":
            assert theirs in ("", "errors", "show", "classroom", *WINGS), f"{module} teaches, and imports {other}"
        elif mine == "errors":
            raise AssertionError(f"{module} imports {other}")


def test_commands_are_imported_by_nobody_but_the_entry_point() -> None:
    for module, file in SOURCES.items():
        if wing(module) != "cli" and module != "minikv.__main__":
            assert not [other for other in imports(module, file) if wing(other) == "cli"], f"{module} imports a command"


def test_the_model_knows_no_cache_and_policy_no_tensors() -> None:
    assert {wing(name) for m in SOURCES if wing(m) == "model" for name in imports(m, SOURCES[m])} <= {
        "shape",
        "compiled",
        "model",
        "errors",
    }
    for module in ("cache.blocks", "cache.prefix", "cache.step", "engine.scheduler"):
        assert "torch" not in (ROOT / f"{module.replace('.', '/')}.py").read_text().replace("no torch", ""), f"{module} mentions torch"


def test_there_are_no_circles() -> None:
    """Imports of modules, inside functions too, without those for type checkers."""
    graph = {module: set(imports(module, file, at_run_time=True)) - {"minikv"} for module, file in SOURCES.items() if module != "minikv"}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a circle: {' -> '.join([*path[path.index(module) :], module])}"
        if module not in done:
            for other in graph.get(module, ()):
                visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_every_file_belongs_to_a_wing() -> None:
    known = {"", "errors", "__main__", "cli", "show", "classroom", *WINGS}
    assert {wing(module) for module in SOURCES} <= known
