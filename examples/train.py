"""Train a small GPT on the Python standard library's own sources, on whatever device is here.

    python examples/train.py                                 # what amphal.detect() chooses
    python examples/train.py --precision fp16                # or AMPHAL_PRECISION=fp16
    python examples/train.py --precision fp16 --scaler off   # to see what the scaler is for
    python examples/train.py --precision bf16 --scaler on    # a scaler where none is needed
    python examples/train.py --resume out/checkpoint.pt --steps 7000
    python examples/train.py --distributed 2                 # two processes on this machine
    torchrun --nproc-per-node 2 examples/train.py            # the same

A checkpoint and the loss curve go to out/. Ctrl-C finishes the step, saves and says how to go on.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import pickle
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional as F

import amphal
from gpt import ATTENTION, GPT, HEAD_SIZE, corpus
from parallel import Group, join, launch, launched, leave

KEPT = ("width", "layers", "context", "batch", "seed", "lr")  # what a resumed run cannot change
POSITIVE = ("steps", "minutes", "width", "layers", "context", "batch", "lr")
SCALER = {"auto": None, "on": True, "off": False}  # GradScaler's enabled=
VALIDATION_BATCHES = 8


@dataclass
class Run:
    """One training run: its parts, and what a checkpoint keeps of its course."""

    args: argparse.Namespace
    plan: amphal.Plan
    group: Group
    model: GPT
    net: torch.nn.Module  # the model as the group runs it
    optimizer: torch.optim.Optimizer
    scaler: amphal.GradScaler
    step: int = 0
    losses: list[float] = field(default_factory=list)  # one a step
    validation: list[tuple[int, float]] = field(default_factory=list)  # (step, loss)
    stopped: bool = False  # by Ctrl-C


def interpreter() -> str:
    """The Python that runs this, as it can be pasted in this folder."""
    here = os.path.relpath(sys.executable)
    return sys.executable if here.startswith("..") else here


def new_run(args: argparse.Namespace, plan: amphal.Plan, scaled: bool | None, group: Group) -> Run:
    torch.manual_seed(args.seed)
    model = GPT(args.width, args.layers, args.context, args.attention).to(plan.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=plan.fused_optimizers)
    scaler = amphal.GradScaler(plan, enabled=scaled, process_group=group.handle)
    return Run(args, plan, group, model, group.spread(model), optimizer, scaler)


def windows(run: Run, data: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """This process's share of (len(starts), context) inputs, and the targets one byte ahead."""
    starts = run.group.share(starts)
    text = data[starts[:, None] + torch.arange(run.args.context + 1)].to(run.plan.device).long()
    return text[:, :-1], text[:, 1:]


def random_batch(run: Run, data: Tensor) -> tuple[Tensor, Tensor]:
    return windows(run, data, torch.randint(len(data) - run.args.context, (run.args.batch,)))


def loss_of(run: Run, x: Tensor, y: Tensor) -> Tensor:
    with amphal.autocast(run.plan):
        loss = F.cross_entropy(run.net(x).flatten(0, 1), y.flatten())
    # Where shares differ in size, the mean over the processes is then that of the whole batch.
    return loss * (len(x) * run.group.size / run.args.batch)


def learning_rate(run: Run, warmup: int = 50) -> float:
    """A linear rise, then the inverse square root: it needs no last step, so runs can go on."""
    step = run.step + 1
    return float(run.args.lr * min(step / warmup, (warmup / step) ** 0.5))


def train_step(run: Run, x: Tensor, y: Tensor) -> Tensor:
    """One optimizer step; its loss stays a tensor, since reading each would stall the device."""
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run)
    run.optimizer.zero_grad()
    loss = loss_of(run, x, y)
    run.scaler.scale(loss).backward()
    run.scaler.clip_grad_norm_(run.optimizer, 1.0)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.step += 1
    return loss.detach()


@torch.no_grad()
def validate(run: Run, data: Tensor) -> float:
    """The mean loss over the same evenly spaced windows each time."""
    count = VALIDATION_BATCHES * run.args.batch
    starts = torch.linspace(0, len(data) - run.args.context - 1, count).long()
    run.model.eval()
    losses = [loss_of(run, *windows(run, data, s)) for s in starts.split(run.args.batch)]
    run.model.train()
    return float(run.group.mean(torch.stack(losses)).mean())


def train(run: Run, training: Tensor, held_out: Tensor) -> None:
    """Train to the last step, the end of the time or Ctrl-C, saving at each validation."""
    began, budget = time.monotonic(), 60 * run.args.minutes
    pending: list[Tensor] = []
    if not run.validation:
        run.validation.append((0, validate(run, held_out)))
    print(f"validation loss {run.validation[-1][1]:.3f} at step {run.step}", flush=True)
    with progress_bar(shown=run.group.rank == 0) as bar:
        task = bar.add_task("", total=1.0, step=run.step, loss=run.validation[-1][1])
        more = True
        while more:
            pending.append(train_step(run, *random_batch(run, training)))
            elapsed = time.monotonic() - began
            more = run.step < run.args.steps and elapsed < budget and not run.stopped
            more = run.group.all(more)
            if validation_due(run.step) or not more:
                run.losses += run.group.mean(torch.stack(pending)).tolist()
                pending.clear()
                run.validation.append((run.step, validate(run, held_out)))
                save(run)
            done = max(run.step / run.args.steps, elapsed / budget)
            bar.update(task, completed=done, step=run.step, loss=run.validation[-1][1])


