"""Mergeable statistics of training data, and the driver of the passes that sum them."""
