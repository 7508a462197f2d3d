"""minikv: a small engine that shows what a KV cache is, and the course that builds it.

Everything that a notebook needs is here, imported when it is first used: arithmetic and policy need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "load": "minikv.model.weights",
    "Engine": "minikv.engine.engine",
    "Sampling": "minikv.model.sampling",
    "ModelShape": "minikv.shape.model_shape",
    "RequestError": "minikv.errors",
    "ModelError": "minikv.errors",
    "logits": "minikv.cache.no_cache",
    "generate_without_cache": "minikv.cache.no_cache",
    "generate_with_cache": "minikv.cache.contiguous",
}

__all__ = ["__version__", *_WHERE]

if TYPE_CHECKING:
    from minikv.cache.contiguous import generate_with_cache as generate_with_cache
    from minikv.cache.no_cache import generate_without_cache as generate_without_cache
    from minikv.cache.no_cache import logits as logits
    from minikv.engine.engine import Engine as Engine
    from minikv.errors import ModelError as ModelError
    from minikv.errors import RequestError as RequestError
    from minikv.model.sampling import Sampling as Sampling
    from minikv.model.weights import load as load
    from minikv.shape.model_shape import ModelShape as ModelShape


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'minikv' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
