"""A checkpoint in parts: a directory of torch.distributed.checkpoint, each byte in it written by one rank.

Tensors are read one by one, in any parts. Everything else is one item of bytes in the same directory, so that
one file, ``.metadata``, decides what the directory holds: a save writes its data under names that no earlier
save has used, and takes effect when its ``.metadata`` is renamed over the earlier one.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
import pickle
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from os import PathLike
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from rlightning_groups._torch_compat import settled
from rlightning_groups.checkpoint._file import (
    DATA_SUFFIX,
    LIGHTNING_METADATA,
    METADATA,
    Keys,
    check_exists,
    check_replaceable,
    is_plain_directory,
    load,
    local_path,
    map_with_keys,
    partial_path,
    put_in_place,
    reason,
    remove,
    remove_leftovers,
    remove_quietly,
    save_file,
    sync,
)
from rlightning_groups.errors import CheckpointError
from rlightning_groups.sharding import Region, is_sharded, local_tensor, shard_spec

_IN_PARTS = ("state_dict", "optimizer_states")
_REST = "rlightning_groups"  # the item that holds everything but the tensors
_FORMAT = 1
# A reader loads whole blocks, and a tensor that many ranks hold is shared out among them by blocks.
_BLOCK_BYTES = 64 * 1024 * 1024


# ------------------------------------------------------------------------------------------------ reading


class StoredTensor:
    """A tensor in a checkpoint directory, of which any region can be read.

    It holds no file open, and reads nothing until it is asked.

    Attributes:
        shape: shape of the full tensor.
        dtype: its dtype.
    """

    def __init__(self, name: str, metadata: TensorStorageMetadata, places: Sequence[_Place]) -> None:
        self.shape: tuple[int, ...] = tuple(metadata.size)
        self.dtype: torch.dtype = metadata.properties.dtype
        self._name = name
        regions = [Region(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in metadata.chunks]
        self._blocks = sorted(zip(places, regions, strict=True))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self._name!r}, shape={self.shape}, dtype={self.dtype})"

    def read(self, region: Region) -> Tensor:
        """A region of the tensor, on the CPU; only blocks that overlap with it are read.

        Args:
            region: a box inside the tensor.

        Raises:
            CheckpointError: the tensor has no such region, or a file is missing, truncated or corrupt.
        """
        if len(region.offsets) != len(self.shape) or any(
            start < 0 or length < 0 or start + length > size
            for start, length, size in zip(region.offsets, region.lengths, self.shape, strict=True)
        ):
            raise CheckpointError(f"there is no {region} in {self._name} of shape {list(self.shape)}")
        overlaps = [
            (place, block, overlap)
            for place, block in self._blocks
            if (overlap := _overlap(block, region)) is not None
        ]
        if sum(overlap.numel for _, _, overlap in overlaps) != region.numel:
            raise CheckpointError(f"the checkpoint does not hold all of {region} of {self._name}")
        result: Tensor | None = None
        for file, group in itertools.groupby(overlaps, lambda item: item[0].file):
            with _open(file) as stream:
                for place, block, overlap in group:
                    part = self._load(stream, place, block)
                    if overlap == block == region:
                        return part
                    if result is None:
                        result = torch.empty(region.lengths, dtype=self.dtype)
                    result[_inside(overlap, region)] = part[_inside(overlap, block)]
        return torch.empty(region.lengths, dtype=self.dtype) if result is None else result

    def full(self) -> Tensor:
        """All of the tensor, on the CPU.

        Raises:
            CheckpointError: a file is missing, truncated or corrupt.
        """
        return self.read(Region((0,) * len(self.shape), self.shape))

    def _load(self, stream: io.BufferedReader, place: _Place, block: Region) -> Tensor:
        tensor = load(_read(stream, place), f"{self._name} in {place.file}", weights_only=True)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != block.lengths:
            raise CheckpointError(f"{place.file} is corrupt: it does not hold {self._name} at {block}")
        return tensor


def is_directory_checkpoint(path: str | PathLike[str]) -> bool:
    """Whether a path is a directory with a finished checkpoint.

    Args:
        path: any local path.
    """
    return (Path(path) / METADATA).is_file()


def open_directory(path: str | PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
    """A checkpoint with a :class:`StoredTensor` for each tensor that was written in parts.

    Reads what is no tensor; no communication. Of a directory that Lightning's ModelParallelStrategy wrote,
    optimizer states come under parameter numbers, as in any other checkpoint.

    Args:
        path: a directory that :func:`save_directory` wrote.
        weights_only: whether only plain values may be loaded; ``None`` is ``torch.load``'s default.

    Raises:
        CheckpointError: there is no such directory, it holds no finished checkpoint or one of another
            program, a file in it is missing, truncated or corrupt, or ``weights_only`` refuses objects in it.
    """
    directory = local_path(path).absolute()
    check_exists(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is a file, where a checkpoint directory is expected")
    if not is_directory_checkpoint(directory):
        raise CheckpointError(f"{directory} has no {METADATA}: it is an unfinished save, or no checkpoint")
    metadata = _read_metadata(directory / METADATA)
    places = {
        index: _Place.of(directory, index, stored) for index, stored in (metadata.storage_data or {}).items()
    }
    _check_sizes(places.values())
    tensors: dict[str, StoredTensor] = {}
    for name, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            indices = [MetadataIndex(name, chunk.offsets) for chunk in described.chunks]
            if not all(index in places for index in indices):
                raise CheckpointError(f"{directory / METADATA} is corrupt: it does not say where {name} is")
            tensors[name] = StoredTensor(name, described, [places[index] for index in indices])
    ways: Mapping[str, Keys] = metadata.planner_data or {}
    rest_place = places.get(MetadataIndex(_REST))
    if rest_place is None:
        return _open_lightning(directory, ways, tensors, places, weights_only)
    rest = _load_bytes(rest_place, weights_only)
    if not isinstance(rest, dict) or rest.get("format") != _FORMAT:
        raise CheckpointError(f"{directory} was written by a newer version of this package")
    checkpoint: dict[str, Any] = rest["checkpoint"]
    return _place_tensors(checkpoint, {ways.get(name, (name,)): tensor for name, tensor in tensors.items()})


def consolidate_checkpoint(
    directory: str | PathLike[str], file: str | PathLike[str], *, weights_only: bool | None = None
) -> None:
    """Turn a checkpoint directory into one file with plain full tensors; one process, no communication.

    Args:
        directory: a directory that :func:`save_directory` wrote.
        file: the file to write, as :func:`~rlightning_groups.checkpoint.save_file` does.
        weights_only: as for :func:`open_directory`.

    Raises:
        CheckpointError: the directory cannot be read, or the file not be written.
    """
    checkpoint = open_directory(directory, weights_only)
    save_file(
        map_with_keys(checkpoint, lambda leaf, _: leaf.full() if isinstance(leaf, StoredTensor) else leaf),
        file,
    )


class _Place(NamedTuple):
    """Where an item lies."""

    file: str
    offset: int
    length: int

    @classmethod
    def of(cls, directory: Path, index: MetadataIndex, stored: Any) -> _Place:
        if getattr(stored, "transform_descriptors", None):
            raise CheckpointError(
                f"{index.fqn} in {directory} is stored as {', '.join(stored.transform_descriptors)}, "
                f"which cannot be read in parts: load it with torch.distributed.checkpoint"
            )
        return cls(str(directory / stored.relative_path), stored.offset, stored.length)


class _MetadataUnpickler(pickle.Unpickler):
    """Loads torch.distributed.checkpoint's description of a checkpoint, and nothing that could do harm."""

    def find_class(self, module: str, name: str) -> Any:
        package = module.partition(".")[0]
        if module in ("torch", "torch.serialization"):
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype) or name in ("Size", "_get_layout"):
                return super().find_class(module, name)
        elif package == "pathlib" or module.startswith("torch.distributed.checkpoint."):
            found = super().find_class(module, name)
            if isinstance(found, type) and (
                dataclasses.is_dataclass(found) or issubclass(found, (Enum, PurePath))
            ):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint's metadata")


