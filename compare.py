"""Runs side by side: `python compare.py runs='runs/*'` prints a table and writes a page that opens from disk."""

from src.config import entry


@entry("compare")
def main(config):
    from src.compare import compare

    compare(config)


if __name__ == "__main__":
    main()
