"""Run directories: checkpoints, configs, metrics. Nothing that is read back may run code."""
