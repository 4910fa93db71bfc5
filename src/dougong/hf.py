"""Hugging Face `Trainer` under `dougong run`: `trainer.add_callback(DougongCallback(trainer))`."""

from dougong.run.frameworks.hf_trainer import DougongCallback

__all__ = ["DougongCallback"]
