"""How trials train: epochs, learners, fused groups, full-size models, devices and processes."""
