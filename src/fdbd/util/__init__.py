"""Files, optional extras and progress, which every other package uses."""
