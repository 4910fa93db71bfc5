"""Dougong: plan, accept, share, run and judge the infrastructure that large models are trained and served on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dougong.run.attach import attach as attach
    from dougong.run.global_batches import GlobalBatches as GlobalBatches
    from dougong.run.group import init_process_group as init_process_group
    from dougong.run.hooks import loop as loop
    from dougong.run.log_continuation import keep_mlflow_run as keep_mlflow_run
    from dougong.run.log_continuation import log_directory as log_directory
    from dougong.run.log_continuation import summary_writer as summary_writer

__version__ = "0.1.0"
_LAZY = {
    "GlobalBatches": "dougong.run.global_batches",
    "attach": "dougong.run.attach",
    "loop": "dougong.run.hooks",
    "init_process_group": "dougong.run.group",
    "summary_writer": "dougong.run.log_continuation",
    "log_directory": "dougong.run.log_continuation",
    "keep_mlflow_run": "dougong.run.log_continuation",
}
__all__ = [
    "__version__",
    "attach",
    "loop",
    "init_process_group",
    "GlobalBatches",
    "summary_writer",
    "log_directory",
    "keep_mlflow_run",
]


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
