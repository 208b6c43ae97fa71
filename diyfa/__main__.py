"""`python -m diyfa`: the command line."""

from diyfa.cli import main

if __name__ == "__main__":
    main()
