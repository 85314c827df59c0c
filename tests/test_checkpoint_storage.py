"""Checkpoints on the disk: written once, read in any parts, and never half there."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import math
import os
import pickle
import random
import resource
import shutil
import signal
import time
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from pool import RankPool
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from rlightning_groups import ParallelContext, ParallelMode, get_group, get_local_rank
from rlightning_groups.checkpoint import _directory
from rlightning_groups.checkpoint._directory import (
    StoredTensor,
    consolidate_checkpoint,
    is_directory_checkpoint,
    open_directory,
    save_directory,
)
from rlightning_groups.checkpoint._file import load_file, remove, save_file
from rlightning_groups.errors import CheckpointError
from rlightning_groups.sharding import Region, copy_marks, mark_partial_gradient, mark_sharded, shard_spec

Run = Callable[..., list[Any]]
TP, DP = ParallelMode.TENSOR_PARALLEL, ParallelMode.DATA_PARALLEL
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
]
SHAPES = {
    "rows": (5, 3),
    "columns": (2, 8),
    "nested": (4, 6),
    "same_dim": (8, 2),
    "thin": (1, 4),
    "line": (5, 2),
    "short": (1, 3),
    "grid": (5, 7),
    "twice": (7, 3),
    "copies": (6, 2),
    "sharded_mark": (6, 4),
    "fsdp.weight": (10, 3),
    "replicated": (64, 64),
    "empty": (0, 4),
    "scalar": (),
    **{f"dtype_{dtype}".replace(".", "_"): (4, 3) for dtype in DTYPES},
}


class Pair(NamedTuple):
    left: Any
    right: Any


def whole(name: str) -> Tensor:
    """The full tensor of a name, other for each."""
    dtype = next((d for d in DTYPES if name == f"dtype_{d}".replace(".", "_")), torch.float32)
    shape = SHAPES[name]
    values = (torch.arange(math.prod(shape)) + 7 * list(SHAPES).index(name)) % 120
    return (values % 2 if dtype == torch.bool else values).to(torch.float32).to(dtype).reshape(shape)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(bits(left), bits(right))


def marked(name: str, *marks: tuple[int, str, tuple[int, ...] | None]) -> Tensor:
    """This rank's part of a tensor, cut by hand."""
    tensor = whole(name)
    for dim, mode, sizes in marks:
        equal = tensor.shape[dim] // get_group(mode).size()
        parts = tensor.split(equal if sizes is None else list(sizes), dim)
        tensor = parts[get_local_rank(mode)]
    tensor = tensor.clone()
    for mark in marks:
        mark_sharded(tensor, mark[0], mark[1], sizes=mark[2])
    return tensor


def state_of_this_rank() -> dict[str, Any]:
    """A model's state on one of two by two ranks: cut by marks, placements and both."""
    context = ParallelContext()
    line, grid = context.device_mesh(DP), context.device_mesh(DP, TP)
    half = marked("sharded_mark", (1, TP, None))
    both = distribute_tensor(half, line, [Shard(0)])
    copy_marks(half, both)
    layer = nn.Linear(3, 10, bias=False)
    layer.weight.data.copy_(whole("fsdp.weight"))
    parallelize_module(layer, grid["tensor_parallel"], ColwiseParallel())
    fully_shard(layer, mesh=grid["data_parallel"])
    state: dict[str, Any] = OrderedDict(
        {
            "rows": marked("rows", (0, TP, (3, 2))),
            "columns": marked("columns", (1, TP, None)),
            "nested": marked("nested", (0, TP, None), (1, DP, (5, 1))),
            "same_dim": marked("same_dim", (0, TP, None), (0, DP, None)),
            "thin": marked("thin", (0, TP, (0, 1))),
            "line": distribute_tensor(whole("line"), line, [Shard(0)]),
            "short": distribute_tensor(whole("short"), line, [Shard(0)]),
            "grid": distribute_tensor(whole("grid"), grid, [Shard(0), Shard(1)]),
            "twice": distribute_tensor(whole("twice"), grid, [Shard(0), Shard(0)]),
            "copies": distribute_tensor(whole("copies"), grid, [Replicate(), Shard(0)]),
            "sharded_mark": both,
            "fsdp.weight": layer.weight,
            "replicated": nn.Parameter(whole("replicated")),
            "empty": whole("empty"),
            "scalar": whole("scalar"),
        }
    )
    for name in SHAPES:
        if name.startswith("dtype_"):
            state[name] = marked(name, (0, TP, (1, 3)))
    state._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    return state


