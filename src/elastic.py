"""Runs under torch's elastic agent: how many processes there are, and being that agent on one node.

The agent starts all processes again, from the newest checkpoint, when one of them ends badly, and with another number
of them when nodes are lost or come back.
"""

import os
import signal
import sys
import uuid

from src.config import AGENT

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def under_agent() -> bool:
    """Whether an agent (torchrun's, or `supervise`) has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def processes(devices: int | str | list[int], nodes: int) -> tuple[int | str | list[int], int]:
    """(devices, nodes) as asked for, or, under an agent, as they are now.

    Raises ValueError where nodes have different numbers of processes.
    """
    if not under_agent():
        return devices, nodes
    here, everywhere = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    if everywhere % here:
        raise ValueError(
            f"{everywhere} processes are not the same number on every node, where this one has {here}; start every "
            f"node with the same --nproc-per-node"
        )
    return devices if isinstance(devices, list) and len(devices) == here else here, everywhere // here


def restarts() -> str:
    """For people: how often processes were started again, and what would keep that from working."""
    number, most = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    said = f", restart {number} of at most {most}" if number != "0" else ""
    if most != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        said += "; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, since restarts may hang without it"
    return said


def supervise(count: int, nodes: int, max_restarts: int, grace_seconds: float, name: str) -> None:
    """Run this very command as `count` processes of this node, started again at most `max_restarts` times.

    Of several nodes, each runs this; they meet at MASTER_ADDR and MASTER_PORT, which under SLURM need not be set.
    Signals are handed on: after SIGTERM processes save, and SystemExit has the code 143.

    Raises ValueError when the restarts are used up, or the node where agents meet is gone.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
        "1"  # else addresses of processes that are gone stay in the store
    )
    os.environ[AGENT] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    alone = nodes == 1
    listen = [s for s in STOPPING if signal.getsignal(s) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    agent = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=count,
        max_restarts=max_restarts,
        shutdown_timeout=max(1, round(grace_seconds)),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0" if alone else _meeting_point(),
        run_id=uuid.uuid4().hex if alone else name,
        local_addr="127.0.0.1" if alone else None,
        signals_to_handle=",".join(s.name for s in listen),
    )
    again = "the same command goes on from the newest checkpoint"
    try:
        elastic_launch(agent, sys.executable)(os.path.abspath(sys.argv[0]), *sys.argv[1:])
    except SignalException as asked:
        raise SystemExit(143 if asked.sigval == signal.SIGUSR1 else 128 + asked.sigval) from None
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        code = failure.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise ValueError(
            f"process {rank} {how}, and all {max_restarts} restarts are used up; its last words are above, and {again}"
        ) from None
    except RendezvousError as error:  # it was killed, or there never was one
        raise ValueError(f"the agents have no meeting point at {agent.rdzv_endpoint}; on all nodes {again}") from error


def _meeting_point() -> str:
    from lightning.fabric.plugins.environments import SLURMEnvironment

    if "MASTER_ADDR" not in os.environ and "SLURM_NODELIST" not in os.environ:
        raise ValueError(
            "several nodes meet at MASTER_ADDR and MASTER_PORT; set both to the first node's, on every node, or use "
            "torchrun --rdzv-endpoint"
        )
    found = SLURMEnvironment()
    return f"{found.main_address}:{found.main_port}"
