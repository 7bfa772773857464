"""The settings of `tune` and their checks: `SweepConfig`, `RaceConfig`, `TuneConfig`, objectives. Needs no torch."""