def _read_metadata(file: Path) -> Metadata:
    try:
        with file.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
    except Exception as error:
        raise CheckpointError(f"cannot read {file}: it is truncated or corrupt ({error})") from error
    return metadata


def _check_sizes(places: Iterable[_Place]) -> None:
    """Find out now, and not between two tensors, that a file is missing or too short."""
    ends: dict[str, int] = {}
    for file, offset, length in places:
        ends[file] = max(ends.get(file, 0), offset + length)
    for file, end in ends.items():
        with _open(file) as stream:
            size = os.fstat(stream.fileno()).st_size
        if size < end:
            raise CheckpointError(f"{file} is truncated: it has {size} bytes of {end}")


def _open(file: str) -> io.BufferedReader:
    try:
        return open(file, "rb")  # noqa: PTH123 - the caller closes it
    except OSError as error:
        gone = "; it is missing, or was removed when a newer save took its place"
        hint = gone if isinstance(error, FileNotFoundError) else ""
        raise CheckpointError(f"cannot read {file}, which is part of the checkpoint{hint}") from error


def _read(stream: io.BufferedReader, place: _Place) -> io.BytesIO:
    try:
        stream.seek(place.offset)
        content = stream.read(place.length)
    except OSError as error:
        raise CheckpointError(f"cannot read {place.file}: {reason(error)}") from error
    if len(content) < place.length:
        end = place.offset + place.length
        raise CheckpointError(f"{place.file} is truncated: it ends before byte {end}")
    return io.BytesIO(content)


