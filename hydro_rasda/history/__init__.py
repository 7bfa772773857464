"""The fold of a run's journal, as pure functions: curves, scores, decisions, the winner."""
