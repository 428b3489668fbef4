"""Where things are: a feature pyramid on a ViT or a pair, detectors and segmentation on it, and their
measures."""
