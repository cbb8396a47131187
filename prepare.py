"""Make something of a run or of data: `python prepare.py task=export run=runs/NAME`."""

from src.config import entry


@entry("prepare")
def main(config):
    from src.results import prepare

    prepare(config)


if __name__ == "__main__":
    main()
