"""`python -m omnitrain` is `omnitrain`."""

from omnitrain.cli import main

if __name__ == "__main__":
    main()
