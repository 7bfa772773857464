"""Who trains next: the sweep on surrogates, the race at full size, and what passes between them."""
