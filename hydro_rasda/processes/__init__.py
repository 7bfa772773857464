"""Child processes: how they start, how a hang or a death of one is noticed, and what follows."""
