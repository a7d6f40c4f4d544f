"""docs/write-a-backend.md works as it is printed."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from helpers.plugins.distribution import distribution, python

from amphal.testing._device import why_not_installable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = Path(__file__).parents[2] / "docs" / "write-a-backend.md"
pytestmark = pytest.mark.skipif(bool(why_not_installable()), reason="the toy needs torch 2.10")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's two files, installed as pip would."""
    folder = tmp_path_factory.mktemp("guide")
    project = tomllib.loads(blocks("toml")[0])
    entries = project["project"]["entry-points"]["amphal.backends"]
    distribution(folder, project["project"]["name"], blocks("python")[0], entries)
    assert project["tool"]["setuptools"]["py-modules"] == ["amphal_toy"]
    return folder


@pytest.mark.parametrize(
    "command", [line for block in blocks("sh") for line in block.splitlines() if "pip" not in line]
)
def test_a_command_of_the_guide_works(followed: Path, command: str) -> None:
    """Each command of the page succeeds, lists the device, and the suite passes on the device."""
    done = python(followed, "-m", *shlex.split(command))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    assert "toy" in done.stdout
    if "pytest" in command:
        assert "the_scaler_trains_through_an_overflow" in done.stdout.partition("on the device")[2]


def test_the_class_of_the_guide_is_the_same_suite(followed: Path) -> None:
    """Subclassing BackendConformance in a test file runs and passes."""
    (followed / "test_toy.py").write_text(blocks("python")[1], encoding="utf-8")
    done = python(followed, "-m", "pytest", "-q", "test_toy.py")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr


def test_the_guide_fits_on_a_page() -> None:
    """One page: it can be read at once."""
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) < 160
