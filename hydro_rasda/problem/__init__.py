"""The problem of a run: model, objective, metrics, precision, roles and costs."""
