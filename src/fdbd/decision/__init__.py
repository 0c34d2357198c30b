"""From scores to decisions: thresholds, the guard, explanations."""
