"""A Ray cluster: `RASDAScheduler` and `elastic` for any Ray Tune script, and the backend of `tune` on Ray."""
