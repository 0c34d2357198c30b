"""Images and features: reading, decoding, preparing."""
