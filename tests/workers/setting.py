"""Trainings with workers in this process, with an engine that can fail, and environments of every kind."""

import gymnasium
import jax
import numpy as np

import polyak
from polyak.agents.ppo import PPO
from polyak.envs.parts import split
from polyak.loops.host_loop import host
from polyak.workers.in_process_workers import InProcessWorkers
from polyak.workers.supervise import WorkerLost
from polyak.workers.worker_envs import WorkerEnvs
from polyak.workers.worker_group import WorkerGroup, WorkerOptions

KEY = jax.random.key(3)


def make_env(env="CartPole-v1", num_envs=8):
    return polyak.envs.make(env, num_envs=num_envs, vectorization="sync")


def make_agent(spec, **settings):
    return PPO(spec, **{"num_steps": 16, "num_epochs": 1, "num_minibatches": 2} | settings)


def make_workers(env, workers, engine=InProcessWorkers, **options):
    """The same environments, split over workers."""
    parts = split(env.source, env.num_envs, workers)
    group = WorkerGroup(parts, env.spec, env.num_envs, engine, WorkerOptions(**options))
    # Failures are warnings otherwise, and most of these are meant.
    group.on_event = lambda event: None
    return WorkerEnvs(group, env.source)


def train(env, workers=0, engine=InProcessWorkers, agent=None, steps=600, options=None, events=None, **arguments):
    """Train; returns the result of the host loop, or of workers. What happens to these is added to `events`."""
    agent = agent or make_agent(env.spec)
    copies = {"num_envs": env.num_envs, **env.source.options}
    used = make_workers(env, workers, engine, **options or {}) if workers else polyak.envs.make(env.source.id, **copies)
    if events is not None:
        used.group.on_event = events.append
    try:
        return host(agent, used, env_steps=steps, key=KEY, **arguments)
    finally:
        used.close()


def arrays_of(state):
    """The leaves of a loop's state in NumPy."""
    return [
        np.asarray(jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(state)
    ]


def assert_same_bits(one, other):
    for a, b in zip(arrays_of(one), arrays_of(other), strict=True):
        np.testing.assert_array_equal(a, b)


class FaultyWorkers(InProcessWorkers):
    """Workers that fail as a list says: `faults[n]` is what happens to the n-th call of `rollout`, by any worker.

    "lost": the worker dies before; "late": it never returns; a function changes its rollout.
    """

    def __init__(self, faults):
        super().__init__()
        self.faults, self.calls = dict(faults), 0

    def call(self, handle, method, arguments):
        if method != "rollout":
            return super().call(handle, method, arguments)
        fault = self.faults.get(self.calls)
        self.calls += 1
        if fault in ("lost", "late"):
            return Fault(fault)
        call = super().call(handle, method, arguments)
        if fault is not None:
            call.result = fault(call.result)
        return call

    def wait(self, calls, seconds):
        return [call for call in calls if not (isinstance(call, Fault) and call.kind == "late")]

    def result(self, call):
        if isinstance(call, Fault):
            raise WorkerLost("died: of a test")
        return super().result(call)


class Fault:
    """A call that fails."""

    def __init__(self, kind):
        self.kind = kind


class Counting(gymnasium.Env):
    """Observations count the steps of an episode of five; it has no snapshots, and raises or returns NaN where a test says."""

    observation_space = gymnasium.spaces.Box(-10, 10, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, raises_at=None, nan_at=None):
        self.raises_at, self.nan_at, self.total = raises_at, nan_at, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.count += 1
        self.total += 1
        if self.total == self.raises_at:
            raise ArithmeticError("of a test")
        value = np.nan if self.total == self.nan_at else self.count
        return np.full(3, value, np.float32), 1.0, self.count == 5, False, {}
