"""The gradient scaler and the gradient monitor.

``GradScaler`` and ``GradMonitor`` are the door. ``vendor`` is imported here because it registers
itself with ``GradScaler``, which must not import its own subclass.
"""

from . import vendor as vendor
from .monitor import GradMonitor
from .scaler import GradScaler

__all__ = ["GradMonitor", "GradScaler"]
