"""Dougong: plan, accept, share, run and judge the infrastructure that large models are trained and served on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dougong.run.attach import attach as attach
    from dougong.run.global_batches import GlobalBatches as GlobalBatches
    from dougong.run.group import init_process_group as init_process_group

__version__ = "0.1.0"
__all__ = ["GlobalBatches", "__version__", "attach", "init_process_group"]
_LAZY = {
    "GlobalBatches": "dougong.run.global_batches",
    "attach": "dougong.run.attach",
    "init_process_group": "dougong.run.group",
}


def __getattr__(name: str) -> Any:
    # torch is heavy, so it is imported only by a script that asks for it
    if name in _LAZY:
        import importlib

        try:
            return getattr(importlib.import_module(_LAZY[name]), name)
        except ModuleNotFoundError as error:
            if error.name in ("torch", "numpy"):
                from dougong.errors import MissingExtra

                raise MissingExtra(error.name, extra="train", needed_for=f"dougong.{name}") from None
            raise
    raise AttributeError(f"module 'dougong' has no attribute {name!r}")
