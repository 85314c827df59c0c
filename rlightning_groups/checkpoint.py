"""Model and optimizer state in full, whatever it is sharded over: one file that any layout reads.

What is written is what a single process would have written: DTensors are gathered, one tensor at a time,
and cut again when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from rlightning_groups._torch_compat import settled


def full_state(state: Any, keep: bool = True, device: torch.device | str | None = "cpu") -> Any:
    """A nest of state with every DTensor replaced by the full tensor.

    A collective over the DTensors' meshes: every rank calls it with the same nest.

    Args:
        state: any nest of dicts, lists and tuples.
        keep: whether this rank wants the result; a rank that does not gets ``None`` for each DTensor.
        device: where the full tensors go; ``None`` leaves them where they are.

    Returns:
        A nest of the same shape.
    """
    if isinstance(state, DTensor):
        full: Tensor = settled(state.full_tensor().detach())
        return full.to(device) if keep else None
    if isinstance(state, Tensor):
        return settled(state)
    if isinstance(state, Mapping):
        return {key: full_state(value, keep, device) for key, value in state.items()}
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(full_state(value, keep, device) for value in state))
    if isinstance(state, (list, tuple)):
        return type(state)(full_state(value, keep, device) for value in state)
    return state


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a full tensor, laid out as another tensor is; no communication.

    Args:
        full: the full tensor, equal on all ranks.
        like: a DTensor whose mesh and placements to follow; for any other tensor ``full`` is returned.

    Returns:
        A DTensor on the device of ``like``, or ``full`` itself.
    """
    if not isinstance(like, DTensor) or isinstance(full, DTensor):
        return full
    mesh = like.device_mesh
    whole = DTensor.from_local(
        full.to(like._local_tensor.device), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    return whole.redistribute(placements=like.placements)


def shard_model_state(state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """A full ``state_dict`` cut to what a module holds on this rank.

    Args:
        state: names to full tensors.
        module: the module that will load it.
    """
    own = module.state_dict()
    return {
        name: shard_like(value, own[name]) if isinstance(value, Tensor) and name in own else value
        for name, value in state.items()
    }


def shard_optimizer_state(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """A full optimizer ``state_dict`` cut to what an optimizer's parameters hold on this rank.

    Args:
        state: as ``Optimizer.state_dict`` gives it, with full tensors.
        optimizer: the optimizer that will load it.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameter_of = dict(zip(numbers, parameters, strict=False))

    def cut(number: int, value: Any) -> Any:
        parameter = parameter_of.get(number)
        if parameter is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value  # step counts and the like; moments have the parameter's shape
        return shard_like(value, parameter)

    return {
        **state,
        "state": {
            number: {key: cut(number, value) for key, value in entries.items()}
            for number, entries in state["state"].items()
        },
    }
