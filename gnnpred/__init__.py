"""Predict how long one training iteration takes, from an ONNX file, on a laptop."""
