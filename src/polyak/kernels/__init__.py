"""Fast replacements of plain functions; each documents the function that it replaces, its gain, and when to delete it."""
