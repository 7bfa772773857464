"""Child processes: how they start, how their hangs and deaths are noticed, and what follows."""
