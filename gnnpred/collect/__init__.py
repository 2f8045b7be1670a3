"""Measuring training steps on this machine, so that they extend the corpus (``gnnpred collect``)."""
