"""Files, optional extras and progress, which every other room uses."""
