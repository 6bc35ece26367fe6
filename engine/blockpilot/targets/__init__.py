"""Targets: the models whose output is kept, and the files they come from."""
