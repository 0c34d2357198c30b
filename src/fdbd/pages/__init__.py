"""What a person looks at: the gallery of scored samples, the picture of one explanation."""
