"""To production: ONNX graphs, scikit-learn estimators, Ray jobs and monitoring. Import the part that you need."""