def validation_due(step: int) -> bool:
    """Each 20 steps, from 100 on each 50, from 1000 on each 500: often where the curve is steep."""
    every = 20 if step < 100 else 50 if step < 1000 else 500
    return step % every == 0


def progress_bar(shown: bool) -> Progress:
    text = "step {task.fields[step]}", "validation loss {task.fields[loss]:.3f}"
    times = TimeElapsedColumn(), TimeRemainingColumn()
    columns = TextColumn(text[0]), BarColumn(), TextColumn(text[1]), *times
    return Progress(*columns, console=Console(stderr=True), disable=not shown)


def finish_step_on_interrupt(run: Run) -> None:
    """Let Ctrl-C end the step at hand, so that what is saved is whole; a second one kills."""

    def handler(*_: object) -> None:
        run.stopped = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, handler)


def save(run: Run) -> None:
    """Write a checkpoint whole or not at all. What it holds is the same in every process."""
    if run.group.rank:
        return
    state = {
        "settings": vars(run.args),
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scaler": run.scaler.state_dict(),
        "rng": torch.get_rng_state(),  # it draws the batches; with dropout, keep the device's too
        "step": run.step,
        "losses": run.losses,
        "validation": run.validation,
    }
    path = checkpoint_path(run.args)
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def checkpoint_path(args: argparse.Namespace) -> Path:
    return Path(args.out) / "checkpoint.pt"


def load(path: str) -> dict[str, Any]:
    """A checkpoint, in host memory wherever it was made: ``load_state_dict`` moves it."""
    try:
        state = torch.load(path, map_location=lambda storage, _: storage, weights_only=True)
        complete = {"settings", "model", "optimizer", "scaler", "rng", "step"} <= set(state)
    except OSError as exc:
        fail(f"--resume: cannot read {path!r}: {exc.strerror}")
    except (RuntimeError, EOFError, TypeError, pickle.UnpicklingError):
        complete = False
    if not complete:
        fail(f"--resume: {path!r} is no checkpoint of this script, or is damaged")
    return dict(state)


def restore(run: Run, state: dict[str, Any]) -> None:
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.scaler.load_state_dict(state["scaler"])
    torch.set_rng_state(state["rng"])
    run.step, run.losses, run.validation = state["step"], state["losses"], state["validation"]


def compare(run: Run, data: Tensor, seconds: float = 10.0) -> str:
    """Time this run's steps beside the same steps in fp32: in turn, on one process's own models."""
    name = dtype_name(run.plan)
    full = amphal.detect(run.plan.device, precision="fp32")
    sides = {"float32": new_run(run.args, full, False, Group())}
    sides[name] = new_run(run.args, run.plan, run.scaler.is_enabled(), Group())  # or in its place
    times: dict[str, list[float]] = {side: [] for side in sides}
    deadline = time.monotonic() + seconds
    while len(times[name]) < 4 or (len(times[name]) < 31 and time.monotonic() < deadline):
        for side, taken in times.items():
            batch = random_batch(run, data)
            began = time.perf_counter()
            train_step(sides[side], *batch).item()  # reading the loss waits for the device
            taken.append(time.perf_counter() - began)
    tokens = run.args.batch * run.args.context
    speed = {side: tokens / statistics.median(taken[1:]) for side, taken in times.items()}
    if len(speed) == 1:
        return f"tokens/s: {speed[name]:,.0f} in float32, which is what this run used"
    ratio = speed[name] / speed["float32"]
    slower = f"SLOWER, by {1 / ratio:.1f} times, with this model; amphal.tune() tells before"
    verdict = f"{ratio:.2f} times as fast" if ratio >= 1 else slower
    both = f"{speed[name]:,.0f} in {name}, {speed['float32']:,.0f} in float32"
    return f"tokens/s: {both} (medians of steps taken in turn): {name} was {verdict}"


def plot(run: Run) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(1, run.step + 1), run.losses, color="#9db8d9", lw=0.8, label="training")
    steps, losses = zip(*run.validation, strict=True)
    axes.plot(steps, losses, color="#b5391f", lw=1.6, marker=".", label="validation")
    label: dict[str, Any] = {"textcoords": "offset points", "color": "#b5391f"}
    axes.annotate(f"{losses[0]:.2f}", (steps[0], losses[0]), xytext=(8, 0), va="center", **label)
    axes.annotate(f"{losses[-1]:.2f}", (steps[-1], losses[-1]), xytext=(6, 0), va="center", **label)
    scaler = "with" if run.scaler.is_enabled() else "without"
    title = f"{run.plan.hardware.name}: {dtype_name(run.plan)} {scaler} a gradient scaler"
    axes.set_title(title, loc="left", fontsize=10)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", xlim=(0, 1.08 * run.step))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    path = Path(run.args.out) / "loss.png"
    figure.savefig(path)
    return path


