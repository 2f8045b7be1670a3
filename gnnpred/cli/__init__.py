"""The command line. ``main`` turns every expected failure into one line on stderr and an exit code.

1: the input is bad (a file, a row); 2: the command is (options, names); 130: interrupted.
"""

import sys
from collections.abc import Sequence

from gnnpred.errors import GnnpredError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run one command; returns its exit code. With ``--debug`` errors come with their traceback."""
    from gnnpred.cli.app import command

    debug = "--debug" in arguments
    if debug:  # taken anywhere in the line, so that every command knows it
        arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        code = command().main(arguments, prog_name="gnnpred", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except GnnpredError as error:
        if debug:
            raise
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # | head closed the pipe: not an error of ours
        sys.stderr.close()
        return 0
    except Exception as error:
        return _usage_error_code(error, debug=debug)


def _usage_error_code(error: Exception, *, debug: bool) -> int:
    """Exit code for an error of the option parser; anything else is ours and says how to report it."""
    name = type(error).__name__
    if name == "Abort":
        return _fail("interrupted", 130)
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        return _fail(f"{error.format_message()} (--help lists the options)", error.exit_code)
    if debug:
        raise error
    return _fail(f"unexpected {name}: {error}; run again with --debug for the traceback", 1)


def _fail(message: str, code: int) -> int:
    line = "".join(c if c.isprintable() else "?" for c in " ".join(message.split()))
    print(f"error: {line}", file=sys.stderr)
    return code
