"""Everything that `tune` finds out before anything trains: the request, and a dry run of it."""
