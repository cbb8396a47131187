# `make train`: train a Discrete Distribution Network on real images, on any machine with Python >= 3.11.
# `make test`:  everything that is checked.      `make quick`: what takes seconds.
PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
RUN     = $(VENV)/bin/python

.PHONY: install train test quick clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

train: install
	$(RUN) train.py experiment=ddn_small $(ARGS)

test: install
	-$(RUN) -c "import importlib.util as u, sys; sys.exit(u.find_spec('deepspeed') is None)" || \
		$(RUN) -m pip install --quiet --disable-pip-version-check '.[deepspeed]'  # its tests are skipped without it
	$(RUN) -m pytest $(ARGS)

quick: install
	$(RUN) -m pytest -m "not slow" $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build *.egg-info
