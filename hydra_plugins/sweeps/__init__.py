"""Sweeps of runs: launchers that start every job as a process of its own, and Optuna's choice of jobs."""
