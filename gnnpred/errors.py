"""Errors that a user can act on: what is wrong, where, and what to do."""


class GnnpredError(Exception):
    """Bad input: the command line prints it as one line and exits with 1."""

    exit_code = 1


class UsageError(GnnpredError):
    """Options that do not fit together or name something unknown: exits with 2."""

    exit_code = 2
