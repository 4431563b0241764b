"""What SD_Doctor.py looks at, and by which rules it judges."""