def dtype_name(plan: amphal.Plan) -> str:
    return str(plan.dtype).removeprefix("torch.")


def fail(message: str) -> NoReturn:
    sys.exit(f"train.py: error: {message}")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py",
        usage=argparse.SUPPRESS,  # an error is one line then
        description="Train a small GPT on the Python standard library's sources, on any device.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--device", help="a device type, with or without an index; None: the best one here")
    add("--precision", default="auto", help="auto, bf16, fp16 or fp32")
    add("--scaler", choices=list(SCALER), default="auto", help="auto: on where the plan needs it")
    add("--steps", type=int, default=3500, help="stop after this step")
    add("--minutes", type=float, default=2.0, help="or when training has taken this long")
    add("--width", type=int, default=96, help=f"a multiple of {HEAD_SIZE}")
    add("--layers", type=int, default=3, help="blocks of attention and MLP")
    add("--attention", choices=list(ATTENTION), default="fused", help="plain: by ordinary ops")
    add("--context", type=int, default=64, help="bytes that the model sees")
    add("--batch", type=int, default=16, help="windows of text in a step")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--seed", type=int, default=0, help="of the weights and the batches")
    add("--out", default="out", help="folder for checkpoint.pt and loss.png")
    add("--distributed", type=int, default=0, metavar="N", help="train on N processes here")
    add("--resume", metavar="CHECKPOINT", help="go on from here; its settings are the defaults")
    return parser


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, Any] | None]:
    """The arguments, and the checkpoint to resume from: its settings are the defaults then."""
    parser = arguments()
    args, state = parser.parse_args(argv), None
    if args.resume:
        state = load(args.resume)
        parser.set_defaults(**state["settings"])
        args = parser.parse_args(argv)
        for name in KEPT:
            value = state["settings"][name]
            if getattr(args, name) != value:
                fail(f"--{name} {getattr(args, name)}: the checkpoint was made with {value}")
        if args.steps <= state["step"]:
            fail(
                f"--steps must be above {state['step']}, where the checkpoint is; got {args.steps}"
            )
    for name in POSITIVE:
        if not getattr(args, name) > 0:
            fail(f"--{name} must be more than 0, got {getattr(args, name)}")
    if args.distributed < 0:
        fail(f"--distributed must be a number of processes, got {args.distributed}")
    if args.width % HEAD_SIZE:
        fail(f"--width must be a multiple of {HEAD_SIZE}, got {args.width}")
    if importlib.util.find_spec("matplotlib") is None:
        fail("the loss curve needs matplotlib; install it with: pip install 'amphal[examples]'")
    return args, state


def main(argv: list[str] | None = None) -> None:
    try:
        args, state = parse(argv)
        if args.distributed and not launched():
            launch(__file__, args.distributed, sys.argv[1:] if argv is None else argv)
        else:
            group = join()
            try:
                stopped = run_script(args, state, group)
            finally:
                leave()
            if stopped:  # here, since an exception in flight would keep the model alive
                sys.exit(130)
    except (amphal.AmphalError, OSError) as exc:
        fail(str(exc))
    except KeyboardInterrupt:  # before training or after it; within, see finish_step_on_interrupt
        sys.exit(130)


def run_script(args: argparse.Namespace, state: dict[str, Any] | None, group: Group) -> bool:
    """Train, and report; whether Ctrl-C stopped it."""
    if args.batch < group.size:
        fail(f"--batch must be {group.size} or more, one for each process, got {args.batch}")
    plan = amphal.detect(args.device, precision=args.precision, process_group=group.handle)
    Path(args.out).mkdir(parents=True, exist_ok=True)
    training, held_out = corpus()
    run = new_run(args, plan, SCALER[args.scaler], group)
    if state:
        restore(run, state)
    finish_step_on_interrupt(run)
    if group.rank:  # the others train along, and only the first one speaks
        sys.stdout = io.StringIO()
    print(plan.explain(), flush=True)
    if run.scaler.is_enabled() is not plan.use_scaler:
        print(f"--scaler {args.scaler}: the plan's scaler is overruled", flush=True)
    train(run, training, held_out)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if run.step < args.steps:
        why = "interrupted" if run.stopped else f"the {args.minutes:g} minutes are over"
        print(
            f"{why}; go on with: {interpreter()} examples/train.py --resume {checkpoint_path(args)}"
        )
    if group.rank == 0 and not run.stopped:
        report(run, training)
    return run.stopped


def report(run: Run, training: Tensor) -> None:
    if run.scaler.is_enabled():
        print(f"loss scale at the end: {run.scaler.get_scale():g}")
    print(compare(run, training))
    print(f"saved {checkpoint_path(run.args)} and {plot(run)}")
    (_, first), (step, last) = run.validation[0], run.validation[-1]
    print(f"validation loss {first:.3f} -> {last:.3f} in {step} steps")


if __name__ == "__main__":
    main()
