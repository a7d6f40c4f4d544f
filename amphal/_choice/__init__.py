"""Choosing a device and a precision."""
