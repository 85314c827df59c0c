"""One local file that holds a whole checkpoint, written so that a save that dies leaves the previous one.

Everything is written next to its place under a hidden name, and takes its place by a rename.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlightning_groups._torch_compat import settled
from rlightning_groups.errors import CheckpointError, GroupsError
from rlightning_groups.sharding import is_sharded, local_tensor, partial_gradient_modes, shard_spec

METADATA = ".metadata"  # what torch.distributed.checkpoint writes last
DATA_SUFFIX = ".distcp"
LIGHTNING_METADATA = "meta.pt"
Keys = tuple[str | int, ...]  # the way to a leaf of a nest
_ZIP = b"PK\x03\x04"
_REMEDIES = {
    errno.ENOSPC: "free some space, or save to another disk",
    errno.EDQUOT: "free some of the quota, or save elsewhere",
    errno.EFBIG: "raise the limit on the size of files, or save in parts, as a directory",
    errno.EACCES: "save where this user may write",
    errno.EPERM: "save where this user may write",
    errno.EROFS: "save to a disk that is mounted for writing",
}


def save_file(checkpoint: Mapping[str, Any], path: str | PathLike[str]) -> None:
    """Write a checkpoint to one file; called on one rank.

    The file appears whole or not at all. What was there before, a file or a checkpoint directory, stays until
    the new one lies complete on the disk.

    Args:
        checkpoint: anything that ``torch.save`` can write, whose tensors are in full.
        path: a local path; its parent directories are made.

    Raises:
        CheckpointError: the disk is full, the path cannot be written, something in the checkpoint cannot be
            pickled or is only a part of a tensor, or ``path`` is a directory that is not a checkpoint's.
    """
    target = local_path(path)
    partial = partial_path(target)
    stream = None
    try:
        if is_plain_directory(target):
            check_replaceable(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)
        with partial.open("wb") as stream:
            torch.save(map_with_keys(checkpoint, _in_full), stream)
        sync(partial)
        put_in_place(partial, target)
    except BaseException as error:
        if stream is not None:
            remove_quietly(partial)
        if not isinstance(error, Exception):
            raise
        raise CheckpointError(f"cannot write the checkpoint {target}: {reason(error)}") from error


def _in_full(leaf: Any, keys: Keys) -> Any:
    """A plain tensor for one with placements or marks, which a file would not know what to do with."""
    if not isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, DTensor) or is_sharded(leaf):
        spec = shard_spec(leaf)
        if spec.region.lengths != spec.global_shape:
            raise CheckpointError(
                f"the tensor at {'.'.join(map(str, keys))} is this rank's part of one of shape "
                f"{list(spec.global_shape)}; gather it, or save in parts, as a directory"
            )
        return settled(local_tensor(leaf).detach())
    return leaf.detach() if partial_gradient_modes(leaf) else leaf


def load_file(path: str | PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
    """Read a checkpoint that :func:`save_file` or ``torch.save`` wrote.

    Tensors are mapped from the file, so that ranks on one node share its pages and read only what they use.

    Args:
        path: a local file.
        weights_only: whether only tensors and plain values may be loaded; ``None`` is ``torch.load``'s
            default.

    Raises:
        CheckpointError: there is no such file, it is a directory, truncated or corrupt, holds no dict, or
            holds objects that ``weights_only`` refuses, which are named.
    """
    file = local_path(path)
    if file.is_dir():
        kind = "checkpoint directory" if (file / METADATA).is_file() else "directory"
        raise CheckpointError(f"{file} is a {kind}, where a checkpoint in one file is expected")
    check_exists(file)
    try:
        with file.open("rb") as stream:
            mapped = stream.read(len(_ZIP)) == _ZIP
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {file}: {reason(error)}") from error
    checkpoint = load(str(file), str(file), weights_only, mmap=mapped)
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"{file} holds a {type(checkpoint).__name__}, where a checkpoint is a dict")
    return checkpoint


# ------------------------------------------------------------------------- shared with checkpoint directories


def load(source: str | io.BytesIO, name: str, weights_only: bool | None, mmap: bool = False) -> Any:
    """``torch.load`` on the CPU, whose errors say what is wrong with which file.

    Args:
        source: a file, or its content.
        name: what to call it.
        weights_only: as for ``torch.load``.
        mmap: whether to map the file.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=weights_only, mmap=mmap)
    except Exception as error:
        unsafe: list[str] = []
        if weights_only is not False and isinstance(error, pickle.UnpicklingError):
            with contextlib.suppress(Exception):
                if isinstance(source, io.BytesIO):
                    source.seek(0)
                unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(source)
        if unsafe:
            raise CheckpointError(
                f"{name} holds objects of {', '.join(sorted(unsafe))}, which weights_only refuses: if you "
                f"trust its origin, load it with weights_only=False, or allow them by "
                f"torch.serialization.add_safe_globals"
            ) from error
        raise CheckpointError(
            f"cannot read {name}: it is truncated, corrupt or no checkpoint ({_first_line(error)})"
        ) from error


