"""Run by test_ray.py: trains with workers on a private Ray, disturbs them, and prints what happened as JSON."""

import contextlib
import http.client
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import gymnasium
import numpy as np

import polyak
from polyak.cli import main as polyak_main
from polyak.loops.host_loop import host
from polyak.workers.ray_workers import RayWorkers, set_private_environment
from tests.workers.processes import descendants, endpoints, is_running, listening, read, sockets
from tests.workers.setting import KEY, arrays_of, make_agent, make_env, make_workers

STEPS = 600
NO_RAY = 77
"""The exit code where Ray does not start, as on an overloaded machine."""
NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}


def worker_processes():
    """The pids of the workers, by the name that Ray gives them."""
    found = []
    for pid in descendants(os.getpid()):
        try:
            name = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if "_RayWorker" in name:
            found.append(pid)
    return found


def train(agent, envs, callbacks=()):
    return host(agent, envs, env_steps=STEPS, key=KEY, callbacks=callbacks, report_every=200)


def main():
    inherited = sockets([os.getpid()])
    env = make_env()
    agent = make_agent(env.spec)
    undisturbed = arrays_of(train(agent, env).loop_state)

    def is_same(result):
        return all(np.array_equal(a, b) for a, b in zip(arrays_of(result.loop_state), undisturbed, strict=True))

    report = {"sockets_alone": len(sockets([os.getpid()]) - inherited)}

    def on_signal(*_):
        """As `train.run` has one."""

    signal.signal(signal.SIGTERM, on_signal)
    envs = make_workers(env, 2, lambda: start_ray(4), timeout=5.0)
    report["same_bits"] = is_same(train(agent, envs))
    report["keeps_handler"] = signal.getsignal(signal.SIGTERM) is on_signal
    report["listening"] = listening(descendants(os.getpid()))
    report["blas_threads"] = blas_threads_of_a_worker()
    report["jax_started"] = [starts_jax(pid) for pid in worker_processes()[:2]]
    try:
        RayWorkers(1)
    except RuntimeError as error:
        report["connected"] = str(error)
    report["cluster"] = use_as_cluster()
    for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        report[name] = disturb(agent, envs, number, is_same)
    own = descendants(os.getpid())
    start = time.monotonic()
    envs.close()
    report["close_seconds"] = time.monotonic() - start
    # On a busy machine a killed process needs a while to end.
    while (left := sorted(set(own) & set(descendants(1)))) and time.monotonic() < start + 9:
        time.sleep(0.1)
    report["left"] = left
    print(json.dumps(report))


def start_ray(workers):
    """Ray, or the end of the script with the code that test_ray.py skips."""
    try:
        return RayWorkers(workers)
    except RuntimeError as error:
        if "did not start in 3 tries" not in str(error):
            raise
        print(error, file=sys.stderr)
        sys.exit(NO_RAY)


def use_as_cluster():
    """What other processes get from the private Ray by its address: without its token, with another version, in training."""
    import ray
    from ray._raylet import GcsClient

    address = ray.get_runtime_context().gcs_address
    without_token = {name: value for name, value in os.environ.items() if name not in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE")}
    keys = "import sys; from ray._raylet import GcsClient; print(GcsClient(address=sys.argv[1]).internal_kv_keys(b'', b''))"
    connect = "import sys, ray; from polyak.workers.ray_workers import connect; ray.__version__ = '1.2.3'; connect(sys.argv[1])"
    programs = {
        "no token": start([sys.executable, "-c", keys, address], without_token),
        "other version": start([sys.executable, "-c", connect, address]),
    }
    report = {name: finish(program) for name, program in programs.items()}
    report["keys"] = len(GcsClient(address=address).internal_kv_keys(b"", b""))
    pids = descendants(os.getpid())
    dashboards = [pid for pid in pids if is_dashboard(*read(f"/proc/{pid}/cmdline").split("\0")[:2])]
    report["dashboard"] = len(dashboards), endpoints(dashboards)
    report["http"] = sorted({status_of(*place) for place in endpoints(pids)}, key=str)
    report["ray"] = ray.__version__
    return report | stop_and_resume(address)


def is_dashboard(program="", script=""):
    """Whether the first words of a command line are those of the dashboard or its agent."""
    return program.startswith("ray::DashboardAgent") or script.endswith("dashboard/dashboard.py")


def stop_and_resume(address):
    """Let the command line train with workers, end it by SIGTERM, and let it continue without workers."""
    small = "--num-envs 4 --num-steps 8 --hidden 4 --num-epochs 1 --num-minibatches 1 --eval-episodes 0"
    words = f"train ppo CartPole-v1 --run-dir run --env-steps 1000000 --report-every 64 --checkpoint-every 64 {small}"
    training = start([sys.executable, "-m", "polyak", *words.split(), "--workers", "2", "--ray-address", address])
    deadline = time.monotonic() + 120
    while not list(Path("run").glob("checkpoints/0*")) and training.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    training.terminate()
    report = {"stopped": finish(training)}
    done = max((int(path.name) for path in Path("run").glob("checkpoints/0*")), default=0)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        # In this process, which has imported JAX.
        code = polyak_main(f"resume run --workers 0 --env-steps {done + 64}".split())
    return report | {"done": done, "resumed": (code, output.getvalue())}


def start(command, environment=None):
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    """Exit code and output of a process that ends by itself."""
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def status_of(address, port):
    """The status that a port answers to HTTP; None if it speaks another protocol."""
    connection = http.client.HTTPConnection(address, port, timeout=10)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def starts_jax(pid):
    """Whether a process has the threads of XLA's CPU back end."""
    names = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/comm")]
    return any("XLA" in name or "tf_" in name for name in names)


def blas_threads_of_a_worker():
    """The threads of NumPy's OpenBLAS in a process that Ray has preloaded; None where NumPy has another library."""
    import ray

    def count():
        import ctypes

        paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "openblas" in line}
        for library in map(ctypes.CDLL, paths):
            for name in ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_", "openblas_get_num_threads"):
                try:
                    return getattr(library, name)()
                except AttributeError:
                    continue
        return None

    return ray.get(ray.remote(num_cpus=1)(count).remote(), timeout=60)


