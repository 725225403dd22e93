"""`python -m freshper_lightning` is `freshper`."""

from freshper_lightning.cli import main

if __name__ == "__main__":
    main()
