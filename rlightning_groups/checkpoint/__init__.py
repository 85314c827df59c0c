"""Model and optimizer state that resumes under any layout: in full in a file, in parts in a directory."""

from rlightning_groups.checkpoint._directory import (
    StoredTensor,
    consolidate_checkpoint,
    is_directory_checkpoint,
    open_directory,
    save_directory,
)
from rlightning_groups.checkpoint._file import load_file, save_file
from rlightning_groups.checkpoint._full import (
    full_state,
    gather_state,
    shard_like,
    shard_model_state,
    shard_optimizer_state,
    sharded_optimizer_state,
)

__all__ = [
    "StoredTensor",
    "consolidate_checkpoint",
    "full_state",
    "gather_state",
    "is_directory_checkpoint",
    "load_file",
    "open_directory",
    "save_directory",
    "save_file",
    "shard_like",
    "shard_model_state",
    "shard_optimizer_state",
    "sharded_optimizer_state",
]
