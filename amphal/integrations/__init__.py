"""Bridges to the frameworks around torch: one file each, importing it inside functions."""
