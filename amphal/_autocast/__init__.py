"""Autocast regions: made, entered, left, traced by Dynamo and exported.

``autocast.autocast`` is the front; ``region.Region`` sets torch's state and puts it back;
``policy_region`` adds a casting policy; ``arguments`` validates; ``decorator`` and ``export`` serve
decorated functions and export; ``pin.set_precision`` and ``custom_function`` pin modules and
autograd functions; ``engines`` lets an engine that casts itself have its way.
"""
