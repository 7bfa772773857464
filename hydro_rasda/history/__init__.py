"""The state of a run, computed from its journal by pure functions: curves, scores, decisions, the winner."""
