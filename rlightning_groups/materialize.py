"""Modules that were built on the meta device made real: equal initial weights whatever they are cut over."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlightning_groups.collectives import broadcast_object
from rlightning_groups.errors import LayoutError
from rlightning_groups.modes import ParallelMode
from rlightning_groups.sharding import copy_marks, shard_spec

__all__ = ["materialize"]


@torch.no_grad()
def materialize(
    module: nn.Module,
    device: torch.device | str = "cpu",
    on_ready: Callable[[nn.Module], object] | None = None,
) -> None:
    """Give every parameter and buffer on the meta device memory and its initial value.

    Each submodule that has some is initialised in full by its own ``reset_parameters``, in the order of
    ``module.modules()``, and cut to what this rank holds at once. All ranks draw from rank 0's default
    generator, so that a sharded weight is a slice of the full initial weight. A collective over GLOBAL where
    there is something to do.

    Args:
        module: the model; its parameters may be DTensors or marked plain tensors. Those on the meta device
            are replaced: make optimizers afterwards.
        device: where the new tensors go.
        on_ready: called with each submodule as soon as nothing in it is on the meta device.

    Raises:
        LayoutError: submodules with tensors on the meta device have no ``reset_parameters``; all are named.
    """
    waiting = [(name, one) for name, one in module.named_modules() if _on_meta(one)]
    mute = [
        f"{name or 'the module itself'} ({type(one).__name__})" for name, one in waiting if not _resets(one)
    ]
    if mute:
        raise LayoutError(
            f"{', '.join(mute)}: built on the meta device, without a reset_parameters() that gives the "
            f"tensors their values. Write that method, or build on a real device"
        )
    if waiting:
        torch.set_rng_state(broadcast_object(torch.get_rng_state(), 0, ParallelMode.GLOBAL))
    made: dict[int, Tensor] = {}  # tied tensors stay tied

    def visit(one: nn.Module) -> None:
        if _on_meta(one):
            _materialize_own(one, torch.device(device), made)
        for child in one.children():
            visit(child)
        if on_ready is not None:
            on_ready(one)

    visit(module)


def _on_meta(module: nn.Module) -> bool:
    return bool(_own_on_meta(module))


def _own_on_meta(module: nn.Module) -> dict[str, Tensor]:
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {name: tensor for name, tensor in own if tensor.is_meta}


def _resets(module: nn.Module) -> bool:
    return callable(getattr(module, "reset_parameters", None))


def _materialize_own(module: nn.Module, device: torch.device, made: dict[int, Tensor]) -> None:
    before = _own_on_meta(module)
    for name, tensor in before.items():
        full = torch.empty(shard_spec(tensor).global_shape, dtype=tensor.dtype)
        _put(module, name, full, tensor)
    module.reset_parameters()  # type: ignore[operator]  # asked for before
    for name, tensor in before.items():
        if id(tensor) not in made:
            full = getattr(module, name).detach()
            local = full[shard_spec(tensor).region.slices].to(device, copy=True).contiguous()
            made[id(tensor)] = _put(module, name, _like(local, tensor), tensor)
        elif isinstance(tensor, nn.Parameter):
            module.register_parameter(name, made[id(tensor)])  # type: ignore[arg-type]
        else:
            module._buffers[name] = made[id(tensor)]


def _like(local: Tensor, tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _put(module: nn.Module, name: str, value: Tensor, like: Tensor) -> Tensor:
    """Put a tensor in another one's place, as a parameter if that is one, with its marks."""
    if isinstance(like, nn.Parameter):
        value = nn.Parameter(value, requires_grad=like.requires_grad)
        module._parameters[name] = value
    else:
        module._buffers[name] = value
    copy_marks(like, value)
    return value
