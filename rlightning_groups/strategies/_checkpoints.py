"""The strategy's part in checkpoints: full state by default, resumed under any layout."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from rlightning_groups import _torch_compat
from rlightning_groups.agreement import Statement, agree
from rlightning_groups.checkpoint import (
    gather_state,
    is_directory_checkpoint,
    load_file,
    open_directory,
    save_directory,
    save_file,
    shard_model_state,
    shard_optimizer_state,
    sharded_optimizer_state,
)
from rlightning_groups.collectives import all_gather_object, object_group
from rlightning_groups.context import (
    ParallelContext,
    get_global_rank,
    get_group,
    get_local_rank,
    is_initialized,
)
from rlightning_groups.errors import CheckpointError, GroupsError
from rlightning_groups.group_initializer import GroupInfo, ProcessGroupInitializer, RankListInitializer
from rlightning_groups.modes import ParallelMode
from rlightning_groups.random import rng_state, set_rng_state
from rlightning_groups.sharding import marked_state_dict
from rlightning_groups.strategies._lightning_compat import names_of

if TYPE_CHECKING:
    from pytorch_lightning.strategies import DDPStrategy as _Base
else:
    _Base = object

_RNG_KEY = "rlightning_groups_rng"
_OTHERS_MAY_FAIL = timedelta(seconds=5)  # how long a failing rank waits to hear that all others fail as well

_T = TypeVar("_T")

log = logging.getLogger(__name__)


class _EveryRankInitializer(RankListInitializer):
    mode = "CHECKPOINT"

    def own_ranks(self) -> range:
        return range(self.world_size)


class _SavingGroupInitializer(ProcessGroupInitializer):
    """All ranks on gloo in a group of its own: a thread's collectives must not meet the training's."""

    mode = "CHECKPOINT"

    def init_dist_group(self, backend: str = "gloo", use_cpu: bool = True) -> GroupInfo:
        return _EveryRankInitializer(self.rank, self.world_size).init_dist_group("gloo")


def _default_weights_only(base: Any) -> bool | None:
    """What Lightning leaves to torch since 2.6; before, it loaded everything."""
    return None if "weights_only" in inspect.signature(base.load_checkpoint).parameters else False


@functools.cache
def _local_io(base: Any) -> Any:
    class LocalCheckpointIO(base):  # type: ignore[misc]
        """Local files through :mod:`rlightning_groups.checkpoint`, others as Lightning does."""

        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            if storage_options is not None or "://" in str(path):
                super().save_checkpoint(checkpoint, path, storage_options)
            else:
                save_file(checkpoint, path)

        def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
            if args or set(kwargs) - {"weights_only"} or "://" in str(path):
                return super().load_checkpoint(path, *args, **kwargs)
            return load_file(path, kwargs.get("weights_only", _default_weights_only(base)))

    return LocalCheckpointIO


class CheckpointHooks(_Base):
    """What Lightning calls to collect, write, read and hand out state."""

    _namespace: str
    _save_distributed_checkpoint: bool
    _asynchronous: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._saving: Future[None] | None = None
        self._saves_alone: bool | None = None  # known once this rank has failed

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are read into the shards that a rank holds, so these come first."""
        return True

    @property
    def checkpoint_io(self) -> Any:
        """What reads and writes a checkpoint in one file: atomically, unless another was given."""
        io, names = self._checkpoint_io, names_of(self._namespace)
        if io is None:
            self._checkpoint_io = io = _local_io(names.checkpoint_io)()
        elif isinstance(io, names.wrapping_io) and type(io.checkpoint_io) in (
            type(None),
            names.checkpoint_io,
        ):
            io.checkpoint_io = _local_io(names.checkpoint_io)()
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    # Collecting.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The full model on rank 0, nothing elsewhere; with distributed checkpoints every rank's parts."""
        assert self.lightning_module is not None
        if self._cannot_gather():
            return {}
        state = marked_state_dict(self.lightning_module)
        return state if self._save_distributed_checkpoint else gather_state(state) or {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The full state of an optimizer on rank 0, nothing elsewhere; or every rank's parts.

        Args:
            optimizer: one of the Trainer's.
        """
        if self._cannot_gather():
            return {}
        optimizer = cast(Optimizer, getattr(optimizer, "_optimizer", optimizer))  # Lightning's wrapper
        if is_zero_redundancy(optimizer):
            optimizer.consolidate_state_dict(to=0)  # type: ignore[attr-defined]
            holds = get_local_rank(ParallelMode.TRAIN_DATA_PARALLEL) == 0
            state = optimizer.state_dict() if holds else {"state": {}, "param_groups": []}
        else:
            state = optimizer.state_dict()
        state = sharded_optimizer_state(state, optimizer) if state["param_groups"] else state
        return state if self._save_distributed_checkpoint else gather_state(state) or {}

    # Writing.

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint, random streams included; every rank calls it.

        Args:
            checkpoint: what Lightning collected.
            filepath: where to; rank 0's counts.
            storage_options: for the ``checkpoint_io``, where the checkpoint is one file.

        Raises:
            CheckpointError: it could not be written, on every rank; what was there before is as it was.
        """
        if self._cannot_gather():
            log.warning(
                "rank %d failed and others did not, so no checkpoint is written to %s: it takes all ranks",
                get_global_rank(),
                filepath,
            )
            return
        path = self.broadcast(filepath)
        self.finish_saving()
        if "optimizer_states" in checkpoint:
            checkpoint[_RNG_KEY] = rng_state()
        if self._save_distributed_checkpoint:
            if storage_options is not None or "://" in str(path):
                raise CheckpointError(
                    f"{path}: a distributed checkpoint is a local directory, without storage_options; use "
                    f"save_distributed_checkpoint=False for a file in other places"
                )
            self._saving = save_directory(
                checkpoint, path, group=self._saving_group(), asynchronous=self._asynchronous
            )
            return
        self._all_or_none(
            path, lambda: super(CheckpointHooks, self).save_checkpoint(checkpoint, path, storage_options)
        )

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint; one that is being written is finished first.

        Args:
            filepath: a file or directory.
        """
        if not self._cannot_gather():
            self.finish_saving()
        super().remove_checkpoint(filepath)

    def finish_saving(self) -> None:
        """Wait for an asynchronous save to end.

        Raises:
            CheckpointError: it could not be written.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _saving_group(self) -> ProcessGroup:
        if not self._asynchronous:
            return object_group(ParallelMode.GLOBAL)
        if not is_initialized(_SavingGroupInitializer.mode):
            ParallelContext().register(_SavingGroupInitializer)
        return get_group(_SavingGroupInitializer.mode)

    # Reading.

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a file or a directory; tensors are read as the ranks take their parts.

        Args:
            checkpoint_path: rank 0's counts.
            *args: as in Lightning.
            **kwargs: as in Lightning.

        Raises:
            CheckpointError: some rank cannot read it; on every rank.
        """
        path = self.broadcast(checkpoint_path)
        if not is_directory_checkpoint(path):
            read = super().load_checkpoint
            return self._all_or_none(path, lambda: read(path, *args, **kwargs))
        default = _default_weights_only(names_of(self._namespace).checkpoint_io)
        weights_only = args[0] if args else kwargs.get("weights_only", default)
        return self._all_or_none(path, lambda: open_directory(path, weights_only))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's part of a full model state.

        Args:
            checkpoint: a Lightning checkpoint.
            strict: whether all names must match.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        module = self.lightning_module
        assert module is not None
        state = shard_model_state(checkpoint["state_dict"], module)
        try:
            module.load_state_dict(state, strict=strict)
        except RuntimeError as error:
            raise CheckpointError(f"the checkpoint is of another model: {error}") from error

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's part of each optimizer's full state.

        Args:
            checkpoint: a Lightning checkpoint.

        Raises:
            CheckpointError: the checkpoint's optimizers are others than the model's.
        """
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"the checkpoint holds {len(states)} optimizers, the model has {len(self.optimizers)}"
            )
        states = [
            shard_optimizer_state(state, optimizer)
            for optimizer, state in zip(self.optimizers, states, strict=True)
        ]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})
        if checkpoint.get(_RNG_KEY) is not None:
            set_rng_state(checkpoint[_RNG_KEY])

    def _all_or_none(self, path: object, act: Callable[[], _T]) -> _T:
        """Do something that can fail on one rank alone, and fail on all if it does."""
        failure: Exception | None = None
        try:
            result = act()
        except Exception as error:
            failure = error
        said = all_gather_object(None if failure is None else str(failure), ParallelMode.GLOBAL)
        if failed := [rank for rank, text in enumerate(said) if text is not None]:
            if isinstance(failure, GroupsError):
                raise failure
            text = failure if failure is not None else said[failed[0]]
            raise CheckpointError(f"rank {failed[0]}, {path}: {text}") from failure
        return result

    def _cannot_gather(self) -> bool:
        """Whether this rank is on its way out with an error that not all ranks have."""
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is None or not trainer.interrupted:
            self._saves_alone = None
            return False
        if self._saves_alone is None:
            self._saves_alone = not (is_initialized() and self._all_ended())
        return self._saves_alone

    def _all_ended(self) -> bool:
        try:
            agree(
                _torch_compat.default_store(),
                get_global_rank(),
                ParallelContext().layout.world_size,
                Statement({"the run": "ended with an error"}, node=""),
                _OTHERS_MAY_FAIL,
                "save_checkpoint after an error",
            )
        except RuntimeError:  # they did not come, or whoever served the store is gone
            return False
        return True


def is_zero_redundancy(optimizer: Optimizer) -> bool:
    """Whether an optimizer is torch's ZeroRedundancyOptimizer, whose import is slow and warns.

    Args:
        optimizer: any.
    """
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)
