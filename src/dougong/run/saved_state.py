"""The state that a rank goes on from: from its own memory, from a copy of another node's, or from durable storage."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import torch

from dougong.errors import CheckpointDamaged
from dougong.run import manifest
from dougong.run.copy_store import kept_for
from dougong.run.dcp_read import DurableState
from dougong.run.group import default_group
from dougong.run.place import WorkerPlace
from dougong.run.put_in import tree_in_place
from dougong.run.reshard import state_for
from dougong.run.sealed import UnsealedPlace, load_sealer
from dougong.run.sharding import Sharding
from dougong.run.snapshot import Slot, SnapshotFiles

ADOPT_BYTES = 64 * 2**20
"""From this size on a new process lives in the snapshot it is restored from instead of copying it."""


class SavedState:
    """What the place of a rank says to restore. `is_fresh`: nothing was restored in this process before."""

    def __init__(
        self,
        place: WorkerPlace,
        files: SnapshotFiles,
        parts: dict[str, Any],
        sharding: Sharding,
        *,
        is_fresh: bool,
    ) -> None:
        self._place = place
        self._files = files
        self._parts = parts
        self._sharding = sharding
        self._is_fresh = is_fresh

    def tree(self) -> tuple[Slot | None, dict[str, Any] | None]:
        """The slot whose memory the tensors live in from now on, if so, and the state. Raises CheckpointDamaged."""
        match self._place.restore_source:
            case "none":
                return None, None
            case "memory" | "peer":  # a peer's copy was fetched into this node's memory before the start
                return self._tree_from_memory()
            case "durable":
                return None, self._durable_tree()

    def _durable_tree(self) -> dict[str, Any]:
        """From a checkpoint of whatever world size. All ranks come here together, unless some stay."""
        group = default_group()
        is_together = self._is_fresh and not (group is not None and group.is_alone)
        with self.durable() as saved:
            return state_for(
                self._parts,
                sharding=self._sharding,
                saved=saved,
                is_read_once=self._place.is_read_once and is_together,
            )

    def durable(self) -> DurableState:
        """The durable checkpoint, opened. Raises OSError, and CheckpointDamaged if there is none any more."""
        place = self._place
        storage, root = manifest.storage_at(place.checkpoint_url)
        directory = place.restore_directory
        storage = UnsealedPlace(storage, load_sealer(place.checkpoint_key) if place.checkpoint_key else None)
        saved_size = place.restore_world_size or manifest.read_manifest(place.checkpoint_url, directory).world_size
        return DurableState(storage, f"{root}/{directory}", world_size=saved_size)

    def _tree_from_memory(self) -> tuple[Slot | None, dict[str, Any]]:
        files, slot = self.slot()
        is_fresh = self._is_fresh and files is self._files
        is_adopted = is_fresh and slot.num_bytes >= ADOPT_BYTES and not torch.cuda.is_available()
        if is_adopted:
            tree = tree_in_place(verified(files, slot, is_adopted=True), self._parts, is_adopted=True)
        else:
            tree = verified_tree(files, slot, self._parts)
        # the agent did that, but a rank that stays may have finished a copy since
        self._files.void_newer(generation=slot.generation, step=slot.step)
        return (slot if is_adopted else None), tree

    def slot(self) -> tuple[SnapshotFiles, Slot]:
        """Among the rank's own checkpoints, or, where these have moved on, a copy that the node keeps.

        Such a copy is read, never lived in. Raises CheckpointDamaged if there is neither.
        """
        place = self._place
        try:
            return self._files, self._files.find(step=place.restore_step, generation=place.restore_generation)
        except CheckpointDamaged:
            return kept_for(place.rank, place.node, generation=place.restore_generation, step=place.restore_step)


def verified_tree(files: SnapshotFiles, slot: Slot, parts: dict[str, Any]) -> dict[str, Any]:
    """The state tree of a snapshot, its tensors copied into the live ones.

    Raises CheckpointDamaged, after which these hold anything, so that this process must end; the snapshot is not chosen
    again.
    """
    buffer, comparison = files.compare(slot)
    try:
        tree = tree_in_place(buffer, parts, is_adopted=False, before_read=comparison.advance)
    except (RuntimeError, ValueError, LookupError, TypeError, msgspec.MsgspecError, struct.error):
        if comparison.is_equal():
            raise
    else:
        if comparison.is_equal():
            return tree
    files.void(slot.index)
    raise CheckpointDamaged(str(files.path(slot.index)), reason="checksum differs (xxh3-128)")


def verified(files: SnapshotFiles, slot: Slot, *, is_adopted: bool = False) -> memoryview:
    """The bytes of a snapshot. Raises CheckpointDamaged; then it is not chosen again."""
    try:
        return files.adopt(slot) if is_adopted else files.read_slot(slot)
    except CheckpointDamaged:
        files.void(slot.index)
        raise
