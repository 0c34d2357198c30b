"""Networks for small images."""
