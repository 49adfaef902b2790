"""Run by test_ray_learners.py: trains with learners on a Ray cluster of two machines that are this one, and prints JSON."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

from ray.cluster_utils import Cluster

SIZES = {"num_cpus": 1, "object_store_memory": 128 * 2**20}
NO_RAY = 77
RUN = Path("run")


def all_learners():
    """The process ids of the learners that this process has started, itself or by Ray."""
    from tests.workers.ray_script import descendants

    return [pid for pid in descendants(os.getpid()) if "learner_process" in Path(f"/proc/{pid}/cmdline").read_text()]


def kill_remote(learners_of, killed):
    """Once there is a checkpoint, kill the learner that this process has not started itself."""
    while not list(RUN.glob("checkpoints/0*")):
        time.sleep(0.05)
    own = set(learners_of(os.getpid()))
    killed.append([pid for pid in all_learners() if pid not in own])
    os.kill(killed[0][0], signal.SIGKILL)


def main():
    try:
        cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **SIZES})
        cluster.add_node(**SIZES)
    except Exception as error:
        print(f"Ray did not start: {error}", file=sys.stderr)
        sys.exit(NO_RAY)
    # Ray forks, so it comes before JAX.
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    import polyak
    from tests.train.test_learners import learners_of, make_agent, make_env, train_here
    from tests.workers.setting import arrays_of, assert_same_bits

    agent, killed = make_agent(make_env()), []
    threading.Thread(target=kill_remote, args=(learners_of, killed), daemon=True).start()
    address, intervals = cluster.address, {"report_every": 500, "checkpoint_every": 500}
    learners = polyak.train.Learners(2, address=address)
    two = polyak.train.run(agent, make_env(), env_steps=20_000, learners=learners, run_dir=RUN, progress=False, **intervals)
    assert_same_bits(two.loop_state, train_here(agent, 20_000).loop_state)
    events = [json.loads(line) for line in (RUN / "workers.jsonl").read_text().splitlines()]
    too_many = polyak.train.Learners(4, address=address, start_timeout=1)
    try:
        polyak.train.run(agent, make_env(), env_steps=100, learners=too_many, devices=4, run_dir="other", progress=False)
        error = None
    except RuntimeError as raised:
        error = str(raised)
    left = all_learners()
    cluster.shutdown()
    shutil.rmtree(RUN)
    leaves = len(arrays_of(two.loop_state))
    print(json.dumps({"killed": killed, "events": events, "leaves": leaves, "error": error, "left": left}), flush=True)


if __name__ == "__main__":
    main()
