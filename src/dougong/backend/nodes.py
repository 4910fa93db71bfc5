"""What the runtime asks of the engine that holds its nodes."""

from __future__ import annotations

from typing import Protocol


class NodeBackend(Protocol):
    """Starts node agents. Slurm, Kubernetes and Ray will have theirs; `local` plays several nodes on one host."""

    def start_agent(self, component: str) -> None:
        """Have an agent run on the node; one that runs already is left alone.

        Raises NodeUnreachable if the node is gone.
        """
        ...

    def end_agent(self, component: str) -> None:
        """End an agent that does not answer, but not its workers."""
        ...

    def fence(self, component: str) -> None:
        """See to it, as far as the engine can, that nothing of the run goes on there: the node counts as lost."""
        ...


class FaultDoor(Protocol):
    """How a chaos schedule reaches the real processes of a node."""

    def kill_node(self, component: str) -> None:
        """The node dies at once: agent, workers, and all that its memory held. It stays unreachable."""
        ...

    def kill_agent(self, component: str) -> None:
        """Only the agent dies."""
        ...
