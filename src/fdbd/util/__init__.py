"""Files, optional extras and progress: what everything else stands on."""
