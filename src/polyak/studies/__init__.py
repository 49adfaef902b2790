"""Studies: searches for better settings of an algorithm in an environment."""
