"""Two real processes: ranks that share a process group step or skip together."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import amphal
from amphal.errors import ScalerStateError


def _run(rank: Any, world: Any, path: Any, body: Any, queue: Any) -> None:
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
        queue.put((rank, body(rank), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))


def ranks(body: Callable[..., Any], tmp_path: Path, world: int = 2) -> Any:
    """What ``body(rank)`` returns in each of ``world`` processes."""
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    args = (world, str(tmp_path / "store"), body, queue)
    processes = [context.Process(target=_run, args=(rank, *args)) for rank in range(world)]
    for process in processes:
        process.start()
    results = dict.fromkeys(range(world))
    for _ in range(world):
        rank, result, error = queue.get()
        assert error is None, error
        results[rank] = result
    for process in processes:
        process.join()
    return [results[rank] for rank in range(world)]


class Collectives:
    """Counts the collectives of this process."""

    def __enter__(self) -> Any:
        self.count, self._real = 0, dist.all_reduce

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return self._real(*args, **kwargs)

        dist.all_reduce = counted
        return self

    def __exit__(self, *exc: Any) -> None:
        dist.all_reduce = self._real


def two_hundred_steps(rank: Any) -> Any:
    """Random infs of each rank's own; one optimizer fused, one not, one with no gradients here."""
    torch.manual_seed(0)
    shared = [torch.nn.Parameter(torch.randn(4)) for _ in range(2)]
    part = torch.nn.Parameter(torch.ones(2))  # as of a pipeline stage: rank 1 never uses it
    optimizers = [
        torch.optim.AdamW(shared[:1], lr=0.01, fused=True),
        torch.optim.SGD(shared[1:], lr=0.01),
        torch.optim.SGD([part], lr=0.01),
    ]
    scaler = amphal.GradScaler(
        "cpu", enabled=True, growth_interval=5, process_group=dist.group.WORLD
    )
    draw = torch.Generator().manual_seed(rank + 1)
    outcomes = []
    with Collectives() as collectives:
        for step in range(200):
            for param in shared if rank else [*shared, part]:
                param.grad = None
                scaler.scale(param.square().sum()).backward()
                if torch.rand((), generator=draw) < 0.15:
                    assert param.grad is not None
                    param.grad[0] = float("inf") if step % 2 else float("nan")
            if step % 2:
                scaler.step_all(optimizers)
            else:
                for optimizer in optimizers:
                    scaler.step(optimizer)
            outcomes += [scaler.outcome(o).skipped for o in optimizers[:2]]
            assert scaler.outcome(optimizers[2]).nothing_to_do is (rank == 1)
            scaler.update()
    flat = torch.cat([p.detach() for p in shared]).tolist()
    return flat, scaler.get_scale(), scaler.skipped, outcomes, collectives.count


def test_parameters_are_equal_after_two_hundred_steps(tmp_path: Path) -> None:
    """An inf on either rank skips on both, scales stay equal, one collective a step."""
    first, second = ranks(two_hundred_steps, tmp_path)
    assert first == second
    params, _, skipped, outcomes, collectives = first
    assert all(abs(value) < 10 for value in params)
    assert 20 < skipped < 180
    assert any(outcomes)
    assert not all(outcomes)
    assert collectives == 100 * 1 + 100 * 3  # step_all once, three steps three times


def alone(rank: Any) -> Any:
    """Without a group each rank decides for itself and nothing is sent."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler = amphal.GradScaler("cpu", enabled=True)
    with Collectives() as collectives:
        scaler.scale(param.sum() * (float("inf") if rank else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.outcome(optimizer).skipped, collectives.count


def test_no_collective_unless_asked(tmp_path: Path) -> None:
    """The default sends nothing."""
    assert ranks(alone, tmp_path) == [(False, 0), (True, 0)]


def sharded(rank: Any) -> Any:
    """DTensor parameters, sharded over the ranks: clip, step, and an inf in one rank's shard."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    results = []
    for fused in (False, True):
        whole = torch.arange(1.0, 7.0).reshape(3, 2)
        param: Any = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        optimizer = torch.optim.AdamW([param], lr=0.1, fused=fused)
        scaler = amphal.GradScaler("cpu", enabled=True)
        scaler.scale(torch.ones(()))
        for kind in ("clip", "plain", "inf", "clip inf"):
            grad = torch.full((3, 2), 65536.0)
            if "inf" in kind:
                grad[2, 1] = float("inf")  # lies on rank 1 alone
            param.grad = distribute_tensor(grad, mesh, [Shard(0)])
            before = param.full_tensor().tolist()
            norm = scaler.clip_grad_norm_(optimizer, 1.0).item() if "clip" in kind else 0.0
            scaler.step(optimizer)
            scaler.update()
            skipped = scaler.outcome(optimizer).skipped
            same = param.full_tensor().tolist() == before
            results.append((kind, norm, skipped, same, scaler.get_scale()))
            scaler.update(65536.0)
    return results


def test_sharded_parameters_agree_by_themselves(tmp_path: Path) -> None:
    """For DTensors the ranks of the mesh see the same overflow and the norm of the whole."""
    first, second = ranks(sharded, tmp_path)
    assert first == second
    inf, half, full = float("inf"), 32768.0, 65536.0
    once = [
        ("clip", pytest.approx(6.0**0.5), False, False, full),
        ("plain", 0.0, False, False, full),
        ("inf", 0.0, True, True, half),
        ("clip inf", inf, True, True, half),
    ]
    assert first == once * 2


def copied(rank: Any) -> Any:
    """A group stays with a copy and is lost by pickling, which then must be said."""
    scaler = amphal.GradScaler("cpu", enabled=True, process_group=dist.group.WORLD)
    assert copy.deepcopy(scaler).process_group is scaler.process_group
    other = pickle.loads(pickle.dumps(scaler))
    param = torch.nn.Parameter(torch.ones(2))
    other.scale(param.sum()).backward()
    with pytest.raises(ScalerStateError, match="had a process group when it was pickled"):
        other.step(torch.optim.SGD([param], lr=0.1))
    other.process_group = None
    other.step(torch.optim.SGD([param], lr=0.1))
    return True


def test_copies_of_a_scaler_with_a_group(tmp_path: Path) -> None:
    """deepcopy keeps the group; after unpickling the first step asks for it."""
    assert ranks(copied, tmp_path, world=1) == [True]
