"""Fitting and scoring files, on one machine or on a Ray cluster."""