def save_all(path: str, block_bytes: int = 1024) -> None:
    ParallelContext().initialize(tensor_parallel_size=2)
    state = state_of_this_rank()
    moments: dict[str, Any] = {"step": torch.tensor(3.0), "exp_avg": copy.copy(state["rows"])}
    mark_sharded(moments["exp_avg"], 0, TP, sizes=(3, 2))
    rank = dist.get_rank()
    optimizer = {"state": {0: {}, 3: moments}, "param_groups": [{"lr": 0.5, "params": [0, 3]}]}
    checkpoint = {
        "epoch": 4 if rank == 0 else -1,
        "state_dict": state,
        "optimizer_states": [optimizer if get_local_rank(DP) == 0 else {}],
        "callbacks": {"average": Pair((state["grid"], rank), "kept"), "state": torch.arange(3) + rank},
    }
    with mock.patch.object(_directory, "_BLOCK_BYTES", block_bytes):
        save_directory(checkpoint, path, group=get_group(ParallelMode.GLOBAL))


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in parts, written by two by two ranks."""
    path: Path = tmp_path_factory.mktemp("saved") / "deep" / "all.ckpt"
    rank_pool.run(save_all, 4, str(path))
    return path


def check_all(checkpoint: Mapping[str, Any], full: Callable[[Any], Tensor]) -> None:
    assert list(checkpoint) == ["epoch", "state_dict", "optimizer_states", "callbacks"]
    state = checkpoint["state_dict"]
    assert type(state) is OrderedDict
    assert state._metadata == {"": {"version": 2}}  # type: ignore[attr-defined]
    assert sorted(state) == sorted(SHAPES)
    for name, tensor in state.items():
        assert same(full(tensor), whole(name)), name
    (optimizer,) = checkpoint["optimizer_states"]
    assert optimizer["param_groups"] == [{"lr": 0.5, "params": [0, 3]}]
    assert list(optimizer["state"]) == [0, 3]
    assert optimizer["state"][0] == {}
    assert same(full(optimizer["state"][3]["exp_avg"]), whole("rows"))
    assert same(full(optimizer["state"][3]["step"]), torch.tensor(3.0))
    assert checkpoint["epoch"] == 4
    average = checkpoint["callbacks"]["average"]
    assert isinstance(average, Pair)
    assert average.right == "kept"
    assert same(full(average.left[0]), whole("grid"))
    assert average.left[1] == 0
    assert same(checkpoint["callbacks"]["state"], torch.arange(3))


def test_every_kind_of_tensor_is_written_and_read_in_full(saved: Path) -> None:
    checkpoint = open_directory(saved, weights_only=False)
    check_all(checkpoint, StoredTensor.full)
    assert {name: stored.shape for name, stored in checkpoint["state_dict"].items()} == SHAPES
    assert all(stored.dtype == whole(name).dtype for name, stored in checkpoint["state_dict"].items())
    assert is_directory_checkpoint(saved)
    assert [entry.name for entry in saved.parent.iterdir()] == ["all.ckpt"]


def metadata_of(path: Path) -> Metadata:
    return pickle.loads((path / ".metadata").read_bytes())


def test_each_byte_is_written_once_and_the_work_is_shared(saved: Path) -> None:
    metadata = metadata_of(saved)
    written = {"state_dict": 0, "others": 0}
    for name, described in metadata.state_dict_metadata.items():
        if name != "rlightning_groups":
            elements = sum(chunk.sizes.numel() for chunk in described.chunks)
            kind = "state_dict" if name.startswith("state_dict.") else "others"
            written[kind] += elements * described.properties.dtype.itemsize
    assert written["state_dict"] == sum(whole(name).nbytes for name in SHAPES)
    assert written["others"] == whole("rows").nbytes + whole("grid").nbytes + 4
    # Each item has a header of its own, and no file has anything besides items.
    stored = metadata.storage_data.values()
    sizes = {file.name: file.stat().st_size for file in saved.glob("*.distcp")}
    assert sum(sizes.values()) == sum(info.length for info in stored)
    assert sum(sizes.values()) <= sum(written.values()) + 2500 * len(stored)
    # 16 blocks of a tensor that all four ranks hold.
    writers = [
        info.relative_path for index, info in metadata.storage_data.items() if "replicated" in index.fqn
    ]
    assert {writers.count(name) for name in sizes} == {4}
    assert len(sizes) == 4


def test_consolidated_it_is_one_plain_file(saved: Path, tmp_path: Path) -> None:
    consolidate_checkpoint(saved, tmp_path / "one.ckpt", weights_only=False)
    with torch.serialization.safe_globals([Pair]):
        checkpoint = load_file(tmp_path / "one.ckpt", weights_only=True)
    check_all(checkpoint, lambda tensor: tensor)
    assert [entry.name for entry in tmp_path.iterdir()] == ["one.ckpt"]


def test_torch_itself_reads_the_tensors(saved: Path, tmp_path: Path) -> None:
    names = ["rows", "nested", "twice", "fsdp.weight", "replicated", "dtype_torch_bfloat16"]
    wanted = {f"state_dict.{name}": torch.zeros_like(whole(name)) for name in names}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(wanted, checkpoint_id=saved)
    assert all(same(wanted[f"state_dict.{name}"], whole(name)) for name in names)


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    starts = [draw(st.integers(0, size)) for size in shape]
    lengths = [draw(st.integers(0, size - start)) for start, size in zip(starts, shape, strict=True)]
    return Region(tuple(starts), tuple(lengths))


@given(data=st.data())
def test_any_region_is_read_whatever_was_written(saved: Path, data: st.DataObject) -> None:
    state = stored_state(saved)
    name = data.draw(st.sampled_from(sorted(SHAPES)))
    region = data.draw(regions(SHAPES[name]))
    assert same(state[name].read(region), whole(name)[region.slices])


def stored_state(path: Path, cache: dict[Path, Any] = {}) -> dict[str, StoredTensor]:  # noqa: B006
    if path not in cache:
        cache[path] = open_directory(path, weights_only=False)["state_dict"]
    state: dict[str, StoredTensor] = cache[path]
    return state


def test_only_blocks_that_overlap_are_read(saved: Path) -> None:
    state = stored_state(saved)
    read = []
    original = _directory._read
    with mock.patch.object(
        _directory, "_read", lambda stream, place: read.append(place) or original(stream, place)
    ):
        state["replicated"].read(Region((3, 0), (2, 64)))  # four rows of 256 bytes are a block
        assert len(read) == 2
        state["rows"].read(Region((1, 1), (1, 1)))
        assert len(read) == 3
        state["rows"].read(Region((1, 1), (0, 1)))
        assert len(read) == 3
    with pytest.raises(CheckpointError, match=r"no Region.* in state_dict.rows of shape \[5, 3\]"):
        state["rows"].read(Region((4, 0), (2, 3)))
    with pytest.raises(CheckpointError, match="no Region"):
        state["rows"].read(Region((0,), (5,)))


@given(data=st.data(), limit=st.integers(1, 30))
def test_blocks_cover_a_region_once(data: st.DataObject, limit: int) -> None:
    region = data.draw(regions((3, 1, 5, 4)))
    counts = torch.zeros(3, 1, 5, 4)
    for block in _directory._blocks(region, limit):
        assert block.numel <= limit
        counts[block.slices] += 1
    expected = torch.zeros(3, 1, 5, 4)
    expected[region.slices] = 1
    assert torch.equal(counts, expected)


def test_reading_leaves_no_file_open_and_the_metadata_alone(saved: Path) -> None:
    state = open_directory(saved, weights_only=False)["state_dict"]
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with mock.patch.object(_directory, "_read_metadata", side_effect=AssertionError):
        for stored in state.values():
            stored.full()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


# ------------------------------------------------------------------------------------------- overwriting


def versioned(number: int, size: int = 40, mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """State on two ranks, all of it saying the same number."""
    rows = torch.full((size, 8), float(number))
    if mesh is None and dist.is_initialized():
        mark_sharded(rows, 0, ParallelMode.GLOBAL)
    elif mesh is not None:
        rows = DTensor.from_local(rows, mesh, [Shard(0)])
    return {
        "number": number,
        "state_dict": {"rows": rows, "all": torch.full((size, 4), float(number))},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(float(number))}}}],
    }


def numbers_in(checkpoint: Mapping[str, Any]) -> set[float]:
    tensors = [*checkpoint["state_dict"].values(), checkpoint["optimizer_states"][0]["state"][0]["step"]]
    full = [tensor.full() if isinstance(tensor, StoredTensor) else tensor for tensor in tensors]
    return {float(checkpoint["number"])}.union(*(tensor.flatten().tolist() for tensor in full))


def read_numbers(path: Path) -> set[float]:
    return numbers_in(open_directory(path) if path.is_dir() else load_file(path))


def save_in_turn(path: str) -> list[Any]:
    ParallelContext().initialize()
    group, rank = get_group(ParallelMode.GLOBAL), dist.get_rank()
    seen: list[Any] = []

    def save_and_look(number: int, prepare: Callable[[], object] = lambda: None) -> None:
        if rank == 0:
            prepare()
        dist.barrier()
        save_directory(versioned(number), path, group=group)
        if rank == 0:
            place = Path(path)
            names = sorted(entry.name for entry in place.iterdir())
            seen.append((place.stat().st_ino, read_numbers(place), names, sorted(os.listdir(place.parent))))  # noqa: PTH208

    def leave_over() -> None:
        (Path(path) / "__dead_0_0.distcp").write_bytes(b"half")
        (Path(path) / ".metadata.partial").mkdir()
        (Path(path).parent / ".last.ckpt.partial").mkdir()

    save_and_look(1)
    save_and_look(2)
    save_and_look(3, leave_over)

    def put_a_file() -> None:
        save_file({"number": 4}, path)

    save_and_look(5, put_a_file)
    return seen


def test_a_directory_is_overwritten_in_place(run_ranks: Run, tmp_path: Path) -> None:
    seen, _ = run_ranks(save_in_turn, 2, str(tmp_path / "last.ckpt"))
    assert [numbers for _, numbers, _, _ in seen] == [{1.0}, {2.0}, {3.0}, {5.0}]
    assert seen[0][0] == seen[1][0] == seen[2][0]
    for _, _, names, around in seen:
        assert names[0] == ".metadata"
        assert [name.split("_")[3:] for name in names[1:]] == [["0", "0.distcp"], ["1", "0.distcp"]]
        assert around == ["last.ckpt"]
    assert not set(seen[0][2][1:]) & set(seen[1][2][1:])


def test_a_file_takes_the_place_of_a_file_a_directory_and_nothing_else(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "last.ckpt"
    save_file({"number": 1}, path)
    (path.parent / ".last.ckpt.partial").write_bytes(b"half")
    save_file({"number": 2}, path)
    assert load_file(path) == {"number": 2}
    path.unlink()
    path.mkdir()
    for file in saved.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    save_file({"number": 3}, str(path))
    assert load_file(path) == {"number": 3}
    assert [entry.name for entry in path.parent.iterdir()] == ["last.ckpt"]
    other = tmp_path / "other"
    other.mkdir()
    (other / ".metadata").write_bytes(b"")
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"other is a directory that holds 'thesis.tex'"):
        save_file({}, other)
    (other / ".metadata").unlink()
    (other / "thesis.tex").rename(other / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="holds no finished checkpoint"):
        save_file({}, other)
    assert (other / "__0_0.distcp").read_text() == "years of work"


# ----------------------------------------------------------------------------------------------- failures


class Unsafe:
    """An object that is no plain value."""


class Unpicklable:
    def __reduce__(self) -> str:
        raise TypeError("an open socket")


@pytest.fixture
def short_files() -> Iterator[None]:
    """A disk that is full after 2 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_that_cannot_be_written_leaves_the_last_one(tmp_path: Path, short_files: None) -> None:
    path = tmp_path / "last.ckpt"
    save_file({"number": 1}, path)
    for size in (400, 100_000):  # fails when the buffer is flushed, and when it is full
        with pytest.raises(CheckpointError, match=r"last.ckpt: File too large; raise the limit") as caught:
            save_file({"weights": torch.zeros(size)}, path)
        assert caught.value.__cause__ is not None
    with pytest.raises(CheckpointError, match=r"last.ckpt: TypeError: an open socket; everything in a"):
        save_file({"callback": Unpicklable()}, path)
    with pytest.raises(CheckpointError, match=rf"below: File exists: {path}"):
        save_file({}, path / "below")
    with pytest.raises(CheckpointError, match="s3://bucket/x is a URL"):
        save_file({}, "s3://bucket/x")
    with mock.patch("torch.save", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        save_file({}, path)
    assert load_file(path) == {"number": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def attempt(save: Callable[[], object]) -> str:
    try:
        save()
    except CheckpointError as error:
        return str(error)
    return "saved"


def at_the_origin(tensor: Tensor) -> Any:
    spec = shard_spec(tensor)
    return dataclasses.replace(spec, region=Region((0,) * tensor.dim(), spec.region.lengths))


def fail_to_save(path: str) -> list[str]:
    ParallelContext().initialize(timeout=20)
    group, rank = get_group(ParallelMode.GLOBAL), dist.get_rank()
    told: list[str] = []

    def save(checkpoint: Mapping[str, Any], where: str = path, asynchronous: bool = False) -> None:
        future = save_directory(checkpoint, where, group=group, asynchronous=asynchronous)
        if future is not None:
            future.result()

    def save_on_a_full_disk(full_rank: int, where: str = path, asynchronous: bool = False) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000 if rank == full_rank else limits[0], limits[1]))
        try:
            save(versioned(2), where, asynchronous)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    save(versioned(1))
    told.append(attempt(lambda: save_on_a_full_disk(1)))
    told.append(attempt(lambda: save_on_a_full_disk(0)))
    told.append(attempt(lambda: save_on_a_full_disk(1, f"{path}.new")))
    told.append(attempt(lambda: save_on_a_full_disk(1, asynchronous=True)))
    told.append(attempt(lambda: save({"callback": Unpicklable() if rank == 0 else None})))
    odd = torch.ones(3)
    mark_sharded(odd, 0, ParallelMode.GLOBAL, sizes=(3, 1))
    told.append(attempt(lambda: save({"state_dict": {"odd": odd}})))
    told.append(attempt(lambda: save({"state_dict": {f"only_{rank}": torch.ones(1)}})))
    told.append(attempt(lambda: save({"state_dict": {"a.b": odd[:1], "a": {"b": odd[:1]}}})))
    uneven = torch.ones(3 + rank)
    told.append(attempt(lambda: save({"state_dict": {"uneven": uneven}})))
    crossed = torch.ones(2, 4)[: 2 - rank, : 2 + 2 * rank]
    mark_sharded(crossed, 1 - rank, ParallelMode.GLOBAL, sizes=((2, 2), (1, 1))[rank])
    with mock.patch.object(_directory, "shard_spec", side_effect=lambda tensor: at_the_origin(tensor)):
        told.append(attempt(lambda: save({"state_dict": {"crossed": crossed}})))
    told.append(attempt(lambda: save({}, "s3://bucket/x")))
    told.append(attempt(lambda: save({}, str(Path(path).parent))))
    with mock.patch.object(_directory, "sync", side_effect=[None, PermissionError(1, "Not today")]):
        told.append(attempt(lambda: save(versioned(3))))
    return told


