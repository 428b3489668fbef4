"""What attention transfer is compared with: distillation of logits and features, and mean maps."""
