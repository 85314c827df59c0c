"""The strategy from a configuration file."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from strategy_models import NAMESPACES, SEQUENCE, TENSOR, Run, be_quiet, line, loader

from rlightning_groups import ParallelContext, get_world_size

CONFIG = """
seed_everything: 3
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  limit_val_batches: 0
  log_every_n_steps: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy: {strategy}
"""
BY_CLASS = """
    class_path: rlightning_groups.{module}.HybridParallelStrategy
    init_args:
      tensor_parallel_size: 2
      order: sp-tp-dp
      timeout: '0:01:00'
"""
MODULES = {"pytorch_lightning": "pytorch_lightning", "lightning.pytorch": "lightning"}


def run_cli(namespace: str, config: str) -> dict[str, Any]:
    class WithData:
        def train_dataloader(self) -> Any:
            return loader(4)

    be_quiet()
    for old in ("JsonargparseDeprecationWarning", "was deprecated in v4"):  # names that Lightning uses
        warnings.filterwarnings("ignore", f"(?s).*{old}")
    import_module(f"rlightning_groups.{MODULES[namespace]}")
    model = type(line(namespace, WithData))
    cli_class = import_module(f"{namespace}.cli").LightningCLI
    with mock.patch.object(sys, "argv", ["train.py", "fit", "--config", config]):
        cli = cli_class(model, save_config_callback=None)
    return {
        "strategy": type(cli.trainer.strategy).__module__,
        "steps": cli.trainer.global_step,
        "sizes": (get_world_size(TENSOR), get_world_size(SEQUENCE)),
        "order": ParallelContext().layout.order,
    }


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_by_name(run_ranks: Run, namespace: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(strategy="hybrid_parallel"))
    home = f"rlightning_groups.{MODULES[namespace]}"
    expected = {"strategy": home, "steps": 2, "sizes": (1, 1), "order": "tp-sp-dp"}
    assert run_ranks(run_cli, 2, namespace, str(config)) == [expected] * 2


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_by_class_path(run_ranks: Run, namespace: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(strategy=BY_CLASS.format(module=MODULES[namespace])))
    home = f"rlightning_groups.{MODULES[namespace]}"
    expected = {"strategy": home, "steps": 4, "sizes": (2, 1), "order": "sp-tp-dp"}
    assert run_ranks(run_cli, 2, namespace, str(config)) == [expected] * 2
