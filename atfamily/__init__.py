"""The systems around attention transfer, one file a system, each trained by the same loop."""
