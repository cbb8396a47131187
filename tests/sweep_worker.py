"""A run that costs nothing: ten steps with a value each, which are kept; it obeys signals and has a child."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from src.config import entry

STEPS = 10


@entry("train")
def main(config):
    from hydra.core.hydra_config import HydraConfig

    folder = Path(HydraConfig.get().runtime.output_dir)
    if os.environ.get("DEAF"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    child = subprocess.Popen(["sleep", "1000"])
    with open(folder / "attempts", "a") as file:
        told = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "MASTER_PORT", "WANDB_RUN_GROUP", "SLURM_PROCID", "SLURM_NTASKS")
        pids = {"pid": os.getpid(), "child": child.pid}
        file.write(json.dumps(pids | {name: os.environ.get(name) for name in told}) + "\n")
    if config.seed == 3:
        raise ValueError("seed 3 does not fit")
    if os.environ.get("SLURM_PROCID", "0") != "0":
        return child.kill()
    log = folder / "metrics.csv"
    if not log.exists():
        log.write_text("batch,kimg,metric,value\n")
    for step in range(len(log.read_text().splitlines()), STEPS + 1):
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        # each learning rate has a curve of its own, which never crosses another's; the best is 1e-3
        value = config.seed + 10 * abs(math.log10(config.model.optimizer.lr) + 3) + 1 / step
        value = math.nan if config.seed == 4 else value
        with open(log, "a") as file:
            file.write(f"{step},{config.total_kimg * step / STEPS:g},val/fid,{value!r}\n")
    result = {"name": config.name, "kimg": config.total_kimg, "metrics": {"val/fid": value}}
    (folder / "result.json").write_text(json.dumps(result))
    child.kill()


if __name__ == "__main__":
    main()
