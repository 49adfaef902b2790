"""A policy as one file: StableHLO, ONNX, or NumPy weights."""
