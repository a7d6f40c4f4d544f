"""A process that is forked inside a region starts outside of it, as a thread does."""

from __future__ import annotations

import os
import pickle
import select
import signal
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import amphal
from amphal._autocast import region as regions
from amphal._casting import installed, policy

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.filterwarnings("ignore::amphal.errors.PrecisionWarning"),
]

MAKE: dict[str, Callable[[], Any]] = {
    "plain": lambda: amphal.autocast("cpu", "bf16"),
    "ops": lambda: amphal.autocast("cpu", "bf16", ops={"mm": "fp32", "softmax": "as_is"}),
}
A = torch.rand(2, 2)
HALF = torch.rand(2, 2, dtype=torch.bfloat16)


def in_child(body: Callable[[], Any]) -> Any:
    """What ``body`` returns in a forked process, or the exception that it raises, as text."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside torch's own threads
        pid = os.fork()
    if pid == 0:
        # The threads of the parent's OpenMP pool do not exist here: one thread, as in a worker of
        # a DataLoader, or the first large operation waits for them for ever.
        torch.set_num_threads(1)
        try:
            answer = body()
        except BaseException as exc:
            answer = repr(exc)
        os.write(write, pickle.dumps(answer))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answered, _, _ = select.select([pipe], [], [], 60)
        if not answered:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert answered, "the forked process gave no answer within 60 s"
        return pickle.loads(pipe.read())


def state() -> tuple[Any, ...]:
    """All that a region could leave behind."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        nesting,
        len(regions._thread.stack),
        policy.active() is None,
        installed.temporary_names("AutocastCPU", held=True),
    )


@pytest.mark.parametrize("kind", MAKE)
def test_the_child_starts_outside(kind: str) -> None:
    """The child computes float32 with nothing left of the region; the parent stays in it."""
    outside = state()
    with MAKE[kind](), amphal.autocast("cpu", "fp16"):
        found = in_child(lambda: (state(), torch.mm(A, A).dtype, torch.softmax(HALF, 0).dtype))
        assert torch.is_autocast_enabled("cpu")
    assert found == (outside, torch.float32, torch.bfloat16)
    assert state() == outside


@pytest.mark.parametrize("kind", MAKE)
def test_the_child_may_run_on(kind: str) -> None:
    """The ends of the blocks it was forked in change nothing; a new region works as always."""
    region = MAKE[kind]()
    outside = state()

    def body() -> Any:
        with region:
            inside = torch.bmm(A[None], A[None]).dtype
        region.__exit__(None, None, None)  # of the block below
        left = state()
        try:
            region.__exit__(None, None, None)
        except amphal.errors.AutocastStateError:
            return inside, left
        return "left twice"

    with region:
        assert in_child(body) == (torch.bfloat16, outside)
        assert torch.bmm(A[None], A[None]).dtype is torch.bfloat16
    assert state() == outside


def test_torchs_own_region_stays_torchs() -> None:
    """Only what amphal's regions changed is put back in the child."""
    with torch.autocast("cpu", torch.float16), MAKE["plain"]():
        found = in_child(lambda: torch.mm(A, A).dtype)
    assert found is torch.float16


def test_a_lock_of_another_thread_does_not_block_the_child() -> None:
    """The child leaves an ops= region although another thread held the lock at the fork."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with installed._lock:
            held.set()
            done.wait(30)

    with MAKE["ops"]():
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(30)
        try:
            found = in_child(lambda: torch.mm(A, A).dtype)
        finally:
            done.set()
            thread.join()
    assert found is torch.float32


class Data(torch.utils.data.Dataset[str]):
    """Items that are computed."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> str:
        return str(torch.mm(A, A).dtype)


def test_a_data_loader_worker_computes_as_a_spawned_one() -> None:
    """The loop over a loader inside a region: the data is float32."""
    with MAKE["plain"](), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        loader = torch.utils.data.DataLoader(
            Data(), num_workers=1, multiprocessing_context="fork", timeout=60
        )
        assert [item[0] for item in loader] == ["torch.float32"] * 2
