"""Measured GPU runs joined to operator graphs: tracing, storage, building and splitting the corpus."""
