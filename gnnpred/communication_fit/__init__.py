"""Fits of the communication constants: collectives from tables of timings, steps from the corpus's multi-GPU runs."""
