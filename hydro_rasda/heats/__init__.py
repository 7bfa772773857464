"""The heats of a run: the sweep on surrogates, the race at full size, and the steps between them."""
