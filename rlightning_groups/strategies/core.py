"""The strategy's logic, without an import of Lightning.

:class:`HybridParallelCore` stands before Lightning's ``DDPStrategy`` in the bases of one thin class per
namespace, and replaces whatever assumes that the world is one data-parallel group.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from rlightning_groups import _torch_compat
from rlightning_groups._linear_maps import linear
from rlightning_groups.checkpoint import full_state
from rlightning_groups.clipping import clip_grad_norm_, clip_grad_value_
from rlightning_groups.context import ParallelContext, get_group, get_local_rank, get_world_size
from rlightning_groups.errors import ContextError, LayoutError
from rlightning_groups.failures import announce, note
from rlightning_groups.fsdp import set_gradient_sync, shard_fully
from rlightning_groups.gradients import GradientReducer, sum_partial_gradients
from rlightning_groups.layout import ParallelLayout, check_size
from rlightning_groups.materialize import materialize
from rlightning_groups.modes import ParallelMode
from rlightning_groups.random import seed_everything_by_layout, step_rng
from rlightning_groups.replicas import check_replicas, synchronize_replicas
from rlightning_groups.request import seconds
from rlightning_groups.sharding import (
    is_sharded,
    kept_marks,
    local_tensor,
    partial_gradient_modes,
    shard_marks,
)
from rlightning_groups.strategies._callbacks import adapt_callbacks
from rlightning_groups.strategies._checkpoints import CheckpointHooks, is_zero_redundancy
from rlightning_groups.strategies._lightning_compat import LightningNames, names_of

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class HybridParallelCore(CheckpointHooks):
    """Data, sequence and tensor parallelism under one Trainer.

    The groups are ready before ``setup`` and ``configure_model`` run, and stay for as long as the process
    asks for the same sizes. Inside a LightningModule, ``get_group(ParallelMode.X)`` gives the group and
    ``ParallelContext().device_mesh(...)`` a mesh over it.

    Only the data-parallel rank chooses samples: the sampler, and the seeds of dataloader workers, follow it.
    Gradients are averaged over TRAIN_DATA_PARALLEL (data x sequence), by DistributedDataParallel where all
    parameters are plain tensors, by :class:`~rlightning_groups.gradients.GradientReducer` where some are
    DTensors, and by torch's FSDP2 with ``data_parallel="shard"``.

    Args:
        tensor_parallel_size: number of ranks that share one layer's weights.
        sequence_parallel_size: number of ranks that share one sample's tokens.
        data_parallel_size: number of ranks that read different samples; ``"auto"`` takes what is left.
        data_parallel: ``"replicate"`` keeps a copy of the weights on every data- and sequence-parallel rank;
            ``"shard"`` cuts weights, gradients and optimizer state over them.
        shard_units: with ``"shard"``, class names of the modules that are gathered as one; ``None`` takes the
            elements of every ``nn.ModuleList``.
        reshard_after_forward: with ``"shard"``, as in ``torch.distributed.fsdp.fully_shard``.
        param_dtype: with ``"shard"``, dtype of the gathered parameters and so of the computation,
            ``"bfloat16"``, ``"float16"`` or ``"float32"``; ``None`` is their own.
        reduce_dtype: with ``"shard"``, dtype in which gradients are averaged.
        save_distributed_checkpoint: ``False`` writes one file, as Lightning on one device would; ``True`` a
            directory of ``torch.distributed.checkpoint``, to which every rank writes its part.
        async_checkpoint: write distributed checkpoints in the background, from a copy on the CPU.
        order: the axes, fastest first; see :class:`~rlightning_groups.ParallelLayout`.
        timeout: how long a collective may take, in seconds where it is a number; ``None`` is torch's default.
        process_group_backend: torch backend; ``None`` is nccl for CUDA, gloo for CPU.
        find_unused_parameters: as in DistributedDataParallel.
        gradient_as_bucket_view: as in DistributedDataParallel.
        static_graph: as in DistributedDataParallel.
        broadcast_buffers: as in DistributedDataParallel.
        bucket_cap_mb: MiB of gradients in one all-reduce; ``None`` is 25, with a smaller first one
            in DistributedDataParallel.
        ddp_comm_state: as in Lightning's DDPStrategy.
        ddp_comm_hook: as in Lightning's DDPStrategy.
        ddp_comm_wrapper: as in Lightning's DDPStrategy.
        accelerator: set by the Trainer.
        parallel_devices: set by the Trainer.
        cluster_environment: how the processes were launched; found by the Trainer unless given.
        checkpoint_io: how checkpoints are read and written.
        precision_plugin: set by the Trainer's ``precision``.

    Raises:
        LayoutError: a size is not a positive int, the order no permutation, or options that do not go
            together. Sizes that do not fit the world raise it when the world starts.
    """

    _namespace: str

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        sequence_parallel_size: int = 1,
        data_parallel_size: int | Literal["auto"] = "auto",
        data_parallel: Literal["replicate", "shard"] = "replicate",
        shard_units: Sequence[str] | None = None,
        reshard_after_forward: bool | int | None = None,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        save_distributed_checkpoint: bool = False,
        async_checkpoint: bool = False,
        order: str = "tp-sp-dp",
        timeout: timedelta | float | None = None,
        process_group_backend: str | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            process_group_backend=process_group_backend,
            timeout=seconds(timeout),
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            broadcast_buffers=broadcast_buffers,
            bucket_cap_mb=bucket_cap_mb,
        )
        self.tensor_parallel_size = check_size("tensor_parallel_size", tensor_parallel_size)
        self.sequence_parallel_size = check_size("sequence_parallel_size", sequence_parallel_size)
        if isinstance(data_parallel_size, str):
            if data_parallel_size != "auto":
                raise LayoutError(f"data_parallel_size={data_parallel_size!r} must be an int or 'auto'")
            self.data_parallel_size: int | None = None
        else:
            self.data_parallel_size = check_size("data_parallel_size", data_parallel_size)
        # Checked here once, so that a typing mistake does not wait for the cluster.
        self.order = ParallelLayout(1, order=order).order
        self._bucket_cap_mb = 25.0 if bucket_cap_mb is None else bucket_cap_mb
        self._reducer: GradientReducer | None = None
        self._failed = False
        self._summed: dict[int, Tensor] = {}  # marked parameters whose partial gradients were summed already
        if data_parallel not in ("replicate", "shard"):
            raise LayoutError(f"data_parallel={data_parallel!r} must be 'replicate' or 'shard'")
        sharding = {
            "shard_units": shard_units,
            "reshard_after_forward": reshard_after_forward,
            "param_dtype": param_dtype,
            "reduce_dtype": reduce_dtype,
        }
        if data_parallel == "replicate" and (
            given := [k for k, value in sharding.items() if value is not None]
        ):
            raise LayoutError(f"{', '.join(given)}: for data_parallel='shard' only")
        if wrong := [dtype for dtype in (param_dtype, reduce_dtype) if dtype not in (None, *_DTYPES)]:
            raise LayoutError(f"{wrong[0]!r} is no dtype to shard with; use {', '.join(map(repr, _DTYPES))}")
        if async_checkpoint and not save_distributed_checkpoint:
            raise LayoutError("async_checkpoint=True needs save_distributed_checkpoint=True")
        self.data_parallel = data_parallel
        self._shard_options: dict[str, Any] = {
            "units": shard_units,
            "reshard_after_forward": reshard_after_forward,
            "param_dtype": _DTYPES.get(param_dtype or ""),
            "reduce_dtype": _DTYPES.get(reduce_dtype or ""),
        }
        self._save_distributed_checkpoint = save_distributed_checkpoint
        self._asynchronous = async_checkpoint

    @property
    def is_distributed(self) -> bool:
        """Always; Lightning then injects the sampler and synchronizes what is logged with ``sync_dist``."""
        return True

    @property
    def layout(self) -> ParallelLayout:
        """Who sits where.

        Raises:
            ContextError: no Trainer has started yet.
        """
        return ParallelContext().layout

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The sampler deals samples to data-parallel ranks; their tensor and sequence peers see the same."""
        return {
            "num_replicas": get_world_size(ParallelMode.DATA_PARALLEL),
            "rank": get_local_rank(ParallelMode.DATA_PARALLEL),
        }

    @property
    def _names(self) -> LightningNames:
        return names_of(self._namespace)

    # Starting.

    def setup_distributed(self) -> None:
        """Start the world as Lightning does, then the context; runs for every fit, validate and so on."""
        super().setup_distributed()
        context = ParallelContext()
        if context.is_initialized() and not self._fits(context.layout):
            self._refuse_stale_model(groups_change=True)
            self._names.rank_zero_warn(
                f"The process groups are made anew: this Trainer asks for {self._asked()}, but the last one "
                f"left {context.layout}."
            )
            context.destroy()
        if not context.is_initialized():
            assert self.cluster_environment is not None
            context.initialize(
                tensor_parallel_size=self.tensor_parallel_size,
                sequence_parallel_size=self.sequence_parallel_size,
                data_parallel_size=self.data_parallel_size,
                order=self.order,
                timeout=self._timeout,
                node=f"node {self.cluster_environment.node_rank()}",
            )
            announce()
            self._share_seed()
        # Only keeps the seed, from which the streams of the steps are derived.
        seed_everything_by_layout(self.broadcast(torch.initial_seed()), reseed=False)
        self._refuse_stale_model(groups_change=False)

    def _refuse_stale_model(self, groups_change: bool) -> None:
        """A model that is sharded already must have been so over the groups that are here to stay."""
        parameters = self.lightning_module.parameters() if self.lightning_module is not None else ()
        meshes = [parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)]
        if meshes and (groups_change or not all(map(_torch_compat.mesh_is_alive, meshes))):
            raise ContextError(
                f"the model is sharded over groups that are gone: this Trainer asks for {self._asked()}, the "
                f"one that sharded it for others. Make the model anew, and load its checkpoint"
            )

    def _asked(self) -> str:
        data = "auto" if self.data_parallel_size is None else self.data_parallel_size
        return (
            f"data_parallel_size={data}, sequence_parallel_size={self.sequence_parallel_size}, "
            f"tensor_parallel_size={self.tensor_parallel_size}, order={self.order!r}"
        )

    def _fits(self, layout: ParallelLayout) -> bool:
        return (
            layout.tensor_parallel_size == self.tensor_parallel_size
            and layout.sequence_parallel_size == self.sequence_parallel_size
            and self.data_parallel_size in (None, layout.data_parallel_size)
            and (layout.order == self.order or bool(layout.extra_axes))
        )

    def _share_seed(self) -> None:
        """Where the ranks were not seeded alike, start all from rank 0's seed: peers must draw the same."""
        own = (os.environ.get("PL_GLOBAL_SEED"), torch.initial_seed())
        told, seed = self.broadcast(own)
        if self.reduce_boolean_decision((told, seed) == own):
            return
        if told is None:
            os.environ.pop("PL_GLOBAL_SEED", None)
        else:
            os.environ["PL_GLOBAL_SEED"] = told
        seed %= 2**32
        self._names.rank_zero_info(f"The ranks were seeded differently or not at all; all start from {seed}.")
        seed_everything_by_layout(seed)
        if self.lightning_module is not None:
            # Built before the groups were there, so nothing of it is sharded, and every rank drew its own.
            synchronize_replicas(self.lightning_module, get_group(ParallelMode.GLOBAL), self.root_device)

    def setup(self, trainer: Any) -> None:
        """Place the model, make its replicas equal, and prepare what averages the gradients."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        assert self.model is not None
        fitting = trainer.state.fn == "fit"
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
            for layer in self.model.modules():
                if isinstance(layer, nn.SyncBatchNorm):
                    layer.process_group = get_group(ParallelMode.TRAIN_DATA_PARALLEL)
        self.model = self.precision_plugin.convert_module(self.model)
        check_replicas(self.model)
        if self.data_parallel == "shard":
            self._shard(self.model)
        else:
            materialize(self.model, self.root_device)
            with kept_marks(self.model):
                self.model_to_device()
        # Only ranks that hold the same shard are replicas; a broadcast over the world would mix shards.
        synchronize_replicas(self.model, get_group(ParallelMode.TRAIN_DATA_PARALLEL))
        adapt_callbacks(trainer, self.model)
        if fitting:
            if self.data_parallel == "replicate":
                self.configure_ddp()
            self.setup_optimizers(trainer)
            self._check_optimizers()
        self.setup_precision_plugin()
        self._route_precision()
        if fitting:
            self._names.optimizers_to_device(self.optimizers, self.root_device)

    def _shard(self, module: nn.Module) -> None:
        real = [p for p in (*module.parameters(), *module.buffers()) if not p.is_meta]
        if not any(isinstance(module, FSDPModule) for module in module.modules()):
            synchronize_replicas(real, get_group(ParallelMode.TRAIN_DATA_PARALLEL))
        steps = [name for name in _STEPS if hasattr(module, name)]
        shard_fully(module, self.root_device, forward_methods=steps, **self._shard_options)

    def _route_precision(self) -> None:
        """Let the precision plugin's clipping and loss scaling see the full model instead of one shard."""
        plugin = self.precision_plugin
        base = self._names.precision
        if type(plugin).clip_grad_by_norm is base.clip_grad_by_norm:
            plugin.clip_grad_by_norm = partial(self._clip, clip_grad_norm_)  # type: ignore[method-assign]
        if type(plugin).clip_grad_by_value is base.clip_grad_by_value:
            plugin.clip_grad_by_value = partial(self._clip, clip_grad_value_)  # type: ignore[method-assign]
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None:
            _torch_compat.share_overflow(scaler, get_group(ParallelMode.GLOBAL))

    def _clip(self, clip: Callable[..., Any], optimizer: Optimizer, clip_val: float) -> None:
        parameters = _parameters_of(optimizer)
        self._sum_partial_gradients(parameters)
        clip(parameters, clip_val)

    def _sum_partial_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sum those that were not summed since the last step or backward pass."""
        waiting = [p for p in parameters if partial_gradient_modes(p) and id(p) not in self._summed]
        sum_partial_gradients(waiting)
        self._summed.update({id(p): p for p in waiting})

    def configure_ddp(self) -> None:
        """Install what averages gradients: DistributedDataParallel, or the reducer for DTensors."""
        assert isinstance(self.model, nn.Module)
        parameters = list(self.model.parameters())
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            group = get_group(ParallelMode.TRAIN_DATA_PARALLEL)
            self._reducer = GradientReducer(parameters, group, self._bucket_cap_mb)
        elif get_world_size(ParallelMode.TRAIN_DATA_PARALLEL) > 1 and any(
            p.requires_grad for p in parameters
        ):
            super().configure_ddp()

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        options = dict(self._ddp_kwargs)
        if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
            options["forward_sync_buffers"] = options.pop("broadcast_buffers")  # renamed in torch 2.13
        return DistributedDataParallel(
            model,
            device_ids=self.determine_ddp_device_ids(),
            process_group=get_group(ParallelMode.TRAIN_DATA_PARALLEL),
            init_sync=False,  # setup has done it
            **options,
        )

    def _check_optimizers(self) -> None:
        """Refuse what would be wrong; avoid torch's foreach updates where they refuse mixed tensors."""
        train = get_group(ParallelMode.TRAIN_DATA_PARALLEL)
        for optimizer in self.optimizers:
            if is_zero_redundancy(optimizer):
                if any(isinstance(parameter, DTensor) for parameter in _parameters_of(optimizer)):
                    raise LayoutError(
                        "ZeroRedundancyOptimizer sends plain tensors only, and the model has DTensors; "
                        "data_parallel='shard' cuts their optimizer state as well"
                    )
                ranks = dist.get_process_group_ranks(optimizer.process_group)  # type: ignore[attr-defined]
                if ranks != dist.get_process_group_ranks(train):
                    raise LayoutError(
                        f"ZeroRedundancyOptimizer runs over ranks {ranks}, which do not all hold the same "
                        f"weights; give it process_group=get_group(ParallelMode.TRAIN_DATA_PARALLEL)"
                    )
            self._refuse_parts(optimizer)
            for group in optimizer.param_groups:
                kinds = {p.device_mesh if isinstance(p, DTensor) else None for p in group["params"]}
                if (
                    len(kinds) > 1
                    and "foreach" in group
                    and group["foreach"] is None
                    and not group.get("fused")
                ):
                    group["foreach"] = False
                    self._names.rank_zero_info(
                        f"{type(optimizer).__name__} runs with foreach=False: it holds plain tensors beside "
                        f"DTensors, or DTensors over several meshes."
                    )

    def _refuse_parts(self, optimizer: Optimizer) -> None:
        """Refuse torch's optimizers that mix a parameter's elements where they would see one part of them."""
        whole = _SEE_ONE_PART.get(type(optimizer).__name__)
        parts = [p for p in _parameters_of(optimizer) if whole is not None and whole(p)]
        if parts:
            assert self.lightning_module is not None
            name = next(
                (n for n, p in self.lightning_module.named_parameters() if p is parts[0]), "a parameter"
            )
            raise LayoutError(
                f"{type(optimizer).__name__} computes with all elements of a parameter at once, and would "
                f"see this rank's part of {name} alone. Use an optimizer that steps element by element, as "
                f"AdamW or SGD, or keep what it steps whole on every rank"
            )

    # Data.

    def process_dataloader(self, dataloader: object) -> object:
        """Seed the workers by data-parallel rank: peers augment alike, others differ."""
        dataloader = super().process_dataloader(dataloader)
        known = self._names.worker_init_function
        init = getattr(dataloader, "worker_init_fn", None)
        ours = init is None or (isinstance(init, partial) and init.func is known)
        if ours and int(getattr(dataloader, "num_workers", 0)) > 0:
            rank = get_local_rank(ParallelMode.DATA_PARALLEL)
            dataloader.worker_init_fn = partial(known, rank=rank)  # type: ignore[attr-defined]
        return dataloader

    # Steps.

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on its own random stream: equal on tensor-parallel peers, other for other tokens."""
        assert self.lightning_module is not None
        with step_rng(self.lightning_module.trainer.fit_loop.total_batch_idx):
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on its own random stream."""
        with self._evaluation(), step_rng(_batch_index(args), "validation"):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on its own random stream."""
        with self._evaluation(), step_rng(_batch_index(args), "test"):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on its own random stream; predictions that are DTensors come back in full."""
        with self._evaluation(), step_rng(_batch_index(args), "predict"):
            return full_state(super().predict_step(*args, **kwargs), device=None)

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        if self.data_parallel == "replicate":
            yield
        else:
            # FSDP's buffers outlive the step, and tensors of an inference mode could not be trained with.
            with torch.inference_mode(False), torch.no_grad():
                yield

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Step, with the partial gradients of marked parameters summed first: before unscaling and clipping.

        Args:
            optimizer: one of the Trainer's.
            closure: runs the forward and backward passes.
            model: as in Lightning.
            **kwargs: as in Lightning.
        """
        parameters = _parameters_of(optimizer)

        def closure_and_sum() -> Any:
            result = closure()
            self._sum_partial_gradients(parameters)
            return result

        result = super().optimizer_step(optimizer, closure_and_sum, model, **kwargs)
        for parameter in parameters:
            self._summed.pop(id(parameter), None)
        return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate gradients."""
        if self.data_parallel == "shard":
            assert self.model is not None
            set_gradient_sync(self.model, False)
            try:
                yield
            finally:
                set_gradient_sync(self.model, True)
        elif self._reducer is not None:
            with self._reducer.no_sync():
                yield
        else:
            with super().block_backward_sync():
                yield

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Get ready for a backward pass."""
        if self._reducer is not None:
            self._reducer.reset()
        # What was summed, for clipping say, is going to be added to: each rank takes its share back.
        for parameter in self._summed.values():
            if parameter.grad is not None:
                parts = [get_world_size(mode) for mode in partial_gradient_modes(parameter)]
                local_tensor(parameter.grad).div_(math.prod(parts))
        self._summed.clear()
        super().pre_backward(closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Make sure that this rank took part in the average."""
        if self._reducer is not None:
            self._reducer.flush()
        super().post_backward(closure_loss)

    # Collectives that Lightning and its users call.

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank of the world.

        Args:
            name: ignored; part of Lightning's signature.
        """
        if dist.is_initialized() and not self._saves_alone:
            devices = self.determine_ddp_device_ids() if dist.get_backend() == "nccl" else None
            dist.barrier(device_ids=devices)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give every rank of the world the object of one of them.

        Args:
            obj: any picklable object.
            src: world rank to take it from.
        """
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over ranks; the argument is left as it is.

        Args:
            tensor: a tensor, a DTensor in full; anything else is returned as it is.
            group: a process group; ``None`` is TRAIN_DATA_PARALLEL, so that a sum counts what
                tensor-parallel peers hold in common once.
            reduce_op: ``"mean"`` or ``"avg"``, ``"sum"`` or any other operation of torch by name or value;
                ``None`` is a sum. The mean of integers is a float.
        """
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        tensor = full_state(tensor, device=None)
        group = get_group(ParallelMode.TRAIN_DATA_PARALLEL) if group is None else group
        op, mean = _reduce_op(reduce_op)
        result = tensor.detach().clone(memory_format=torch.contiguous_format).to(self.root_device)
        dist.all_reduce(result, op=op, group=group)
        return result / dist.get_world_size(group) if mean else result

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of all ranks of a group.

        Args:
            tensor: one shape on all ranks; a DTensor in full.
            group: a process group; ``None`` is TRAIN_DATA_PARALLEL, as in :meth:`reduce`, and so is torch's
                world, which ``LightningModule.all_gather`` passes where it is given none. What all ranks
                have, copies included, :func:`~rlightning_groups.collectives.all_gather` puts together.
            sync_grads: let gradients flow back to the ranks the parts came from.

        Returns:
            A tensor with one more dim, the first, of the group's size.
        """
        if not dist.is_initialized():
            return tensor
        if isinstance(tensor, DTensor):
            tensor = _torch_compat.settled(tensor.full_tensor())  # full_state would cut the graph
        if group is None or group is dist.group.WORLD:
            group = get_group(ParallelMode.TRAIN_DATA_PARALLEL)
        parts, rank, name = (1,) * dist.get_world_size(group), dist.get_rank(group), group.group_name
        stacked = linear(group, tensor.unsqueeze(0), "gather partial", 0, parts, rank, name)
        return stacked if sync_grads else stacked.detach()

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide together: every rank of the world gets the same answer.

        Args:
            decision: this rank's.
            all: true only when all ranks say so, instead of when any does.
        """
        votes = torch.tensor(int(decision), device=self.root_device)
        votes = self.reduce(votes, group=get_group(ParallelMode.GLOBAL), reduce_op="sum")
        return bool(votes == get_world_size(ParallelMode.GLOBAL)) if all else bool(votes)

    def teardown(self) -> None:
        """Take off what averages gradients; the groups stay for the next call of the Trainer."""
        if not self._failed:
            self.finish_saving()
        self._summed.clear()
        if self._reducer is not None:
            self._reducer.remove()
            self._reducer = None
        if self.cluster_environment is not None:
            marks = kept_marks(self.lightning_module) if self.lightning_module is not None else nullcontext()
            try:
                with marks:
                    super().teardown()
            except Exception:
                # An exception keeps its graph alive, and torch cannot move DTensors that a graph holds, nor
                # what FSDP has gathered.
                if not self._failed:
                    raise
        self._failed = False

    def on_exception(self, exception: BaseException) -> None:
        """Remember it: the teardown that follows must not hide it. Say whose error began it, if not this."""
        self._failed = True
        note(exception)
        super().on_exception(exception)


# Torch's optimizers that mix a parameter's elements, and the parameters with which that goes wrong.
_SEE_ONE_PART: dict[str, Callable[[Tensor], Any]] = {
    "LBFGS": is_sharded,
    "Adafactor": shard_marks,
    "Muon": shard_marks,
}


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _batch_index(args: tuple[Any, ...]) -> int:
    """Lightning passes (batch, batch_idx, ...); iterators over batches pass themselves alone."""
    return args[1] if len(args) > 1 and isinstance(args[1], int) else 0


def _reduce_op(reduce_op: Any) -> tuple[Any, bool]:
    """Torch's operation, and whether to divide by the group's size afterwards."""
    if reduce_op is None:
        return dist.ReduceOp.SUM, False
    name = reduce_op.upper() if isinstance(reduce_op, str) else None
    if name in ("MEAN", "AVG") or reduce_op == dist.ReduceOp.AVG:
        return dist.ReduceOp.SUM, True
    if name is not None:
        if not hasattr(dist.ReduceOp, name):
            raise ValueError(f"reduce_op={reduce_op!r} is not known; use mean, sum, max, min or product")
        return getattr(dist.ReduceOp, name), False
    return reduce_op, False
