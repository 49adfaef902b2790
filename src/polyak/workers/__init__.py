"""Worker processes that collect rollouts: their supervision, and Ray, which runs them."""
