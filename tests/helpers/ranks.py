"""Real processes that form a gloo group, started once and used by many tests.

A test gives a module-level function and its arguments; every rank calls it, and the test gets what
each returned. A rank that raises fails the test with its traceback; one that hangs is killed.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from amphal._torch import float16_regions

TIMEOUT = 120.0  # seconds for one call: generous, since the cores may be busy


class Ranks:
    """``size`` spawned processes in one gloo group, which is started at the first call."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory()

    def __call__(self, func: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """``func(*args)`` on every rank; the results by rank."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((func, args))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        try:
            while len(answers) < self.size:
                self._collect(answers, deadline)
        except BaseException:
            self.stop()
            raise
        failed = {rank: text for rank, (good, text) in answers.items() if not good}
        if failed:
            self.stop()  # the others may have been left in the middle of a collective
            told = "\n".join(f"rank {rank}: {text}" for rank, text in sorted(failed.items()))
            raise AssertionError(f"ranks {sorted(failed)} failed\n{told}")
        return [answers[rank][1] for rank in range(self.size)]

    def _collect(self, answers: dict[int, tuple[bool, Any]], deadline: float) -> None:
        waiting = {self._pipes[r]: r for r in range(self.size) if r not in answers}
        # After one failure the others get a moment to finish, and are not waited for.
        patience = 5.0 if any(not good for good, _ in answers.values()) else None
        left = deadline - time.monotonic()
        ready = wait(list(waiting), min(left, patience) if patience else max(left, 0))
        if not ready:
            for rank in waiting.values():
                answers[rank] = (False, "did not answer: it hangs, or waits for another rank")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            try:
                answers[rank] = pipe.recv()
            except EOFError:
                self._processes[rank].join(10)
                answers[rank] = (False, f"died, exit code {self._processes[rank].exitcode}")

    def _start(self) -> None:
        context = mp.get_context("spawn")
        store = Path(self._folder.name) / f"store{time.monotonic_ns()}"
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, str(store), there), daemon=True
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def stop(self) -> None:
        """End the processes; the next call starts others."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT),
    )
    while True:
        try:
            func, args = pipe.recv()
        except EOFError:
            return
        float16_regions.clear()  # those of another test; see conftest.py
        try:
            answer = (True, func(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
