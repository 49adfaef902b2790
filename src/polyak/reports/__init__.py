"""Reports: runs read back as data, their statistics, curves and pictures."""
