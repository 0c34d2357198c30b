"""The guard as a service over HTTP: micro-batches, the Open Inference Protocol, metrics and a
page."""
