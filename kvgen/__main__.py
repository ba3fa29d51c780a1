"""`python -m kvgen`: the command line without the installed script."""

from kvgen.cli import main

if __name__ == "__main__":
    main()
