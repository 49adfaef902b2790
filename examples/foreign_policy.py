"""A Python policy: a planner in plain NumPy swings up a pendulum, in both loops.

    python examples/foreign_policy.py

It tries 64 random sequences of torques on its own model, and applies the first torque of the best one.
"""

import jax
import numpy as np

import polyak

HORIZON, TRIES, DT = 20, 64, 0.05


def costs(angle, speed, torques):
    """The cost of each sequence of torques `[TRIES, HORIZON]` by the pendulum's equations."""
    angle, speed, total = np.full(TRIES, angle), np.full(TRIES, speed), np.zeros(TRIES)
    for torque in torques.T:
        total += ((angle + np.pi) % (2 * np.pi) - np.pi) ** 2 + 0.1 * speed**2 + 0.001 * torque**2
        speed = np.clip(speed + (15.0 * np.sin(angle) + 3.0 * torque) * DT, -8.0, 8.0)
        angle = angle + speed * DT
    return total


def plan(obs, seed):
    """The torque for one observation (cos, sin, speed); polyak derives the seed from its key."""
    dice = np.random.default_rng(seed)
    torques = np.clip(np.repeat(dice.normal(0.0, 2.0, (TRIES, HORIZON // 5)), 5, axis=1), -2.0, 2.0)
    best = np.argmin(costs(np.arctan2(obs[1], obs[0]), obs[2], torques))
    return torques[best, :1]


def main():
    for name in ("jax/Pendulum-v1", "Pendulum-v1"):
        env = polyak.envs.make(name, num_envs=2)
        policy = polyak.PythonPolicy(plan, env.spec, batched=False, name="planner")
        evaluation = polyak.train.evaluate(policy, env, episodes=2, key=jax.random.key(0))
        print(f"{name}: mean return {evaluation.mean_return:.0f}, {policy.num_calls} steps planned")


if __name__ == "__main__":
    main()
