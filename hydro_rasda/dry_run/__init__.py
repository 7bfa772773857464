"""Everything that `tune` does before training: checks of its arguments, a dry run, and the identity of the run."""
