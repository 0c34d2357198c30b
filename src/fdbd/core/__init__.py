"""What the library is about: batches, heads, the geometry of a linear head, artifacts and configuration."""
