"""Frozen weights stored in the precision to which autocast casts them: ``precast_`` and its undo.

``search`` finds the weights, ``trial`` proves equal bits on examples, ``stored`` keeps what was
done on the model, ``readers`` and ``torch_modules`` know who reads a weight.
"""

from .precast import full_precision_state_dict, precast_, undo_precast_

__all__ = ["full_precision_state_dict", "precast_", "undo_precast_"]
