"""Fully sharded data parallelism: torch's FSDP2 over TRAIN_DATA_PARALLEL, on top of tensor parallelism."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from rlightning_groups.context import ParallelContext
from rlightning_groups.errors import LayoutError
from rlightning_groups.materialize import materialize
from rlightning_groups.modes import ParallelMode
from rlightning_groups.sharding import kept_marks

__all__ = ["shard_fully"]


def shard_fully(
    module: nn.Module,
    device: torch.device | str = "cpu",
    *,
    units: Collection[str] | None = None,
    reshard_after_forward: bool | int | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    forward_methods: Collection[str] = (),
) -> None:
    """Cut a module's parameters over the data- and sequence-parallel ranks, unit by unit, in place.

    Each unit is gathered for its forward and backward passes and cut again; its gradients are averaged over
    TRAIN_DATA_PARALLEL and cut. Parameters that are DTensors over TENSOR_PARALLEL, or plain tensors marked as
    sharded, are cut further. What is on the meta device becomes real first, one unit at a time. Modules that
    were sharded before stay as they are.

    Args:
        module: the model, equal on all ranks of TRAIN_DATA_PARALLEL.
        device: where the parameters go.
        units: class names of the modules that are units; ``None`` takes the elements of every
            ``nn.ModuleList``. The module itself is always one, of what is left.
        reshard_after_forward: as in ``torch.distributed.fsdp.fully_shard``.
        param_dtype: of the gathered parameters, and so of the computation; ``None`` is their own.
        reduce_dtype: in which gradients are averaged; ``None`` is that of the computation.
        forward_methods: other methods of the module that need its parameters as ``forward`` does.

    Raises:
        LayoutError: no module is of a class in ``units``, or a module on the meta device cannot be made real.
        ContextError, ModeError: the groups are not there.
    """
    mesh = ParallelContext().device_mesh(ParallelMode.TRAIN_DATA_PARALLEL)
    chosen = _units(module, units)
    precision = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}

    def shard(one: nn.Module) -> None:
        if isinstance(one, FSDPModule) or (one is not module and one not in chosen):
            return
        # What comes into the whole model are batches, labels among them; they keep their dtype.
        policy = MixedPrecisionPolicy(**precision, cast_forward_inputs=one is not module)
        with kept_marks(one):
            one.to(device)
            fully_shard(one, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)

    materialize(module, device, shard)
    for method in forward_methods:
        if not hasattr(getattr(module, method), "__wrapped__"):
            register_fsdp_forward_method(module, method)


def _units(module: nn.Module, names: Collection[str] | None) -> set[nn.Module]:
    if names is None:
        lists = [one for one in module.modules() if isinstance(one, nn.ModuleList)]
        # A list in a list holds no module that could be called.
        return {unit for one in lists for unit in one if not isinstance(unit, (nn.ModuleList, nn.ModuleDict))}
    there: dict[str, list[nn.Module]] = {}
    for one in module.modules():
        there.setdefault(type(one).__name__, []).append(one)
    if unknown := [name for name in names if name not in there]:
        raise LayoutError(
            f"no module is of class {', '.join(map(repr, unknown))}; there are {', '.join(sorted(there))}"
        )
    return {unit for name in names for unit in there[name]}


def set_gradient_sync(module: nn.Module, on: bool) -> None:
    """Whether backward passes average gradients, or only accumulate them.

    Args:
        module: what :func:`shard_fully` has cut.
        on: ``False`` while gradients accumulate.
    """
    assert isinstance(module, FSDPModule)
    root: Any = module
    root.set_requires_gradient_sync(on)
