"""Trackers of experiments: settings, metrics, videos and checkpoints of a run in Weights & Biases, MLflow and Trackio."""
