"""Functions shared by agents: batches of a rollout, minibatches, epochs, normalization, checks."""
