"""What the programs share, one subject a file. Imports point downward: to files here, and to SD_Model.py."""