def _load_bytes(place: _Place, weights_only: bool | None) -> Any:
    with _open(place.file) as stream:
        return load(_read(stream, place), place.file, weights_only)


def _open_lightning(
    directory: Path,
    ways: Mapping[str, Keys],
    tensors: Mapping[str, StoredTensor],
    places: Mapping[MetadataIndex, _Place],
    weights_only: bool | None,
) -> dict[str, Any]:
    """A checkpoint of Lightning's ModelParallelStrategy: ``meta.pt`` has what its ranks did not share."""
    meta = directory / LIGHTNING_METADATA
    if not meta.is_file() or not any(way[0] == "state_dict" for way in ways.values()):
        raise CheckpointError(
            f"{directory} was not written by this package or Lightning: it has no item {_REST!r} and no file "
            f"{LIGHTNING_METADATA}. Load it with torch.distributed.checkpoint"
        )
    try:
        checkpoint: dict[str, Any] = {**load(str(meta), str(meta), weights_only), "state_dict": {}}
        optimizers: dict[str, Any] = {}
        for name, way in ways.items():
            nest: dict[Any, Any] = checkpoint if way[0] == "state_dict" else optimizers
            for key in way[:-1]:
                nest = nest.setdefault(key, {})
            stored = tensors.get(name)
            nest[way[-1]] = stored or _load_bytes(places[MetadataIndex(name)], weights_only)
        ordered = (optimizers[f"optimizer_{number}"] for number in range(len(optimizers)))
        checkpoint["optimizer_states"] = [_numbered(state) for state in ordered]
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{directory} is not laid out as Lightning does it: no {error}") from error
    return checkpoint


