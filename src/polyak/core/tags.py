"""Tags of metrics that both environments and loops use; no JAX here."""

RETURN = "rollout/ep_rew_mean"
SUCCESS = "rollout/success_rate"
