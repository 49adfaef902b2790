"""Copies of a network (online, target, shared) and the updates between them."""
