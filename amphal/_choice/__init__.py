"""Which device and precision, and why.

``choice.Choice`` is the record and its pure decision; ``choose.detect`` asks the machine and
remembers the answer; ``ranks`` lets the ranks of a process group agree; ``measurement`` is a row of
what ``amphal.tune`` measured. What a choice *does* (regions, scalers) is in ``_front.Plan``.
"""

from . import choice, choose
from .choice import Choice
from .choose import generation, on_clear
from .measurement import Measurement
from .ranks import require_group

__all__ = [
    "Choice",
    "Measurement",
    "choice",
    "choose",
    "generation",
    "on_clear",
    "require_group",
]
