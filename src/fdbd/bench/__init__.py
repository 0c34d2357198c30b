"""The benchmark: datasets, the feature cache, the runner and its tables."""
