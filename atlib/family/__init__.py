"""The systems around attention transfer, one file each."""
