"""A batch as bytes: msgpack of groups of trajectories, the one form in which a batch reaches the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import msgpack

from pearl.core.trajectory import Trajectory, trajectory_from_wire, trajectory_to_wire


def pack_groups(groups: Sequence[Sequence[Trajectory]]) -> bytes:
    """Pack once, send the same bytes to every rank."""
    return msgpack.packb([[trajectory_to_wire(trajectory) for trajectory in group] for group in groups])


def unpack_groups(data: bytes) -> list[list[Trajectory]]:
    """Inverse of `pack_groups`; raises ValueError if `data` is anything else."""
    try:
        return [[trajectory_from_wire(wire) for wire in group] for group in msgpack.unpackb(data)]
    except (KeyError, TypeError, ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"these {len(data)} bytes are no batch ({error!r})") from error