def _numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state by numbers instead of names of parameters."""
    groups = [dict(group) for _, group in sorted(state["param_groups"].items())]
    names = [name for group in groups for name in group["params"]]
    number_of = {name: number for number, name in enumerate(names)}
    for group in groups:
        group["params"] = [number_of[name] for name in group["params"]]
    return {
        "state": {number_of[name]: entries for name, entries in state.get("state", {}).items()},
        "param_groups": groups,
    }


def _overlap(first: Region, second: Region) -> Region | None:
    """What two regions share, ``None`` if nothing."""
    starts = tuple(map(max, first.offsets, second.offsets))
    ends = map(min, _ends(first), _ends(second))
    shared = Region(starts, tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True)))
    return shared if shared.numel else None


def _ends(region: Region) -> Iterator[int]:
    return (start + length for start, length in zip(region.offsets, region.lengths, strict=True))


def _inside(region: Region, outer: Region) -> tuple[slice, ...]:
    """What to index the values of ``outer`` with, to get those of ``region``."""
    starts = tuple(start - origin for start, origin in zip(region.offsets, outer.offsets, strict=True))
    return Region(starts, region.lengths).slices


# ------------------------------------------------------------------------------------------------ writing


def save_directory(
    checkpoint: Mapping[str, Any],
    path: str | PathLike[str],
    *,
    group: ProcessGroup,
    asynchronous: bool = False,
) -> Future[None] | None:
    """Write a checkpoint in parts, each byte of it once; a collective over ``group``.

    Tensors under ``state_dict`` and ``optimizer_states``, and sharded tensors anywhere, are written by the
    ranks that hold them, as :func:`~rlightning_groups.sharding.shard_spec` describes them. Everything else is
    rank 0's; a rank other than 0 may hold less, and gives what it holds. A save that dies leaves the
    checkpoint that was there, and what it has left over is removed by the next one.

    Args:
        checkpoint: nests of dicts, lists and tuples.
        path: a local directory, which all ranks see; rank 0's counts. A checkpoint that is there is replaced.
        group: all ranks, over a backend for the CPU; nothing else may use it before the save has ended.
        asynchronous: whether to return as soon as this rank has a copy of what it is to write. The caller
            waits for the result before the next save.

    Returns:
        With ``asynchronous`` a future, whose ``result`` raises what else this call would have.

    Raises:
        CheckpointError: some rank cannot write, ranks contradict each other, or ``path`` is a directory that
            is not a checkpoint's; the same on all ranks.
    """
    staged = threading.Event()
    planner = _Planner(checkpoint, group.rank() == 0, staged if asynchronous else None)
    writer = _Writer(path)
    if not asynchronous:
        _save(planner, writer, group)
        return None
    if planner.on_accelerator:
        torch.accelerator.synchronize()  # the copies are made in another thread, on another stream
    executor = ThreadPoolExecutor(1, thread_name_prefix="rlightning_groups-checkpoint")
    future = executor.submit(_save, planner, writer, group)
    executor.shutdown(wait=False)
    future.add_done_callback(lambda _: staged.set())
    staged.wait()
    return future


def _save(planner: _Planner, writer: _Writer, group: ProcessGroup) -> None:
    try:
        save({}, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        writer.abandon()
        own = error.failures.get(group.rank(), (None, None))[0]
        if isinstance(own, (KeyboardInterrupt, SystemExit)):
            raise own from None
        said: dict[str, list[str]] = {}
        for rank, (failure, _) in sorted(error.failures.items()):
            said.setdefault(reason(failure), []).append(str(rank))
        told = "; ".join(f"rank {', '.join(ranks)}: {text}" for text, ranks in said.items())
        raise CheckpointError(f"cannot write the checkpoint {writer.target}: {told}") from error
    except BaseException as error:
        writer.abandon()
        if not isinstance(error, Exception):
            raise
        raise CheckpointError(
            f"cannot write the checkpoint {writer.target}: the ranks could not talk to each other "
            f"({reason(error)}); see whether one of them ended with an error of its own"
        ) from error


class _Part(NamedTuple):
    """This rank's part of a tensor."""

    values: Tensor
    shape: tuple[int, ...]
    region: Region


