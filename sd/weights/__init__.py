"""Weights of SD 1.x in files: names, reading, writing."""
