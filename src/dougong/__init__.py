"""Dougong: plan, accept, share, run and judge the infrastructure that large models are trained and served on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dougong.run.attach import attach as attach

__version__ = "0.1.0"
__all__ = ["__version__", "attach"]


def __getattr__(name: str) -> Any:
    # torch is heavy, so it is imported only by a script that attaches
    if name == "attach":
        try:
            from dougong.run.attach import attach
        except ModuleNotFoundError as error:
            if error.name in ("torch", "numpy"):
                from dougong.errors import MissingExtra

                raise MissingExtra(error.name, extra="train", needed_for="dougong.attach") from None
            raise
        return attach
    raise AttributeError(f"module 'dougong' has no attribute {name!r}")
