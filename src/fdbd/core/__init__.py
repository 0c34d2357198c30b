"""Batches and heads, the geometry of a linear head, input perturbation, artifacts and
configuration."""
