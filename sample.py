"""Draw images from a run: `python sample.py run=runs/NAME num=64`."""

from src.config import entry


@entry("sample")
def main(config):
    from src.results import sample

    sample(config)


if __name__ == "__main__":
    main()
