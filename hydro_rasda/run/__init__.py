"""A run: its identity, its state, its files, its events, and its messages."""