def test_a_failure_on_one_rank_is_told_on_all(run_ranks: Run, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    first, second = run_ranks(fail_to_save, 2, str(path))
    assert first == second
    full = f"{path}: File too large; raise the limit on the size of files, or save in parts, as a directory"
    new = f"{path}.new: rank 1: cannot write to {tmp_path}/.last.ckpt.new.partial: File too large"
    expected = [
        f"cannot write the checkpoint {path}: rank 1: cannot write to {full}",
        f"cannot write the checkpoint {path}: rank 0: cannot write to {full}",
        f"cannot write the checkpoint {new}",
        f"cannot write the checkpoint {path}: rank 1: cannot write to {full}",
        "rank 0: TypeError: an open socket; everything in a checkpoint must be picklable",
        "rank 1: rank 1 is number 1 of 2 in GLOBAL and holds 3 along dim 0",
        "rank 0: rank 1 holds state_dict.only_1, which rank 0 does not have",
        "rank 0, 1: a tensor at ('state_dict', 'a', 'b') would be called 'state_dict.a.b', which is taken",
        "rank 0: state_dict.uneven is torch.float32 [4] on rank 1 and torch.float32 [3] on rank 0; if",
        "rank 0: state_dict.crossed is [1, 4] at [0, 0] of torch.float32 [2, 4] on rank 1 and [2, 2] at",
        "rank 0: s3://bucket/x is a URL",
        f"{tmp_path} is a directory that holds 'last.ckpt'",
        "rank 0: Not today",
    ]
    assert [pair for pair in zip(first, expected, strict=True) if pair[1] not in pair[0]] == []
    assert read_numbers(path) == {1.0}
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]
    assert len(list(path.iterdir())) == 3


