"""Bridges to the frameworks around torch: one file a framework, each importing it inside functions."""
