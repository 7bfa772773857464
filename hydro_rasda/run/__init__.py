"""A run: its state, its files, its events, and its messages."""
