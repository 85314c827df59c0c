"""Fixtures shared by all tests: the pool of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from _pytest.config import parse_warning_filter
from hypothesis import settings
from pool import RankPool, start_fork_server, stop_fork_server

settings.register_profile("suite", deadline=None, max_examples=50, derandomize="CI" in os.environ)
settings.load_profile("suite")

# Torch asks for the name of every peer; a name server that drops the question would cost 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let the fork server import while the rest is collected, from within what captures its output."""
    if "rank_pool" in metafunc.fixturenames and not metafunc.config.option.collectonly:
        start_fork_server()


def pytest_unconfigure() -> None:
    stop_fork_server()


@pytest.fixture(scope="session")
def rank_pool(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    """The session's pool of ranks; its processes start with the first task."""
    ini = [parse_warning_filter(line, escape=False) for line in pytestconfig.getini("filterwarnings")]
    command_line = pytestconfig.known_args_namespace.pythonwarnings or []
    pool = RankPool(ini + [parse_warning_filter(line, escape=True) for line in command_line])
    yield pool
    pool.close()


@pytest.fixture
def run_ranks(rank_pool: RankPool) -> Callable[..., list[Any]]:
    """Run a function of a test module as several ranks; see :meth:`pool.RankPool.run`."""
    return rank_pool.run
