"""``tuning.tune``: measure the user's own step under each precision, and take the fastest.

``candidates`` lists what is measured, ``race`` times it in interleaved rounds by the pure rules in
``decisions``, ``step`` runs the user's step, ``snapshot`` and ``reach`` put its state back,
``cache`` keeps answers, ``show`` and ``sentences`` report.
"""

from .tuning import tune

__all__ = ["tune"]
