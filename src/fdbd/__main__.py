"""``python -m fdbd``: the `fdbd` program."""

from fdbd.cli import main

if __name__ == "__main__":
    main()
