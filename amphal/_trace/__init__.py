"""See what autocast does: what ran in which precision, and which op made the first NaN or infinity.

``trace`` records, ``find_nonfinite`` stops at the first bad value. Both watch one thread.
"""

from .nonfinite import find_nonfinite
from .recorder import user_line
from .script import run_script, script_file
from .tracing import trace

__all__ = ["find_nonfinite", "run_script", "script_file", "trace", "user_line"]
