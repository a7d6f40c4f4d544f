"""Regions."""
