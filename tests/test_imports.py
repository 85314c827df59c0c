"""What an import brings along, and what the package promises to have."""

from __future__ import annotations

import inspect
import subprocess
import sys
from abc import ABC
from typing import Any

import pytest

import rlightning_groups
from rlightning_groups import group_initializer

LIGHTNING = {"pytorch_lightning", "lightning", "lightning_fabric", "torchmetrics"}


def loaded_after(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after running the code."""
    code += "\nimport sys\nprint('LOADED', *sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.partition("LOADED ")[2].split())


@pytest.mark.parametrize(
    "code",
    [
        "import rlightning_groups; dir(rlightning_groups); rlightning_groups.__version__",
        "from rlightning_groups import ParallelLayout, ParallelMode, LayoutError\n"
        "assert ParallelLayout(8, 2).groups(ParallelMode.TENSOR_PARALLEL)[1] == [2, 3]",
        "import rlightning_groups.layout, rlightning_groups.modes, rlightning_groups.errors",
        "from rlightning_groups.cli import parse\nassert parse(['check', '--repeat', '2']).repeat == 2",
    ],
)
def test_the_layout_needs_no_torch(code: str) -> None:
    """The package, its modes, layout and errors are there without torch and without Lightning."""
    loaded = loaded_after(code)
    assert "rlightning_groups" in loaded
    assert not loaded & {"torch", "numpy", *LIGHTNING}


WITHOUT_LIGHTNING = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {lightning!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from rlightning_groups import *
assert get_group.__module__ == "rlightning_groups.context"
import rlightning_groups.group_initializer, rlightning_groups.mesh
context = ParallelContext().initialize()
assert get_world_size(ParallelMode.TENSOR_PARALLEL) == 1
import torch
from rlightning_groups.metrics import sync_metrics_over, sync_unconfigured_metrics
assert sync_unconfigured_metrics(torch.nn.Linear(1, 1)) == 0
try:
    sync_metrics_over(torch.nn.Linear(1, 1))
except LayoutError as error:
    assert "there is none in Linear" in str(error), error
else:
    raise AssertionError("a metric without torchmetrics")
context.destroy()
import rlightning_groups
try:
    rlightning_groups.HybridParallelStrategy
except ImportError as error:
    assert "pip install 'rlightning_groups[lightning]'" in str(error), error
else:
    raise AssertionError("a strategy without Lightning")
"""


def test_the_context_needs_no_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout worker has no Lightning: everything but the strategy works, which says what it needs."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    loaded = loaded_after(WITHOUT_LIGHTNING.format(lightning=LIGHTNING))
    assert "torch" in loaded
    assert not loaded & LIGHTNING


def test_every_public_name_is_there() -> None:
    for name in rlightning_groups.__all__:
        assert getattr(rlightning_groups, name) is not None
    assert set(rlightning_groups.__all__) < set(dir(rlightning_groups))
    assert "HybridParallelStrategy" in dir(rlightning_groups)
    with pytest.raises(AttributeError, match="module 'rlightning_groups' has no attribute 'get_grup'"):
        rlightning_groups.get_grup  # noqa: B018


# ------------------------------------------------------------------------- the interface it started from

CONSTRUCTORS = {
    "ProcessGroupInitializer": ["rank", "world_size"],
    "DPGroupInitializer": ["rank", "world_size", "data_parallel_size"],
    "TPGroupInitializer": ["rank", "world_size", "tensor_parallel_size"],
    "SPGroupInitializer": ["rank", "world_size", "sequence_parallel_size"],
    "InterNodeGroupInitializer": ["rank", "world_size", "local_world_size"],
    "IntraNodeGroupInitializer": ["rank", "world_size", "ranks"],
    "TrainDPGroupInitializer": ["rank", "world_size", "ranks"],
    "WeightTransferGroupInitializer": ["rank", "world_size", "ranks"],
}
CONSTANTS = {
    "CommMode": ["GLOBAL", "INTER_NODE", "INTRA_NODE"],
    "ParallelMode": [
        "DATA_PARALLEL",
        "SEQUENCE_PARALLEL",
        "TENSOR_PARALLEL",
        "TRAIN_DATA_PARALLEL",
        "WEIGHT_TRANSFER",
    ],
}
ATTRIBUTES = [
    "rank",
    "world_size",
    "local_rank",
    "ranks_in_group",
    "process_group",
    "group_world_size",
    "mode",
]


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_the_seed_signatures(name: str) -> None:
    kind = getattr(group_initializer, name)
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    assert [p.name for p in parameters] == CONSTRUCTORS[name]
    assert all(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    call = inspect.signature(kind.init_dist_group).parameters
    assert [(p.name, p.default) for p in list(call.values())[1:]] == [("backend", "nccl"), ("use_cpu", False)]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in call.values())
    assert issubclass(kind, group_initializer.ProcessGroupInitializer)
    assert issubclass(kind, ABC)
    assert name in group_initializer.__all__


@pytest.mark.parametrize("name", [name for name in CONSTRUCTORS if name != "ProcessGroupInitializer"])
def test_the_seed_attributes(name: str) -> None:
    """Constructed by keyword, as the seed names them, each has the seed's attributes before any group is."""
    arguments: dict[str, Any] = {"rank": 1, "world_size": 4}
    last = CONSTRUCTORS[name][-1]
    arguments[last] = [1, 2] if last == "ranks" else 2
    initializer = getattr(group_initializer, name)(**arguments)
    values = {attribute: getattr(initializer, attribute) for attribute in ATTRIBUTES}
    mode = values.pop("mode")
    nothing = dict.fromkeys(ATTRIBUTES[2:-1])
    assert values == {"rank": 1, "world_size": 4, **nothing}
    assert getattr(initializer, last) == arguments[last]
    assert (
        mode
        == {
            "DPGroupInitializer": "DATA_PARALLEL",
            "TPGroupInitializer": "TENSOR_PARALLEL",
            "SPGroupInitializer": "SEQUENCE_PARALLEL",
            "InterNodeGroupInitializer": "INTER_NODE",
            "IntraNodeGroupInitializer": "INTRA_NODE",
            "TrainDPGroupInitializer": "TRAIN_DATA_PARALLEL",
            "WeightTransferGroupInitializer": "WEIGHT_TRANSFER",
        }[name]
    )


@pytest.mark.parametrize("name", CONSTANTS)
def test_the_seed_constants(name: str) -> None:
    kind = getattr(group_initializer, name)
    assert {key: value for key, value in vars(kind).items() if key.isupper()} == {
        constant: constant for constant in CONSTANTS[name]
    }
    assert kind is getattr(rlightning_groups, name)
    assert issubclass(group_initializer.ParallelMode, group_initializer.CommMode)
