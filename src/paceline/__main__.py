"""``python -m paceline`` is the command ``paceline``."""

from paceline.cli import main

if __name__ == "__main__":
    main()
