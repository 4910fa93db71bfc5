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

    def can_return(self, component: str) -> bool:
        """Could a lost node be used again? Its agent is then asked for, and has to come by itself."""
        ...


class FaultDoor(Protocol):
    """How a chaos schedule reaches the real processes of a node."""

    def kill_node(self, component: str) -> None:
        """The node dies at once: agent, workers, and all that its memory held. It stays unreachable."""
        ...

    def return_node(self, component: str) -> None:
        """A node that was killed can be reached again, with nothing on it."""
        ...

    def killed_nodes(self) -> tuple[str, ...]:
        """Those that were killed and have not returned, the first first."""
        ...

    def kill_agent(self, component: str) -> None:
        """Only the agent dies."""
        ...

    def jump_clock(self, component: str, *, jump_s: float) -> None:
        """The wall clock of a node, or of the controller, jumps; forward if positive."""
        ...

    def cut(self, component: str, peer: str) -> None:
        """Packets between a node and a peer are lost silently. Raises OSError where nodes share one network."""
        ...

    def heal(self, component: str, peer: str) -> None:
        """They arrive again."""
        ...
