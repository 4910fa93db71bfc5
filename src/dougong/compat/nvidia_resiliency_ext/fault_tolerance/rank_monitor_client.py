from dougong.run.frameworks.nvrx import RankMonitorClient, RankMonitorClientError

__all__ = ["RankMonitorClient", "RankMonitorClientError"]
