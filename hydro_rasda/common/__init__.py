"""Helpers for all other packages: checks of arguments, texts, masks of secrets, seeds, `Trial`. Needs no torch."""
