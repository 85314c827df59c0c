"""The ``rlightning-groups`` command.

Each sub-command is two functions: one adds its arguments, one carries it out and returns the exit code.
Torch is imported by what carries it out, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TextIO

from rlightning_groups._version import __version__

_UNITS = {
    "": 1,
    "B": 1,
    "K": 1 << 10,
    "KIB": 1 << 10,
    "M": 1 << 20,
    "MIB": 1 << 20,
    "G": 1 << 30,
    "GIB": 1 << 30,
}

Run = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Carry out a command and end the process with its exit code.

    Args:
        arguments: of the command line, ``None`` for this process's own.
    """
    options = parse(arguments)
    run: Run = options.run
    sys.exit(run(options))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command; ``run`` among them carries it out.

    Args:
        arguments: of the command line, ``None`` for this process's own.
    """
    parser = argparse.ArgumentParser(prog="rlightning-groups", description="Process groups by parallel mode.")
    parser.add_argument("--version", action="version", version=f"rlightning_groups {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_check(commands)
    return parser.parse_args(arguments)


# --------------------------------------------------------------------------------------------------- check


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "see whether every group works on these machines"
    parser = commands.add_parser(
        "check",
        help=about,
        description=f"{about[0].upper()}{about[1:]}, before a job needs them. Start it as the job is "
        "started, on every rank: torchrun ... -m rlightning_groups check. Ranks that are missing, were "
        "started with other settings, are not reached by others, or are slow are named.",
        epilog="Exit code of every rank: 0 all is well, 1 something is slow (with --strict), 2 something is "
        "broken.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(run=_check)
    add = parser.add_argument
    add(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share one layer's weights",
    )
    add(
        "--sequence-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share one sample's tokens",
    )
    add("--order", default="tp-sp-dp", help="the axes, fastest first")
    add("--backend", help="torch backend of the groups; by default nccl for CUDA and gloo for CPU")
    add("--timeout", type=_above(0.0), default=30.0, metavar="SECONDS", help="time for each step")
    add(
        "--sizes",
        type=_sizes,
        default="1KiB,1MiB,16MiB",
        metavar="BYTES",
        help="of the messages, separated by commas; the first one is for latency",
    )
    add("--repeat", type=_count, default=5, metavar="N", help="how often each thing is measured")
    add(
        "--slow-factor",
        type=_above(1.0),
        default=5.0,
        metavar="FACTOR",
        help="how many times what is usual counts as slow",
    )
    add("--strict", action="store_true", help="exit with 1 if something is slow")
    add("--json", action="store_true", help="write JSON to the standard output of the first rank")


def _check(options: argparse.Namespace) -> int:
    # So that a blocked connection shows in the pings by name, and does not hang the making of the groups.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    # An operation of NCCL that times out then raises here, and does not abort the process.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    # What torch writes about a peer that is gone would bury the report.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    out = _take_standard_output()
    from rlightning_groups._check import Options, check

    code = check(
        Options(
            tensor_parallel_size=options.tensor_parallel_size,
            sequence_parallel_size=options.sequence_parallel_size,
            order=options.order,
            backend=options.backend,
            timeout=options.timeout,
            sizes=options.sizes,
            repeat=options.repeat,
            slow_factor=options.slow_factor,
            strict=options.strict,
            as_json=options.json,
        ),
        out,
    )
    _end_quickly(code)
    from rlightning_groups.context import ParallelContext

    ParallelContext().destroy()
    return code


def _take_standard_output() -> TextIO:
    """The standard output for the report alone: gloo writes to it, too, and goes to the standard error."""
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _end_quickly(code: int) -> None:
    """End a process that failed without taking its groups down, which may hang once a peer is gone."""
    if code:
        # The launcher ends all ranks as soon as one has failed, but each is to end with its own code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# ----------------------------------------------------------------------------------------- types of options


def _above(bound: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not bound < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} must be more than {bound:g}")
        return value

    return number


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def _sizes(text: str) -> tuple[int, ...]:
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)\s*([a-z]*)", part.strip(), re.IGNORECASE)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None or (size := int(match[1]) * unit) < 4 or size % 4:
            raise argparse.ArgumentTypeError(f"{part!r} must be a multiple of 4 bytes, such as 1KiB or 16MiB")
        sizes.append(size)
    if sizes != sorted(set(sizes)):
        raise argparse.ArgumentTypeError(f"{text} must go from small to large")
    return tuple(sizes)
