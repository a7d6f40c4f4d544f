"""``amphal doctor``: each planted mistake is found at its line, and clean scripts are clean."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

START = """
import torch
from torch import nn
import torch.nn.functional as F
import amphal
torch.manual_seed(0)
plan = amphal.detect(precision="fp16")
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).to(plan.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(16, 8, device=plan.device)
"""
SCALER = "scaler = amphal.GradScaler(plan, init_scale=128.0)\n"
TORCHS = "scaler = torch.amp.GradScaler(plan.device.type, init_scale=128.0)\n"

# A name, the finding's kind, the text with "# here" on the line of the mistake.
PLANTED = [
    (
        "fp16 without a scaler",
        "fp16-without-scaler",
        """
for _ in range(2):
    optimizer.zero_grad()
    with amphal.autocast(plan):
        loss = model(x).float().mean()
    loss.backward()  # here
    optimizer.step()
""",
    ),
    (
        "fp16 without a scaler, in a helper's torch region",
        "fp16-without-scaler",
        """
class Trainer:
    def step(self):
        with torch.autocast(plan.device.type, torch.float16):
            loss = model(x).float().mean()
        torch.autograd.backward(loss)  # here
        optimizer.step()
Trainer().step()
""",
    ),
    (
        "clip before unscale",
        "clip-before-unscale",
        SCALER
        + """
for _ in range(2):
    with amphal.autocast(plan):
        loss = model(x).float().mean()
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # here
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    (
        "clip by value before unscale, torch's scaler",
        "clip-before-unscale",
        TORCHS
        + """
def clip():
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)  # here
with amphal.autocast(plan):
    loss = model(x).float().mean()
scaler.scale(loss).backward()
clip()
scaler.step(optimizer)
scaler.update()
""",
    ),
    (
        "no update at all",
        "missing-update",
        SCALER
        + """
with amphal.autocast(plan):
    loss = model(x).float().mean()
scaler.scale(loss).backward()
scaler.step(optimizer)  # here
""",
    ),
    (
        "no update between steps, torch's scaler",
        "missing-update",
        TORCHS
        + """
for _ in range(2):
    with amphal.autocast(plan):
        loss = model(x).float().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # here
""",
    ),
    (
        "the optimizer steps by itself",
        "step-past-the-scaler",
        SCALER
        + """
with amphal.autocast(plan):
    loss = model(x).float().mean()
scaler.scale(loss).backward()
optimizer.step()  # here
scaler.update(64.0)
""",
    ),
    (
        "one of two optimizers steps by itself, in a class",
        "step-past-the-scaler",
        TORCHS
        + """
other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
class Loop:
    def both(self):
        scaler.step(optimizer)
        other.step()  # here
with amphal.autocast(plan):
    loss = model(x).float().mean() * other.param_groups[0]["params"][0]
scaler.scale(loss.sum()).backward()
Loop().both()
scaler.update()
""",
    ),
    (
        "backward inside the region",
        "backward-under-autocast",
        SCALER
        + """
with amphal.autocast(plan):
    loss = model(x).float().mean()
    scaler.scale(loss).backward()  # here
scaler.step(optimizer)
scaler.update()
""",
    ),
    (
        "backward under a decorated function",
        "backward-under-autocast",
        """
@amphal.autocast(plan.device, dtype="bf16")
def iteration():
    loss = model(x).float().mean()
    loss.backward()  # here
iteration()
optimizer.step()
""",
    ),
    (
        "fp16 parameters",
        "fp16-parameters",
        TORCHS
        + """
half = nn.Linear(8, 1).to(plan.device).half()
wrong = torch.optim.SGD(half.parameters(), lr=0.1)
scaler.scale(half(x.half()).float().mean()).backward()
scaler.step(wrong)  # here
scaler.update()
""",
    ),
    (
        "fp16 parameters, unscaled first",
        "fp16-parameters",
        SCALER
        + """
half = nn.Linear(8, 1).to(plan.device).half()
wrong = torch.optim.SGD(half.parameters(), lr=0.1)
with amphal.autocast(plan):
    loss = half(x).float().mean()
scaler.scale(loss).backward()
scaler.unscale_(wrong)  # here
""",
    ),
    (
        "a region of a device that nothing runs on",
        "region-of-another-device",
        """
import warnings; warnings.simplefilter("ignore")
kind = "".join(["m", "ps"])
for _ in range(2):
    with torch.autocast(kind, torch.float16):  # here
        model(x)
""",
    ),
    (
        "a region around nothing that is cast",
        "region-casts-nothing",
        """
def prepare(batch):
    with amphal.autocast(plan.device, dtype="bf16"):  # here
        return batch * 2 + 1
prepare(x)
""",
    ),
    (
        "a region around the loss alone",
        "region-casts-nothing",
        """
out = model(x)
with torch.autocast(plan.device.type, torch.bfloat16):  # here
    loss = (out - 1).abs().mean()
loss.backward()
""",
    ),
    (
        "binary cross entropy in a region",
        "banned-elsewhere",
        """
with amphal.autocast(plan.device, dtype="bf16"):
    p = torch.sigmoid(model(x))
    loss = F.binary_cross_entropy(p.float(), torch.ones_like(p).float())  # here
loss.backward()
""",
    ),
    (
        "BCELoss hidden in a module",
        "banned-elsewhere",
        """
class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss = nn.BCELoss()
    def forward(self, p):
        return self.loss(p.float(), torch.ones(16, 1, device=plan.device))  # here
criterion = Criterion()
with torch.autocast(plan.device.type, torch.bfloat16):
    loss = criterion(torch.sigmoid(model(x)))
loss.backward()
""",
    ),
    (
        "weights cast for each batch of an evaluation",
        "weights-cast-again",
        """
for _ in range(5):
    with torch.no_grad(), amphal.autocast(plan.device, dtype="bf16"):
        model(x)
""",
    ),
    (
        "accumulation over many micro-batches",
        "weights-cast-again",
        """
for i in range(6):
    with torch.autocast(plan.device.type, torch.bfloat16):
        loss = model(x).float().mean()
    loss.backward()
optimizer.step()
""",
    ),
    (
        "the schedule advances on a skipped step",
        "schedule-on-skipped-step",
        SCALER
        + """
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
with amphal.autocast(plan):
    loss = model(x).float().mean() * float("inf")
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
schedule.step()  # here
""",
    ),
    (
        "the schedule advances on a skipped step, torch's scaler",
        "schedule-on-skipped-step",
        TORCHS
        + """
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
for value in (1.0, float("inf")):
    optimizer.zero_grad()
    with amphal.autocast(plan):
        loss = model(x).float().mean() * value
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()  # here
""",
    ),
    (
        "a device in the code",
        "device-in-the-code",
        """
if torch.cuda.is_available():
    model.to("cuda")  # here
""",
    ),
    (
        "a device in a keyword",
        "device-in-the-code",
        """
y = torch.zeros(2, device="cpu")  # here
""",
    ),
]

