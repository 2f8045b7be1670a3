"""From a folder of ``gnnpred collect`` to rows of a corpus: read, check, mark, merge."""
