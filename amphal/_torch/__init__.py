"""What amphal knows of torch beyond its public interface. Nothing of amphal but errors is below.

``private`` holds the uses of private names, each with its reason and the versions it was checked
on; ``matmul`` torch's float32 matmul precision; ``nested`` the tensors in nested values.
"""

from . import matmul, private
from .float16_regions import float16_regions
from .matmul import PRECISIONS
from .nested import cast, fields_of, is_record, tensors_in
from .private import all_op_names, torch_version
from .weight_cache import drop_casts_after_each_step

__all__ = [
    "PRECISIONS",
    "all_op_names",
    "cast",
    "drop_casts_after_each_step",
    "fields_of",
    "float16_regions",
    "is_record",
    "matmul",
    "private",
    "tensors_in",
    "torch_version",
]
