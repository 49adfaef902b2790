"""Ordinary Python functions as policies, also inside compiled programs."""
