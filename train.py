"""Train a model: `python train.py`, `python train.py experiment=NAME key=value ...`. The same command continues."""

from src.config import entry


@entry("train")
def main(config):
    from src.run import train

    train(config)


if __name__ == "__main__":
    main()
