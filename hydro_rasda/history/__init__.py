"""What a run's journal says, as pure functions of its lines: curves, scores, decisions, the winner."""