def disturb(agent, envs, number, is_same):
    """Train again from the start; a worker gets a signal at the first report."""
    events = []
    envs.group.on_event = lambda event: events.append((time.monotonic(), event))
    sent = []

    def send(progress, metrics, state):
        if not sent:
            victim = worker_processes()[-1]
            sent.append(time.monotonic())
            threading.Timer(0.0, os.kill, (victim, number)).start()

    result = train(agent, envs, [send])
    failed = [moment for moment, event in events if event.event == "failed"]
    return {"same_bits": is_same(result), "restarts": len(failed), "noticed": failed[0] - sent[0] if failed else None}


def forever():
    """Train until killed; prints the processes that were started."""
    env = make_env()
    envs = make_workers(env, 2, lambda: start_ray(2))

    def show(progress, metrics, state):
        if progress.iteration == 1:
            print(json.dumps(descendants(os.getpid())), flush=True)

    host(make_agent(env.spec), envs, env_steps=10**9, key=KEY, callbacks=[show], report_every=1)


class Talking(gymnasium.Env):
    """Prints and warns in its fifth step; the first of all workers that has done 20 steps ends its process."""

    observation_space = gymnasium.spaces.Box(-10, 10, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.count = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.count += 1
        if self.count == 5:
            print("said")
            os.write(2, b"written\n")
            warnings.warn("of a test", DeprecationWarning, stacklevel=1)
            warnings.warn("warned of a test", RuntimeWarning, stacklevel=1)
        if self.count == 20:
            with contextlib.suppress(FileExistsError):
                Path("died").touch(exist_ok=False)
                os._exit(7)
        return np.zeros(3, np.float32), 1.0, self.count % 10 == 0, False, {}

    def close(self):
        Path(f"closed-{os.getpid()}").touch()


def output():
    """Train with environments that print and warn, of which one ends its process."""
    with warnings.catch_warnings(record=True) as caught:
        try:
            polyak.train.run("a2c", Talking, env_steps=400, num_envs=4, workers=2, run_dir="run", settings={"num_steps": 10})
        except RuntimeError as error:
            if "did not start in 3 tries" not in str(error):
                raise
            print(error, file=sys.stderr)
            sys.exit(NO_RAY)
    events = [json.loads(line) for line in Path("run/workers.jsonl").read_text().splitlines()]
    report = {
        "warnings": [(one.category.__name__, str(one.message)) for one in caught],
        "logs": {path.name: path.read_text() for path in Path("run/workers").iterdir()},
        "reasons": [event["detail"] for event in events if event["event"] == "failed"],
        "closed": sorted(int(path.name.partition("-")[2]) for path in Path().glob("closed-*")),
        "pids": sorted(event["pid"] for event in events if event["event"] != "failed"),
        "own": os.getpid(),
    }
    print(json.dumps(report))


def cluster():
    """Train on a cluster of three nodes on this machine, of which one is removed while its worker works."""
    # Before JAX has threads: the cluster's daemons are forked from this process, and share its token.
    set_private_environment()
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="polyak-ray-", ignore_cleanup_errors=True) as directory:
        # Ray writes the cluster's address there, and makes no directory for it.
        os.environ["RAY_TMPDIR"] = directory
        (Path(directory) / "ray").mkdir()
        try:
            nodes = Cluster(initialize_head=True, head_node_args={**NODE, "temp_dir": directory})
            for _ in range(2):
                nodes.add_node(**NODE)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            sys.exit(NO_RAY)
        print(json.dumps(remove_node(nodes)), flush=True)
        nodes.shutdown()


def remove_node(nodes):
    """Train with four workers; a node is removed at the first report."""
    env = make_env()
    agent = make_agent(env.spec)
    undisturbed = arrays_of(train(agent, env).loop_state)
    envs = make_workers(env, 4, lambda: RayWorkers(4, nodes.address), timeout=30.0)
    events, removed = [], []
    envs.group.on_event = lambda event: events.append((time.monotonic(), event))

    def workers_of(node):
        return set(descendants(node.all_processes["raylet"][0].process.pid)) & set(worker_processes())

    def remove(progress, metrics, state):
        if not removed:
            node = max(nodes.worker_nodes, key=lambda node: len(workers_of(node)))
            removed.extend(workers_of(node))
            nodes.remove_node(node, allow_graceful=False)
            # They answer until they miss their raylet, and the training might be done before.
            deadline = time.monotonic() + 30
            while any(map(is_running, removed)) and time.monotonic() < deadline:
                time.sleep(0.02)
            removed.append(time.monotonic())

    result = train(agent, envs, [remove])
    failed = [moment for moment, event in events if event.event == "failed"]
    envs.close()
    return {
        "same_bits": all(np.array_equal(a, b) for a, b in zip(arrays_of(result.loop_state), undisturbed, strict=True)),
        "removed": len(removed) - 1,
        "restarts": [event.detail for _, event in events if event.event == "failed"],
        "noticed": [moment - removed[-1] for moment in failed],
        "alive": result.metrics["workers/alive"],
        "listening": listening(descendants(os.getpid())),
    }


if __name__ == "__main__":
    {"forever": forever, "cluster": cluster, "output": output}.get("".join(sys.argv[1:]), main)()
