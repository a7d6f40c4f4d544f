"""What happens to one call of one op under autocast. Nothing here knows of regions or plans.

``live_lists.op_lists`` reads the policy that is in force; ``policy`` keeps the policies of regions
with ``ops=``; ``kernels`` does the casts; ``installed`` puts kernels on dispatch keys and takes
them away; ``rules`` adds policies for ops that torch does not list; ``observe`` watches calls.
"""
