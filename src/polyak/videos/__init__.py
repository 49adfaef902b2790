"""Videos of policies: plays episodes, and writes their images to a file or shows them in a window."""
