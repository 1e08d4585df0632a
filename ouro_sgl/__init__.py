"""ouro_sgl: a serving runtime for looped language models.

``Engine`` runs a model inside a program, ``RuntimeEndpoint`` talks to a server from SGLang's
frontend language. Both are loaded on first use: importing the package alone loads nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ouro_sgl.endpoint import RuntimeEndpoint as RuntimeEndpoint
    from ouro_sgl.engine import Engine as Engine

__version__ = "0.1.0"
__all__ = ["Engine", "RuntimeEndpoint", "__version__"]

_HOMES = {"Engine": "ouro_sgl.engine", "RuntimeEndpoint": "ouro_sgl.endpoint"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
