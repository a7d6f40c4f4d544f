"""Frozen weights."""
