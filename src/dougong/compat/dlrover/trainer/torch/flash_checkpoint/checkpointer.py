from dougong.run.frameworks.dlrover import Checkpointer, StorageType

__all__ = ["Checkpointer", "StorageType"]
