"""Networks: layers, actor-critics, recurrent networks, and adapters for Flax and Equinox modules."""
