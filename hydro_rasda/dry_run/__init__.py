"""Everything that `tune` does before training: checks of its arguments, and a dry run."""
