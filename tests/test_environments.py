"""The launchers that Lightning knows: each one's variables give the right ranks, and groups by node."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import TORCHRUN
from pytorch_lightning.plugins.environments import KubeflowEnvironment
from strategy_models import TENSOR, Run, new_trainer, strategy_of

from rlightning_groups import ParallelContext, ParallelMode, get_group, get_ranks_in_group

WORLD = 4


def slurm(rank: int, folder: str) -> dict[str, str]:
    """Two nodes of two tasks, as srun sets them."""
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": str(WORLD),
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "host[1-2]",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(rank // 2),
    }


def torchrun(rank: int, folder: str) -> dict[str, str]:
    """Two nodes of two processes."""
    return {
        "TORCHELASTIC_RUN_ID": "77",
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "LOCAL_RANK": str(rank % 2),
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": str(rank // 2),
    }


def lightning(rank: int, folder: str) -> dict[str, str]:
    """Two nodes, on each of which the script was started, and has started one more process."""
    return {"LOCAL_RANK": str(rank % 2), "NODE_RANK": str(rank // 2)}


def lsf(rank: int, folder: str) -> dict[str, str]:
    """Four processes of jsrun on this host; the first line is the node that the job was sent from."""
    file = Path(folder) / f"ranks-{rank}"
    file.write_text("\n".join(["batch", *[socket.gethostname()] * WORLD]) + "\n")
    return {
        "LSB_JOBID": "77",
        "LSB_DJOB_RANKFILE": str(file),
        "JSM_NAMESPACE_SIZE": str(WORLD),
        "JSM_NAMESPACE_RANK": str(rank),
        "JSM_NAMESPACE_LOCAL_RANK": str(rank),
    }


def kubeflow(rank: int, folder: str) -> dict[str, str]:
    """Four nodes of one process."""
    return {"KUBERNETES_PORT": "tcp://127.0.0.1:1", "RANK": str(rank), "WORLD_SIZE": str(WORLD)}


# Per launcher: its variables, Lightning's environment, and the nodes it speaks of.
LAUNCHERS: dict[str, tuple[Any, str, list[list[int]]]] = {
    "slurm": (slurm, "SLURMEnvironment", [[0, 1], [2, 3]]),
    "torchrun": (torchrun, "TorchElasticEnvironment", [[0, 1], [2, 3]]),
    "lightning": (lightning, "LightningEnvironment", [[0, 1], [2, 3]]),
    "lsf": (lsf, "LSFEnvironment", [[0, 1, 2, 3]]),
    "kubeflow": (kubeflow, "KubeflowEnvironment", [[0], [1], [2], [3]]),
}


def ranks_under(launcher: str, port: int, folder: str) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    for name in TORCHRUN:
        os.environ.pop(name, None)
    variables, kind, nodes = LAUNCHERS[launcher]
    os.environ.update(variables(rank, folder), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    trainer = new_trainer(
        strategy_of(tensor_parallel_size=2),
        devices=len(nodes[0]),
        num_nodes=len(nodes),
        plugins=KubeflowEnvironment() if launcher == "kubeflow" else None,
    )
    environment = trainer.strategy.cluster_environment
    environment._main_port = port  # LSF takes one from the job's number
    assert type(environment).__name__ == kind
    trainer.strategy.setup_environment()
    x = torch.tensor([2.0**rank])
    dist.all_reduce(x, group=get_group(TENSOR))
    return {
        "ranks": (trainer.global_rank, trainer.world_size, trainer.local_rank, trainer.node_rank),
        "node": get_ranks_in_group(ParallelMode.INTRA_NODE),
        "across": get_ranks_in_group(ParallelMode.INTER_NODE),
        "nodes": ParallelContext().layout.node_count,
        "sum": float(x),
    }


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_and_nodes(run_ranks: Run, tmp_path: Path, launcher: str) -> None:
    nodes = LAUNCHERS[launcher][2]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for rank, found in enumerate(run_ranks(ranks_under, WORLD, launcher, port, str(tmp_path))):
        number = next(number for number, ranks in enumerate(nodes) if rank in ranks)
        local = nodes[number].index(rank)
        assert found == {
            "ranks": (rank, WORLD, local, number),
            "node": nodes[number],
            "across": [ranks[local] for ranks in nodes],
            "nodes": len(nodes),
            "sum": 2.0 ** (rank // 2 * 2) * 3,
        }
