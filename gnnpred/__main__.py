"""python -m gnnpred."""

from gnnpred.cli import main

if __name__ == "__main__":
    main()
