"""See what autocast does: what ran in which precision, and which op made the first NaN or infinity.

``trace`` records, ``find_nonfinite`` stops at the first bad value. Both watch one thread.
"""
