"""Everything that runs on PyTorch's reference device: ``python tests/device/openreg.py``.

Which autocast kernels torch_openreg registers is a switch in the environment (``OPENREG_AMP``), so
each run is a process of its own. ``--junitxml=PREFIX`` writes the reports of pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = "--steps 4 --width 32 --layers 1 --context 16 --batch 4 --attention plain".split()

SUITES = {
    "conformance": ["--pyargs", "amphal.testing", "--amphal-backend", "openreg"],
    "device": ["tests/device"],
}


# The script, not ``python -m pytest``, which would import amphal from the checkout, where the
# built-in backends are not part of the package.
PYTEST = str(Path(sys.executable).with_name("pytest"))


def run(*command: str, **environment: str) -> bool:
    """Run a command; whether it succeeded."""
    print("+", *(f"{k}={v}" for k, v in environment.items()), *command, flush=True)
    env = {**os.environ, **environment}
    return subprocess.run(command, env=env, cwd=ROOT, check=False).returncode == 0


def main(options: list[str]) -> int:
    """All runs; the number of those that failed."""
    passed = []
    reports = [o.partition("=")[2] for o in options if o.startswith("--junitxml=")]
    for kernels in ("", "none", "fallthrough", "full"):
        for kind, suite in SUITES.items():
            report = [f"--junitxml={r}-{kind}-{kernels or 'shipped'}.xml" for r in reports]
            switches = {"OPENREG_AMP": kernels, "AMPHAL_TEST_DEVICE": "openreg"}
            passed.append(run(PYTEST, "-q", *suite, *report, **switches))
    with tempfile.TemporaryDirectory() as out:
        for device in ("openreg:0", "openreg:1"):
            for precision in ("bf16", "fp16"):
                which = ["--device", device, "--precision", precision, "--out", out]
                passed.append(run(sys.executable, "examples/train.py", *which, *SMALL))
    print(f"{sum(passed)} of {len(passed)} runs passed")
    return len(passed) - sum(passed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
