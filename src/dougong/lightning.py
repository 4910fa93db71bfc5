"""Lightning under `dougong run`: `Trainer(callbacks=[DougongCallback()])`."""

from dougong.run.frameworks.lightning import DougongCallback

__all__ = ["DougongCallback"]