CLEAN = {
    "the loop of the README": SCALER
    + """
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
for _ in range(3):
    optimizer.zero_grad()
    with amphal.autocast(plan):
        loss = model(x).float().mean()
    scaler.scale(loss).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    scaler.scheduler_step(schedule)
""",
    "torch's scaler with unscale and clip": TORCHS
    + """
for _ in range(3):
    optimizer.zero_grad()
    with torch.autocast(plan.device.type, torch.float16):
        loss = model(x).float().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    "bf16 without a scaler": """
for _ in range(3):
    optimizer.zero_grad()
    with amphal.autocast(plan.device, dtype="bf16"):
        loss = model(x).float().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
    "full precision, with disabled regions and scaler": """
scaler = amphal.GradScaler(plan, enabled=False)
for _ in range(2):
    optimizer.zero_grad()
    with amphal.autocast(plan, enabled=False):
        loss = model(x).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "two optimizers and one scaler": SCALER
    + """
other = torch.optim.SGD(nn.Linear(1, 1).to(plan.device).parameters(), lr=0.1)
head = other.param_groups[0]["params"]
for _ in range(2):
    optimizer.zero_grad(); other.zero_grad()
    with amphal.autocast(plan):
        loss = F.linear(model(x), *head).float().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.step(other)
    scaler.update()
""",
    "evaluation in fp16, then training in full precision": """
with torch.no_grad(), amphal.autocast(plan):
    model(x)
model(x).mean().backward()
optimizer.step()
""",
    "a nested island in full precision": SCALER
    + """
with amphal.autocast(plan):
    y = model(x)
    with amphal.autocast(plan, enabled=False):
        loss = F.binary_cross_entropy_with_logits(y.float(), torch.ones_like(y).float())
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
    "results on the host, and a device from outside": """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cpu")
device = parser.parse_args().device
print(model.to(device)(x.to(device)).detach().to("cpu").numpy().shape)
""",
}


def doctor(tmp_path: Path, text: str) -> tuple[int, list[dict[str, str]]]:
    """The exit status and the findings of a script, in a process of its own."""
    (tmp_path / "script.py").write_text(START + text, encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "-m", "amphal", "doctor", "--json", "script.py"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout.startswith("{"), result.stderr
    return result.returncode, json.loads(result.stdout)["findings"]


@pytest.mark.parametrize(("kind", "text"), [p[1:] for p in PLANTED], ids=[p[0] for p in PLANTED])
def test_a_planted_mistake_is_found_at_its_line(tmp_path: Path, kind: str, text: str) -> None:
    """And nothing else; the exit status says so."""
    status, findings = doctor(tmp_path, text)
    assert [f["kind"] for f in findings] == [kind]
    (found,) = findings
    lines = (START + text).splitlines()
    here = [i for i, line in enumerate(lines, 1) if line.endswith("# here")]
    if here:
        assert Path(found["line"]).name == f"script.py:{here[0]}"
    assert found["cause"]
    assert found["cure"]
    assert status == (0 if found["level"] == "note" else 1)


@pytest.mark.parametrize("text", CLEAN.values(), ids=CLEAN)
def test_a_clean_script_is_clean(tmp_path: Path, text: str) -> None:
    """No finding, and status 0."""
    assert doctor(tmp_path, text) == (0, [])


def test_a_script_that_fails_is_reported_with_its_own_error(tmp_path: Path) -> None:
    """Status 1, the traceback on standard output for people."""
    (tmp_path / "script.py").write_text("raise KeyError('mine')", encoding="utf-8")
    command = [sys.executable, "-m", "amphal", "doctor", "script.py"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 1
    assert "KeyError: 'mine'" in result.stdout
