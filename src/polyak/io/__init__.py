"""What leaves the process: checkpoints, run directories, metrics. Nothing that is read back may run code."""
