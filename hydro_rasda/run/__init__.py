"""A run: what it is, where it stands, what it keeps, what a user sees of it, and what it found."""
