"""What attention transfer is compared with: other distillations, each in the same harness."""