def local_path(path: str | PathLike[str]) -> Path:
    """A path on this machine's file systems.

    Args:
        path: what the user gave.

    Raises:
        CheckpointError: it is a URL.
    """
    if "://" in os.fspath(path):
        raise CheckpointError(f"{os.fspath(path)} is a URL; a checkpoint is written to a local path")
    return Path(path)


def partial_path(path: Path) -> Path:
    """Where to write what will be called ``path``; the same for every save, so that none is left over."""
    return path.with_name(f".{path.name}.partial")


def _replaced_path(path: Path) -> Path:
    """Where a checkpoint waits while one of another kind takes its place."""
    return path.with_name(f".{path.name}.replaced")


def is_plain_directory(path: Path) -> bool:
    """Whether a path is a directory, and no link to one."""
    return path.is_dir() and not path.is_symlink()


def check_replaceable(path: Path) -> None:
    """Raise unless a directory can be replaced: it is empty, or holds a checkpoint and nothing else."""
    names = [entry.name for entry in path.iterdir()]
    others = [
        name
        for name in names
        if not name.startswith(METADATA) and not name.endswith(DATA_SUFFIX) and name != LIGHTNING_METADATA
    ]
    if names and (others or METADATA not in names):
        held = f"{sorted(others)[0]!r}" if others else "no finished checkpoint"
        raise CheckpointError(
            f"{path} is a directory that holds {held}, and only a checkpoint may be replaced; save under "
            f"another name, or remove the directory"
        )


def check_exists(path: Path) -> None:
    """Raise if there is nothing at a path, and say where a save that died may have left its predecessor."""
    if not path.exists():
        hint = ""
        if os.path.lexists(aside := _replaced_path(path)):
            hint = f"; a save that ended half way has left the previous one at {aside}"
        raise CheckpointError(f"there is no checkpoint {path}{hint}")


def put_in_place(partial: Path, path: Path) -> None:
    """Give what is finished its name, in place of the checkpoint that is there.

    Args:
        partial: a file or directory that lies complete on the disk.
        path: its name to be; a checkpoint of either kind, an empty directory, or nothing.
    """
    aside = _replaced_path(path)
    if not os.path.lexists(path) or is_plain_directory(path) == partial.is_dir():
        partial.replace(path)
    else:
        # No file can be renamed over a directory, nor the other way round.
        remove(aside)
        path.replace(aside)
        try:
            partial.replace(path)
        except BaseException:
            aside.replace(path)
            raise
    sync(path.parent)
    remove_leftovers(path)


def remove_leftovers(path: Path) -> None:
    """Remove what saves that died have left beside a checkpoint that is whole."""
    remove_quietly(partial_path(path), _replaced_path(path))


def remove(path: Path) -> None:
    """Remove a file, a link or a directory, if it is there."""
    if is_plain_directory(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_quietly(*paths: Path) -> None:
    """Remove what can be removed; the next save tries again."""
    for path in paths:
        with contextlib.suppress(OSError):
            remove(path)


def sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems cannot do it for directories
            raise
    finally:
        os.close(descriptor)


def map_with_keys(nest: Any, change: Callable[[Any, Keys], Any], keys: Keys = ()) -> Any:
    """A nest with changed leaves; what holds no changed leaf stays the same object.

    Args:
        nest: dicts, lists and tuples in each other.
        change: is given each leaf and the keys and indices that lead to it.
        keys: those that lead to ``nest``.
    """
    items: list[tuple[Any, Any]]
    if isinstance(nest, Mapping):
        items = list(nest.items())
    elif isinstance(nest, (list, tuple)):
        items = list(enumerate(nest))
    else:
        return change(nest, keys)
    changed = {key: map_with_keys(value, change, (*keys, key)) for key, value in items}
    if all(changed[key] is value for key, value in items):
        return nest
    if isinstance(nest, dict):
        result = copy.copy(nest)  # keeps an OrderedDict's attributes, a module's versions among them
        result.update(changed)
        return result
    if isinstance(nest, Mapping):
        return changed
    if hasattr(nest, "_fields"):
        return type(nest)(*changed.values())
    return type(nest)(changed.values())


def reason(error: BaseException) -> str:
    """What went wrong in a write or read, and what would work."""
    if isinstance(error, GroupsError):
        return str(error)
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__  # torch reports a full disk as an odd position
    if cause is not None:
        remedy = _REMEDIES.get(cause.errno or 0)
        where = f": {cause.filename}" if cause.strerror and cause.filename else ""
        return (cause.strerror or str(cause)) + where + (f"; {remedy}" if remedy else "")
    if isinstance(error, (pickle.PicklingError, AttributeError, TypeError)):
        return (
            f"{_first_line(error)}; everything in a checkpoint must be picklable, hyperparameters and the "
            f"states of callbacks too"
        )
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0]
    if isinstance(error, pickle.UnpicklingError):
        line = line.partition(". ")[0]  # torch goes on to advise against weights_only
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
