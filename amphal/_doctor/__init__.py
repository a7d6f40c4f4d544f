"""What a reviewer of a training script would say, found by running it.

``watch`` runs a script and notes what it does with regions, scalers and optimizers; ``rules`` turns
the notes into findings, each with a line, a cause and a cure; ``source`` reads the script's text.
"""

from .findings import Finding
from .watch import examine

__all__ = ["Finding", "examine"]