class _Planner(DefaultSavePlanner):
    """Says what there is to write on this rank; torch's part is to choose one writer among replicas."""

    def __init__(self, checkpoint: Mapping[str, Any], is_first: bool, staged: threading.Event | None) -> None:
        super().__init__()
        self._staged = staged
        self._copies: dict[MetadataIndex, Tensor] = {}
        self._parts: dict[str, _Part] = {}
        self._ways: dict[str, Keys] = {}
        self._rest: bytes | None = None
        self._failure: CheckpointError | None = None
        try:
            rest = _take_tensors(checkpoint, self._take)
            if is_first:
                buffer = io.BytesIO()
                torch.save({"format": _FORMAT, "checkpoint": rest}, buffer)
                self._rest = buffer.getvalue()
        except Exception as error:
            # The other ranks are told with the plans, or they would wait for this one.
            self._failure = CheckpointError(reason(error))

    @property
    def on_accelerator(self) -> bool:
        return any(part.values.device.type != "cpu" for part in self._parts.values())

    def _take(self, keys: Keys, tensor: Tensor) -> None:
        name = ".".join(map(str, keys))
        if name in self._parts or name == _REST or not all(isinstance(key, (str, int)) for key in keys):
            raise CheckpointError(f"a tensor at {keys} would be called {name!r}, which is taken or no name")
        spec = shard_spec(tensor)
        values = settled(local_tensor(tensor).detach())
        self._parts[name] = _Part(values, spec.global_shape, spec.region)
        self._ways[name] = keys

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        if self._failure is not None:
            raise self._failure
        items = []
        if self._rest is not None:
            items.append(WriteItem(MetadataIndex(_REST), WriteItemType.BYTE_IO))
        for name, (values, shape, region) in self._parts.items():
            # A tensor without elements has no part that is not empty, and must be named all the same.
            if region.numel or 0 in shape:
                properties = TensorProperties(dtype=values.dtype)
                for block in _blocks(region, max(1, _BLOCK_BYTES // values.element_size())):
                    chunk = ChunkStorageMetadata(torch.Size(block.offsets), torch.Size(block.lengths))
                    data = TensorWriteData(chunk, properties, torch.Size(shape))
                    index = MetadataIndex(name, block.offsets)
                    items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        # torch's own tools read the nest from this as well.
        return SavePlan(items, planner_data=self._ways if self.is_coordinator else {})

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        # torch keeps one of the items that begin at the same place, even if their lengths differ.
        seen: dict[object, tuple[int, object]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                name, data = item.index.fqn, item.tensor_data
                if data is None:
                    continue
                if name not in self._ways:
                    raise CheckpointError(f"rank {rank} holds {name}, which rank 0 does not have")
                whole = f"{data.properties.dtype} {list(data.size)}"
                part = f"{list(data.chunk.sizes)} at {list(data.chunk.offsets)} of {whole}"
                for key, value in ((name, whole), (item.index, part)):
                    first, other = seen.setdefault(key, (rank, value))
                    if other != value:
                        raise CheckpointError(
                            f"{name} is {value} on rank {rank} and {other} on rank {first}; if it is "
                            f"sharded, say so with mark_sharded"
                        )
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        if self._staged is not None:
            for item in plan.items:
                if item.type != WriteItemType.BYTE_IO:
                    self._copies[item.index] = self._block(item).to("cpu", copy=True)
            self._parts = {}  # nothing that training goes on with is held any longer
            self._staged.set()
        return plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            assert self._rest is not None
            return io.BytesIO(self._rest)
        copied = self._copies.get(write_item.index)
        return self._block(write_item) if copied is None else copied

    def _block(self, item: WriteItem) -> Tensor:
        values, _, region = self._parts[item.index.fqn]
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        block = Region(tuple(chunk.offsets), tuple(chunk.sizes))
        return values if block == region else values[_inside(block, region)]


@dataclasses.dataclass(frozen=True)
class _WritePlace:
    """Which files one rank writes; torch's writer appends a number to the prefix."""

    prefix: str
    directory: str


class _Writer(FileSystemWriter):
    """Writes next to a checkpoint's place, or next to its earlier data, until everything lies on the disk."""

    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__(path, sync_files=False)  # torch's does not flush first in every version
        self._given = path
        self.target = Path(path).absolute()
        self._token = uuid.uuid4().hex[:12]
        self._directory: Path | None = None  # known to the coordinator
        self._committed = False

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # the coordinator makes the directory

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        local_path(self._given)
        target = self.target
        if is_plain_directory(target) and is_directory_checkpoint(target):
            self._directory = target
        else:
            if is_plain_directory(target):
                check_replaceable(target)
            self._directory = partial_path(target)
            remove(self._directory)
            self._directory.mkdir(parents=True)
        places = [
            _WritePlace(f"__{self._token}_{number}_", str(self._directory)) for number in range(len(plans))
        ]
        return [
            dataclasses.replace(plan, storage_data=place) for plan, place in zip(plans, places, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        if not plan.items:
            nothing: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
            nothing.set_result([])
            return nothing
        self.path = Path(plan.storage_data.directory)
        try:
            written = super().write_data(plan, planner)
            for name in {result.storage_data.relative_path for result in written.wait()}:
                sync(self.path / name)
            return written
        except Exception as error:
            raise CheckpointError(f"cannot write to {self.path}: {reason(error)}") from error

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._directory is not None
        names = self._check_written(self._directory, results)
        # torch's own finish removes the earlier metadata first, so it works in a place where there is none.
        scratch = self._directory / f"{METADATA}.partial"
        remove(scratch)
        scratch.mkdir()
        self.path = scratch
        super().finish(metadata, results)
        sync(scratch / METADATA)
        sync(self._directory)
        (scratch / METADATA).replace(self._directory / METADATA)
        self._committed = self._directory == self.target
        remove_quietly(scratch)
        sync(self._directory)
        if self._directory != self.target:
            put_in_place(self._directory, self.target)
            self._committed = True
        else:
            earlier = [file for file in self.target.glob(f"*{DATA_SUFFIX}") if file.name not in names]
            remove_quietly(*earlier)
            remove_leftovers(self.target)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=str(self.target), save_id=self.save_id)

    def abandon(self) -> None:
        """Remove what a save that failed has written; the coordinator does it for all ranks."""
        if self._directory is None or self._committed:
            return
        if self._directory != self.target:
            remove_quietly(self._directory)
        else:
            written = self.target.glob(f"__{self._token}_*")
            remove_quietly(*written, self.target / f"{METADATA}.partial")

    @staticmethod
    def _check_written(directory: Path, results: list[list[WriteResult]]) -> set[str]:
        """The names of all files; each must be what the rank that wrote it says, seen from here."""
        ends: dict[str, tuple[int, int]] = {}
        for rank, written in enumerate(results):
            for stored in (result.storage_data for result in written):
                end = max(ends.get(stored.relative_path, (0, 0))[1], stored.offset + stored.length)
                ends[stored.relative_path] = (rank, end)
        for name, (rank, end) in ends.items():
            file = directory / name
            if not file.exists() or file.stat().st_size < end:
                raise CheckpointError(
                    f"rank {rank} has written {file}, but rank 0 does not see all of it: save to a file "
                    f"system that all ranks share"
                )
        return set(ends)


def _blocks(region: Region, limit: int) -> Iterator[Region]:
    """A region cut along its leading dims into blocks of at most ``limit`` elements, in order."""
    if region.numel <= limit:
        yield region
        return
    dim = next(dim for dim, length in enumerate(region.lengths) if length > 1)
    start, length = region.offsets[dim], region.lengths[dim]
    count = -(-length // max(1, limit * length // region.numel))
    step = -(-length // count)  # about equal ones, or the writers would not have equally much to write
    for offset in range(start, start + length, step):
        offsets, lengths = list(region.offsets), list(region.lengths)
        offsets[dim], lengths[dim] = offset, min(step, start + length - offset)
        yield from _blocks(Region(tuple(offsets), tuple(lengths)), limit)


# -------------------------------------------------------------------------------------------------- nests


def _take_tensors(checkpoint: Mapping[str, Any], take: Callable[[Keys, Tensor], None]) -> Any:
    """A checkpoint with ``None`` for each tensor to be written in parts, which ``take`` is given."""

    def visit(leaf: Any, keys: Keys) -> Any:
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
            return leaf
        if keys[0] in _IN_PARTS or isinstance(leaf, DTensor) or is_sharded(leaf):
            take(keys, leaf)
            return None
        return leaf

    return map_with_keys(dict(checkpoint), visit)


def _place_tensors(checkpoint: dict[str, Any], tensors: Mapping[Keys, StoredTensor]) -> dict[str, Any]:
    left = dict(tensors)
    placed: dict[str, Any] = map_with_keys(
        checkpoint, lambda leaf, keys: left.pop(keys, leaf) if leaf is None else leaf
    )
    if left:
        raise CheckpointError(f"the checkpoint does not say where {next(iter(left.values()))} belongs")
    return placed