def test_what_cannot_be_read_is_named(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    save_file({"weights": torch.arange(5000.0), "object": Unsafe(), "place": Path("x")}, path)
    assert type(load_file(path, weights_only=False)["object"]) is Unsafe
    for weights_only in (None, True):
        with pytest.raises(
            CheckpointError, match=rf"{path} holds objects of pathlib.\S+, \S+Unsafe, which wei"
        ):
            load_file(path, weights_only)
    with torch.serialization.safe_globals([Unsafe, type(Path())]):
        assert load_file(path)["weights"].sum() == 5000 * 4999 / 2
    with pytest.raises(CheckpointError, match=f"there is no checkpoint {tmp_path}/none$"):
        load_file(tmp_path / "none")
    with pytest.raises(
        CheckpointError, match=r"all.ckpt is a checkpoint directory, where a checkpoint in one"
    ):
        load_file(saved)
    content = path.read_bytes()
    for cut in (len(content) - 10, len(content) // 2, 20, 0):
        path.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match=f"cannot read {path}: it is truncated, corrupt or no"):
            load_file(path, weights_only=False)
    path.write_bytes(os.urandom(1000))
    with pytest.raises(CheckpointError, match="truncated, corrupt or no checkpoint"):
        load_file(path)
    torch.save(torch.ones(1), path)
    with pytest.raises(CheckpointError, match="holds a Tensor, where a checkpoint is a dict"):
        load_file(path)
    path.rename(tmp_path / ".one.ckpt.replaced")
    with pytest.raises(CheckpointError, match=r"the previous one at .*/\.one\.ckpt\.replaced"):
        load_file(path)


def test_a_legacy_file_and_a_zip_are_mapped_or_read(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    torch.save(tensors, tmp_path / "legacy", _use_new_zipfile_serialization=False)
    save_file(tensors, tmp_path / "zip")
    for name in ("legacy", "zip"):
        loaded = load_file(tmp_path / name, weights_only=True)
        assert all(same(loaded[key], tensors[key]) for key in tensors)
        maps = Path("/proc/self/maps").read_text()
        assert (str(tmp_path / name) in maps) == (name == "zip")


def test_a_damaged_directory_says_what_is_wrong(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "copy.ckpt"

    def fresh() -> list[Path]:
        path.mkdir(exist_ok=True)
        for file in saved.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        return sorted(path.glob("*.distcp"))

    with pytest.raises(CheckpointError, match=f"there is no checkpoint {path}$"):
        open_directory(path)
    files = fresh()
    state = open_directory(path, weights_only=False)["state_dict"]
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        with pytest.raises(
            CheckpointError, match=rf"{file} is truncated: it has {len(content) - 1} bytes of"
        ):
            open_directory(path)
        file.write_bytes(bytes(len(content)))
    with pytest.raises(
        CheckpointError, match=rf"cannot read {path}/__\S+: it is truncated, corrupt or no ch"
    ):
        open_directory(path)
    for name in ("rows", "scalar"):
        with pytest.raises(CheckpointError, match=rf"cannot read state_dict.{name} in {path}/__"):
            state[name].full()
    fresh()
    files[1].write_bytes(b"x")
    with pytest.raises(CheckpointError, match=rf"{files[1]} is truncated: it ends before byte"):
        [stored.full() for name, stored in state.items() if files[1].name in str(stored._blocks)]
    fresh()
    files[2].unlink()
    for read in (lambda: open_directory(path), lambda: [stored.full() for stored in state.values()]):
        with pytest.raises(CheckpointError, match=rf"cannot read {files[2]}, .*; it is missing"):
            read()
    fresh()
    metadata = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(metadata[: len(metadata) // 2])
    with pytest.raises(CheckpointError, match=rf"cannot read {path}/.metadata: it is truncated or corrupt"):
        open_directory(path)
    (path / ".metadata").write_bytes(pickle.dumps({"no": "metadata"}))
    with pytest.raises(CheckpointError, match="it holds a dict"):
        open_directory(path)
    (path / ".metadata").write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")
    with pytest.raises(CheckpointError, match=r"os.system does not belong"):
        open_directory(path)
    (path / ".metadata").unlink()
    assert not is_directory_checkpoint(path)
    with pytest.raises(CheckpointError, match=f"{path} has no .metadata: it is an unfinished save, or no"):
        open_directory(path)
    with pytest.raises(CheckpointError, match=f"{files[0]} is a file, where a checkpoint directory"):
        open_directory(files[0])
    with pytest.raises(CheckpointError, match=r"holds objects of \S+\.Pair, which weights_only refuses"):
        open_directory(saved, weights_only=True)


# ---------------------------------------------------------------------------------------- asynchronously


def save_and_train_on(path: str) -> list[Any]:
    ParallelContext().initialize()
    group = get_group(ParallelMode.GLOBAL)
    state = versioned(1, size=40_000)
    state["callback"] = {"list": [1], "tensor": torch.ones(1)}
    tensors = [*state["state_dict"].values(), *state["optimizer_states"][0]["state"][0].values()]
    future = save_directory(state, path, group=group, asynchronous=True)
    for tensor in [*tensors, state["callback"]["tensor"]]:
        tensor.fill_(2.0)
    state["number"] = state["callback"]["list"][0] = 2
    assert future is not None
    return [future.result(), save_directory(versioned(7), f"{path}.sync", group=group)]


def test_training_goes_on_while_a_copy_is_written(run_ranks: Run, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    assert run_ranks(save_and_train_on, 2, str(path)) == [[None, None], [None, None]]
    checkpoint = open_directory(path)
    assert numbers_in(checkpoint) == {1.0}
    assert checkpoint["callback"] == {"list": [1], "tensor": torch.ones(1)}
    assert read_numbers(tmp_path / "last.ckpt.sync") == {7.0}


# ------------------------------------------------------------------------------------------------- killed


def fork(function: Callable[..., None], *args: Any) -> int:
    """Run a function in a child that dies with this process; it ends with 3 after a CheckpointError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of other threads
        child = os.fork()
    if child:
        return child
    status = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        function(*args)
        status = 0
    except CheckpointError:
        status = 3
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def put_there(kind: str, path: Path, number: int, mesh: DeviceMesh | None) -> None:
    if mesh is not None and kind == "directory":
        save_directory(versioned(number, size=2000, mesh=mesh), path, group=mesh.get_group())
    elif kind == "file":
        save_file(versioned(number, size=2000), path)


def world(rank: int, size: int, store: str) -> DeviceMesh:
    """A world of its own for a child."""
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    dist.barrier()
    return mesh


def save_over_and_over(kind: str, path: Path, rank: int, numbers: range, store: str, report: int) -> None:
    """Save growing numbers until killed."""
    mesh = world(rank, 2, store) if kind == "directory" else None
    for number in numbers:
        os.write(report, b"x")
        put_there(kind, path, number, mesh)
    os.write(report, b"x")


def kill_savers(kind: str, path: str, trials: int, seed: int) -> list[Any]:
    """Kill what saves at random moments, look each time at what is there, and let the last one finish."""
    random.seed(seed)
    seen, last = [], -1  # -1: there is nothing yet
    for trial in range(trials + 1):
        reports, write = os.pipe()
        children = []
        for rank in range(1 if kind == "file" else 2):
            numbers = range(last + 1, last + (100_000 if trial < trials else 2))
            report = write if rank == 0 else os.open(os.devnull, os.O_WRONLY)
            child = fork(save_over_and_over, kind, Path(path), rank, numbers, f"{path}.store{trial}", report)
            children.append(child)
            os.close(report)
        begun = len(os.read(reports, 1))
        victims: list[int] = []
        if trial < trials:
            time.sleep(random.random() * (0.04 if kind == "file" else 0.2))
            # All at once, as a scheduler does it, or one of two, whose peer must come to an end by itself.
            victims = random.choice([children, children[:1], children[-1:]])
            for child in victims:
                os.kill(child, signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        begun += len(os.read(reports, 1_000_000))
        os.close(reports)
        (number,) = read_numbers(Path(path)) if Path(path).exists() else {-1.0}
        left = [entry.name for entry in Path(path).parent.iterdir() if ".store" not in entry.name]
        left += os.listdir(path) if Path(path).is_dir() else []  # noqa: PTH208
        seen.append((number - last, begun, codes, [child in victims for child in children], sorted(left)))
        last = int(number)
    return seen


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_save_that_is_killed_leaves_one_whole_checkpoint(run_ranks: Run, tmp_path: Path, kind: str) -> None:
    path, seed = str(tmp_path / "last.ckpt"), random.randrange(10**6)
    (seen,) = run_ranks(kill_savers, 1, kind, path, 10, seed)
    for gained, begun, codes, killed, _ in seen[:-1]:
        # The save that had begun took effect, or the one before it is still there.
        assert gained in (begun - 1, begun), f"{seed=}"
        assert codes == [-signal.SIGKILL if victim else 3 for victim in killed]
    gained, begun, codes, _, left = seen[-1]
    assert (gained, begun, set(codes)) == (1, 2, {0})
    assert len(left) == (1 if kind == "file" else 4), left


def save_up_to(step: int, *args: Any) -> None:
    """Save, and end the process at the given step of those that touch the disk."""
    left = iter(range(step))

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_or_die(*args: Any, **kwargs: Any) -> Any:
            if next(left, None) is None:
                os._exit(9)
            return call(*args, **kwargs)

        return call_or_die

    for owner, name in [
        *((Path, name) for name in ("replace", "rename", "unlink", "mkdir", "rmdir", "open")),
        *((os, "fsync"), (shutil, "rmtree"), (torch, "save")),
    ]:
        setattr(owner, name, dying(getattr(owner, name)))
    put_there(*args)


def die_at_each_step(path: str, before: str, after: str) -> tuple[list[Any], list[Any]]:
    """Let a save end at its first step, then at its second, and so on until it comes to its end."""
    place, steps, later = Path(path), [], []
    aside, first = place.with_name(f".{place.name}.replaced"), Path(f"{path}.first")

    def save(kind: str, where: Path, number: int, step: int = 1000) -> int:
        store = f"{path}.store"
        Path(store).unlink(missing_ok=True)

        def in_a_world() -> None:
            save_up_to(step, kind, where, number, world(0, 1, store) if kind == "directory" else None)

        return os.waitstatus_to_exitcode(os.waitpid(fork(in_a_world), 0)[1])

    save(before, first, 1)
    code = 9
    while code == 9:
        (shutil.copytree if before == "directory" else shutil.copy)(first, place)
        code = save(after, place, 2, len(steps))
        steps.append((code, [read_numbers(where) for where in (place, aside) if where.exists()]))
        if len(steps) % 3 == 0 or code == 0:
            save(after, place, 3)  # finds what the one before has left
            later.append((read_numbers(place), {entry.suffix for entry in place.parent.iterdir()}))
        remove(place)
    return steps, later


@pytest.mark.parametrize("before", ["file", "directory"])
@pytest.mark.parametrize("after", ["file", "directory"])
def test_a_save_may_end_at_any_step(run_ranks: Run, tmp_path: Path, before: str, after: str) -> None:
    ((steps, later),) = run_ranks(die_at_each_step, 1, str(tmp_path / "last.ckpt"), before, after)
    codes, found = zip(*steps, strict=True)
    assert codes == (9,) * (len(steps) - 1) + (0,)
    assert len(steps) > 5
    # One step makes the new one of the old one. Only where a file and a directory change places, the old one
    # waits aside for a moment.
    new = next(number for number, numbers in enumerate(found) if numbers != [{1.0}])
    assert all(numbers in ([{2.0}], [{2.0}, {1.0}]) for numbers in found[new:])
    assert found[-1] == [{2.0}]
    assert ([{2.0}, {1.0}] in found) == (before != after)
    assert all(numbers == {3.0} and left <= {".ckpt", ".first", ".store"} for numbers, left in later)


# ------------------------------------------------------------------------------------- of other programs


def lightning_directory(path: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Write what Lightning's ModelParallelStrategy does; and a model that has been trained one step."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(
        [{"params": model[1].parameters(), "lr": 0.5}, {"params": model[0].parameters(), "betas": (0.5, 0.6)}]
    )
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(
            {"state_dict": model.state_dict(), "optimizer_0": get_optimizer_state_dict(model, optimizer)},
            checkpoint_id=path,
        )
    return model, optimizer


def test_a_directory_of_lightning_is_read_as_any_other(tmp_path: Path) -> None:
    path = tmp_path / "lightning.ckpt"
    model, optimizer = lightning_directory(path)
    with pytest.raises(CheckpointError, match=r"no item 'rlightning_groups' and no file meta.pt"):
        open_directory(path)
    torch.save({"epoch": 3}, path / "meta.pt")
    checkpoint = open_directory(path)
    assert sorted(checkpoint) == ["epoch", "optimizer_states", "state_dict"]
    state = model.state_dict()
    assert list(checkpoint["state_dict"]) == list(state)
    assert all(same(stored.full(), state[name]) for name, stored in checkpoint["state_dict"].items())
    (loaded,), expected = checkpoint["optimizer_states"], optimizer.state_dict()
    for group, other in zip(loaded["param_groups"], expected["param_groups"], strict=True):
        assert {key: group[key] for key in other} == other
    assert sorted(loaded["state"]) == [0, 1, 2, 3]
    for number, entries in loaded["state"].items():
        assert all(same(entries[key].full(), value) for key, value in expected["state"][number].items())
    save_file({}, path)  # and is replaced as any other
    assert load_file(path) == {}


def test_a_part_of_a_tensor_is_not_written_as_the_whole(run_ranks: Run, tmp_path: Path) -> None:
    texts = run_ranks(save_parts_in_a_file, 2, str(tmp_path))
    assert [text.partition(": ")[2] for text in texts] == [
        f"the tensor at state.0 is this rank's part of one of shape {shape}; gather it, or save in parts, as "
        f"a directory"
        for shape in ([4], [6])
    ]
    checkpoint = load_file(tmp_path / "whole")
    assert same(checkpoint["state"][0], torch.ones(3))
    assert same(checkpoint["state"][1], torch.ones(2))


def save_parts_in_a_file(path: str) -> str:
    ParallelContext().initialize(tensor_parallel_size=2)
    by_mark, mesh = torch.ones(2), ParallelContext().device_mesh(TP)
    mark_sharded(by_mark, 0, TP)
    by_placement = DTensor.from_local(torch.ones(3), mesh, [Shard(0)])
    copies = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
    over_one, partial = torch.ones(2), nn.Parameter(torch.ones(2))
    mark_sharded(over_one, 0, DP)
    mark_partial_gradient(partial, TP)
    if dist.get_rank() == 0:
        save_file({"state": [copies, over_one, partial]}, f"{path}/whole")
    part = (by_mark, by_placement)[dist.get_rank()]
    return attempt(lambda: save_file({"state": [part]}, f"{path}/part{dist.get_rank()}"))
