"""DeviceMesh views over groups that exist already: DTensor and FSDP without another communicator."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh

from rlightning_groups.errors import LayoutError, ModeError
from rlightning_groups.layout import ParallelLayout


def mesh_of_groups(
    layout: ParallelLayout, rank: int, groups: Mapping[str, ProcessGroup], device_type: str
) -> DeviceMesh:
    """A mesh whose dims are the given modes, made from the groups themselves.

    Args:
        layout: who sits where.
        rank: world rank of this process.
        groups: mode to this rank's group, outermost mesh dim first.
        device_type: ``"cpu"``, ``"cuda"``, ...

    Returns:
        A mesh with one dim per mode, named after it in lower case; it holds the ranks that this rank reaches
        by moving along those modes.

    Raises:
        ModeError: a mode spans an axis that another one spans too, or one without axes among several.
        LayoutError: a group's ranks are not those that the layout gives the mode.
    """
    names = tuple(mode.lower() for mode in groups)
    if len(groups) == 1:
        ((mode, group),) = groups.items()
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=names)

    spans = {mode: layout.axes_of(mode) if mode in layout.modes else () for mode in groups}
    axes = [axis for span in spans.values() for axis in span]
    if not all(spans.values()) or len(set(axes)) != len(axes):
        told = ", ".join(f"{mode} spans {'x'.join(span) or 'no axis'}" for mode, span in spans.items())
        raise ModeError(f"a mesh needs modes over different axes of the layout, but {told}")
    for mode, group in groups.items():
        expected = layout.ranks_in_group(mode, rank)
        if get_process_group_ranks(group) != expected:
            raise LayoutError(
                f"the {mode} group holds ranks {get_process_group_ranks(group)}, the layout says {expected}"
            )

    # All world ranks by axis, slowest first; then this rank's place on the axes that no mode spans.
    sizes = layout.sizes
    names_of_axes = list(reversed(layout.axes))
    ranks = torch.arange(layout.world_size).view([sizes[axis] for axis in names_of_axes])
    own = layout.coordinates(rank)
    for dim in reversed(range(len(names_of_axes))):
        if names_of_axes[dim] not in axes:
            ranks = ranks.select(dim, own[names_of_axes[dim]])
    left = [axis for axis in names_of_axes if axis in axes]
    ordered = [[axis for axis in left if axis in span] for span in spans.values()]
    ranks = ranks.permute([left.index(axis) for span in ordered for axis in span])
    ranks = ranks.reshape([dist.get_world_size(group) for group in groups.values()])
    return DeviceMesh.from_group(
        list(groups.values()), device_type, mesh=ranks.to(torch.int), mesh_dim_names=names
    )
