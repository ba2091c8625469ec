"""Run independent units here, in processes, or through Ray. Rows are the same in every case.

A unit is a function of the top level of a module and arguments that can be pickled. On a CPU each
runs on one thread, wherever it runs: sums depend on the number of threads.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

Unit = Callable[..., Any]


def run_units(
    function: Unit,
    arguments: Mapping[str, tuple[Any, ...]],
    *,
    workers: int = 1,
    ray: str | None = None,
) -> Generator[tuple[str, Any], None, None]:
    """(key, ``function(*arguments[key])``) in the order in which units finish.

    Closed early, it begins no further unit and drops those under way.

    workers: processes, 1 runs in this one. ray: address of a cluster ("auto", "local" or
    "ray://host:port"), which then decides how many run at once.

    Raises:
        ValueError: workers is below 1, or Ray is asked for and not installed.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if not arguments:
        return
    if ray is not None:
        yield from _through_ray(function, arguments, ray)
    elif workers == 1 or len(arguments) < 2:
        for key, values in arguments.items():
            yield key, one_thread(function, *values)
    else:
        yield from _in_processes(function, arguments, workers)


def one_thread(function: Unit, *values: Any) -> Any:
    """Call with one thread for torch, and put the number back."""
    with _threads(1):
        return function(*values)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _in_processes(
    function: Unit, arguments: Mapping[str, tuple[Any, ...]], workers: int
) -> Iterator[tuple[str, Any]]:
    # "spawn": a forked process would inherit CUDA and thread pools in an undefined state.
    context = multiprocessing.get_context("spawn")
    count = min(workers, len(arguments))
    with ProcessPoolExecutor(count, mp_context=context, initializer=_alone) as pool:
        futures = {
            pool.submit(one_thread, function, *values): key for key, values in arguments.items()
        }
        try:
            for done in as_completed(futures):
                yield futures[done], done.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _alone() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def _through_ray(
    function: Unit, arguments: Mapping[str, tuple[Any, ...]], address: str
) -> Iterator[tuple[str, Any]]:
    if find_spec("ray") is None:
        raise ValueError("--ray needs Ray: pip install 'videokv[scale]'; or use --workers")
    import ray

    started = not ray.is_initialized()
    ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
    try:
        remote = ray.remote(one_thread)
        waiting = {remote.remote(function, *values): key for key, values in arguments.items()}
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1)
            yield waiting.pop(done[0]), ray.get(done[0])
    finally:
        if started:  # a caller's own connection stays
            ray.shutdown()
