"""The one place that touches what torch keeps private, and why each touch is needed.

Torch's own ``new_group`` names a group by a counter of the process, or by a hash in which that counter
takes part; both break as soon as two ranks have made unequal numbers of groups. Naming a group explicitly
is only possible one level below.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

__all__ = [
    "PrefixStore",
    "Store",
    "accelerator_type",
    "default_backend",
    "default_store",
    "default_timeout",
    "describe",
    "forget_meshes",
    "group_timeout",
    "is_registered",
    "is_strided",
    "known_groups",
    "launcher_store",
    "new_named_group",
    "mesh_is_alive",
    "new_store_of_one",
    "seed_dtensor",
    "settled",
    "share_overflow",
]


def default_store() -> Store:
    """The store through which the default group was made."""
    return c10d._get_default_store()


def launcher_store(rank: int, world_size: int, timeout: timedelta) -> Store:
    """The store that the launcher's environment variables lead to, without waiting for the other ranks.

    torchrun's agent serves one; under other launchers rank 0 does, at MASTER_ADDR and MASTER_PORT.
    """
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=serves,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=serves,
    )
    return store


def new_store_of_one() -> Store:
    """A store inside this process."""
    store: Store = dist.HashStore()  # type: ignore[attr-defined]
    return store


def default_timeout(backend: str) -> timedelta:
    """The timeout torch gives a group of this backend when nobody asks for one."""
    return c10d._get_default_timeout(dist.Backend(backend))


def default_backend() -> str:
    """The backend string of the default group, e.g. ``gloo`` or ``cpu:gloo,cuda:nccl``."""
    return str(c10d._world.pg_map[c10d._get_default_group()][0])


def new_named_group(
    ranks: Sequence[int],
    *,
    name: str,
    backend: str,
    timeout: timedelta,
    options: Any,
    description: str,
) -> ProcessGroup:
    """Make a process group under a name that its members derive by themselves; only members call this.

    Args:
        ranks: world ranks; the position in this list is the group rank.
        name: the group's name, equal on all members and never used before in this world.
        backend: a torch backend string.
        timeout: how long a collective may take.
        options: backend options, or ``None`` for the backend's defaults.
        description: what ``group.group_desc`` says.
    """
    default = c10d._get_default_group()
    # A default group bound to a device makes NCCL split its communicator, which is a collective of the
    # whole world; members alone can only make a communicator of their own.
    bound = default.bound_device_id
    if bound is not None:
        default.bound_device_id = None
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(default.rank()),
            list(ranks),
            dist.Backend(backend),
            default_store(),
            name,  # type: ignore[arg-type]  # GroupName is a NewType of str in some versions
            options,  # by position: its name has changed
            timeout=timeout,
            group_desc=description,
        )
    finally:
        if bound is not None:
            default.bound_device_id = bound
    assert isinstance(group, ProcessGroup)
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def is_registered(group: ProcessGroup) -> bool:
    """Whether torch still knows this group (it does not after a ``destroy_process_group``)."""
    return group in c10d._world.pg_map


def group_timeout(group: ProcessGroup) -> timedelta | None:
    """How long a collective of a group may take, ``None`` where its backend does not tell."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def describe(group: ProcessGroup, description: str) -> None:
    """Set what ``group.group_desc`` says."""
    group._set_group_desc(description)


def is_strided(placement: object) -> bool:
    """Whether a placement cuts along its dim what later mesh dims have left, as FSDP over TP does."""
    from torch.distributed.tensor.placement_types import _StridedShard  # torch.distributed.tensor is slow

    return isinstance(placement, _StridedShard)


def share_overflow(scaler: torch.amp.GradScaler, group: ProcessGroup) -> None:
    """Make a gradient scaler take what is infinite on one rank of a group for infinite on all.

    Torch's own check covers this process's gradients, and refuses plain tensors beside DTensors.

    Args:
        scaler: changed in place; once is enough.
        group: the ranks that share the scaler's steps.
    """

    def unscale(
        optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = found_inf.clone()
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in (p for options in optimizer.param_groups for p in options["params"]):
            if parameter.grad is None:
                continue
            gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
            if gradient.dtype == torch.float16 and not allow_fp16:
                raise ValueError("gradients in float16 cannot be unscaled; keep the parameters in float32")
            values = gradient._values() if gradient.is_sparse else gradient
            by_kind.setdefault((values.device, values.dtype), []).append(values)
        for (device, _), gradients in by_kind.items():
            here = found.to(device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, here, inv_scale.to(device))
            found = torch.maximum(found, here.to(found.device))
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        return {found.device: found}

    scaler._unscale_grads_ = unscale  # type: ignore[method-assign]


def mesh_is_alive(mesh: DeviceMesh) -> bool:
    """Whether all groups of a mesh are still there."""
    try:
        return all(is_registered(group) for group in mesh.get_all_groups())
    except (RuntimeError, KeyError, ValueError):
        return False


def settled(tensor: Tensor) -> Tensor:
    """A tensor whose collective has ended; DTensor hands out tensors that still wait for theirs."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def forget_meshes() -> None:
    """Clear DTensor's caches; call it when groups that meshes were made of are gone.

    Two meshes over equal ranks compare equal, so a cache would answer for a new one with the old one, whose
    groups are dead.
    """
    tensor = sys.modules.get("torch.distributed.tensor")
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    if tensor is None or redistribute is None:
        return
    # The public function for this, in torch.distributed.tensor.debug, takes seconds to import.
    dispatcher = tensor.DTensor._op_dispatcher
    dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    redistribute._gen_transform_infos.cache_clear()
    if utils := sys.modules.get("torch.distributed.tensor._collective_utils"):
        utils.MeshTopoInfo.build_from_mesh.cache_clear()
    for owner, name in (
        (torch._C, "_clear_DTensor_sharding_propagator_cache"),
        (redistribute, "clear_redistribute_planner_cache"),
    ):
        getattr(owner, name, lambda: None)()  # newer versions of torch have more caches


def seed_dtensor(seed: int, mesh: DeviceMesh) -> None:
    """Seed the generator states that DTensor's random operations keep on an accelerator."""
    if tensor_random := sys.modules.get("torch.distributed.tensor._random"):
        tensor_random.manual_seed(seed, mesh)


def known_groups() -> list[ProcessGroup]:
    """Every process group torch knows in this process."""
    return list(c10d._world.pg_map)


def accelerator_type() -> str | None:
    """Device type of the accelerator at hand, ``None`` on a machine without one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if accelerator is None else accelerator.type
