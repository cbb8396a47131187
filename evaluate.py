"""Score a run: `python evaluate.py run=runs/NAME num=1000`."""

from src.config import entry


@entry("evaluate")
def main(config):
    from src.evaluation import evaluate

    evaluate(config)


if __name__ == "__main__":
    main()
