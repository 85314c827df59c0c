"""The names of the groups: which ranks a process group joins, and what for.

A mode is a plain string, so a mode of one's own is any other string.
"""


class CommMode:
    """Modes that follow from where the processes run.

    Attributes:
        GLOBAL: every process of the job.
        INTRA_NODE: the processes of one node.
        INTER_NODE: the processes with the same local rank, one on each node that has it.
    """

    GLOBAL: str = "GLOBAL"
    INTER_NODE: str = "INTER_NODE"
    INTRA_NODE: str = "INTRA_NODE"


class ParallelMode(CommMode):
    """Modes that follow from how the model and its data are spread.

    Attributes:
        TRAIN_DATA_PARALLEL: the ranks that hold a copy of the same weights (data x sequence), over which
            gradients and losses are reduced.
        DATA_PARALLEL: the ranks that read different samples; the sampler follows it.
        TENSOR_PARALLEL: the ranks that share one layer's weights.
        SEQUENCE_PARALLEL: the ranks that share one sample's tokens.
        WEIGHT_TRANSFER: senders and receivers of weights; a rank may be in several, told apart by name.
    """

    DATA_PARALLEL: str = "DATA_PARALLEL"
    SEQUENCE_PARALLEL: str = "SEQUENCE_PARALLEL"
    TENSOR_PARALLEL: str = "TENSOR_PARALLEL"
    TRAIN_DATA_PARALLEL: str = "TRAIN_DATA_PARALLEL"
    WEIGHT_TRANSFER: str = "WEIGHT_TRANSFER"
