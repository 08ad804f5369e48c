"""The members of the mesh that a frontend process sees (pure).

`MeshClient` follows the registry and passes each snapshot on. A part that acts on a change has an
`on_snapshot(snapshot, changes)`; a part that only looks members up reads the one `Members` object.

A router may name a worker that discovery does not show here: either a new one, which the frontend
can contact at the address from the router, or one that has left.

Invariant: no instance of the snapshot has left; at most RECENTLY_LEFT_MAX have.
"""

from __future__ import annotations

from common.registry.instances import Snapshot, SnapshotDiff

RECENTLY_LEFT_MAX = 4096


class Members:
    """The newest snapshot, and the instances that left recently."""

    snapshot: Snapshot

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        """Starts with a snapshot; None: no member is known."""
        self.snapshot = Snapshot() if snapshot is None else snapshot
        self._left: dict[int, None] = {}  # oldest first

    def on_snapshot(self, snapshot: Snapshot, changes: SnapshotDiff) -> None:
        self.snapshot = snapshot
        for instance in changes.left:
            self._left[instance.id] = None
        for instance in changes.joined:
            self._left.pop(instance.id, None)
        while len(self._left) > RECENTLY_LEFT_MAX:
            del self._left[next(iter(self._left))]

    def has_left(self, instance_id: int) -> bool:
        """Returns whether an instance was in the mesh and is not any more."""
        return instance_id in self._left
