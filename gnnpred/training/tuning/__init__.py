"""Hyperparameter search: an Optuna study over the fields of a recipe that a search space names."""
