"""The settings of `tune`, checked: `SweepConfig`, `RaceConfig`, `TuneConfig`, objectives. They need no torch."""
