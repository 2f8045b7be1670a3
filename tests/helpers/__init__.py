"""Shared by tests: stand-ins that are simple enough to check by hand."""
