"""What happens to one call of one op under autocast. Nothing here knows of regions or plans.

``live_lists.op_lists`` reads the policy that is in force; ``policy`` keeps the policies of regions
with ``ops=``; ``kernels`` does the casts; ``installed`` puts kernels on dispatch keys and takes
them away; ``rules`` adds policies for ops that torch does not list; ``observe`` watches calls.
"""

from . import policy, rules
from .kernels import PASS_BY
from .live_lists import op_lists
from .observe import observed
from .rules import register_autocast_op

__all__ = ["PASS_BY", "observed", "op_lists", "policy", "register_autocast_op", "rules"]
