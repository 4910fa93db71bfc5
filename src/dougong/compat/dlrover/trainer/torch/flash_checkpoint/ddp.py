from dougong.run.frameworks.dlrover import Checkpointer, DdpCheckpointer, StorageType

__all__ = ["Checkpointer", "DdpCheckpointer", "StorageType"]
