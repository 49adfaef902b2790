"""What on-policy agents share: batches of a rollout, minibatches, epochs."""
