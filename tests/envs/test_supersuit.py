"""SuperSuit's vector environments: agents of PettingZoo as rows, whose final observations are kept."""

import jax
import numpy as np
import pytest

from polyak import envs, loops
from polyak.agents.ppo import PPO
from polyak.networks.feedforward import MLP

supersuit = pytest.importorskip("supersuit")
pettingzoo = pytest.importorskip("pettingzoo")
gym = pytest.importorskip("gymnasium")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Counters(pettingzoo.ParallelEnv):
    """Two agents that count together; episodes of `length` steps."""

    metadata = {"name": "counters", "render_modes": []}  # noqa: RUF012
    render_mode = None

    def __init__(self, length=3, dies_alone=False):
        self.possible_agents, self.agents = ["a", "b"], []
        self.length, self.dies_alone, self.episode = length, dies_alone, -1

    def observation_space(self, agent):
        return gym.spaces.Box(-100.0, 100.0, (3,), np.float32)

    def action_space(self, agent):
        return gym.spaces.Discrete(3)

    def obs(self):
        return {agent: np.array([self.episode, self.t, i], np.float32) for i, agent in enumerate(self.possible_agents)}

    def reset(self, seed=None, options=None):
        self.agents, self.t = list(self.possible_agents), 0
        self.episode = 10 * int(np.random.default_rng(seed).integers(9)) if seed is not None else self.episode + 1
        return self.obs(), {agent: {"action_mask": np.ones(3, np.int8)} for agent in self.agents}

    def step(self, actions):
        self.t += 1
        over = self.t == self.length
        terms = {agent: over or (self.dies_alone and agent == "b") for agent in self.agents}
        infos = {agent: {"action_mask": np.array([1, 1, 0], np.int8), "is_success": over} for agent in self.agents}
        rewards = {agent: float(actions[agent]) for agent in self.agents}
        return self.obs(), rewards, terms, dict.fromkeys(self.agents, False), infos


def concat(num=2, **options):
    return supersuit.concat_vec_envs_v1(supersuit.pettingzoo_env_to_vec_env_v1(Counters(**options)), num, num_cpus=0)


@pytest.mark.parametrize("given", [concat, lambda: supersuit.pettingzoo_env_to_vec_env_v1(Counters())])
def test_final_observations_are_kept_and_the_next_step_is_first(given):
    env = envs.make(given())
    assert env.num_envs in (2, 4) and env.spec.has_action_mask
    before, num_ended = env.reset(3), 0
    assert before.obs[:, 2].tolist() == [0, 1] * (env.num_envs // 2)
    for _ in range(12):
        action = np.arange(env.num_envs, dtype=np.int32) % 2
        time_step = env.step(action)
        for i in range(env.num_envs):
            if before.last[i]:
                assert time_step.first[i] and time_step.reward[i] == 0 and not time_step.last[i]
                assert time_step.obs[i].tolist() == [before.obs[i, 0] + 1, 0, i % 2] and time_step.action_mask[i].all()
            else:
                assert time_step.obs[i].tolist() == [before.obs[i, 0], before.obs[i, 1] + 1, i % 2]
                assert time_step.terminated[i] == (time_step.obs[i, 1] == 3) and time_step.reward[i] == action[i]
        num_ended += time_step.last.sum()
        before = time_step
    assert num_ended == 3 * env.num_envs
    assert env.info["rollout/success_rate"].tolist() == [1.0] * env.num_envs if time_step.last.all() else env.info == {}


def test_equal_seeds_give_equal_episodes_and_groups_differ():
    env = envs.make(concat(4))
    first, again, other = (env.reset(seed).obs[:, 0].tolist() for seed in (1, 1, 2))
    assert first == again != other and len(set(first)) > 1


def test_agents_that_end_alone_are_an_error_with_the_reason():
    env = envs.make(concat(dies_alone=True))
    env.reset(0)
    with pytest.raises(RuntimeError, match=r"agents \[1\] of .* ended before the others; polyak trains groups"):
        env.step(np.zeros(4, np.int32))


def test_processes_of_supersuit_are_rejected_with_the_way_out():
    class ProcConcatVec(gym.vector.VectorEnv):
        """As that of SuperSuit, without its processes."""

        __module__ = "supersuit.vector.multiproc_vec"
        num_envs = 4

    with pytest.raises(ValueError, match=r"ProcConcatVec is not supported; .*concat_vec_envs_v1\(..., num_cpus=0\)"):
        envs.make(ProcConcatVec())


def test_ppo_trains_on_it():
    env = envs.make(concat())
    agent = PPO(env.spec, network=MLP((4,)), num_steps=8, num_minibatches=1, num_epochs=1)
    result = loops.host(agent, env, env_steps=64, key=jax.random.key(0))
    assert result.metrics["rollout/ep_len_mean"] == 3 and result.metrics["rollout/success_rate"] == 1
    env.close()
