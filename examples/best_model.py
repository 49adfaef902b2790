"""Evaluates while training, stops once the task is solved, and loads the best policy: `python examples/best_model.py`."""

import tempfile

import polyak


def stop_when_solved(progress, metrics, state):
    """Return False, which stops training, at a mean return of 475 in an evaluation."""
    return metrics.get("eval/mean_reward", 0.0) < 475.0


run_dir = tempfile.mkdtemp()
result = polyak.train.run(
    "ppo", "CartPole-v1", env_steps=100_000, run_dir=run_dir, eval_every=10_000, callbacks=[stop_when_solved]
)
for env_steps, evaluation in result.evaluations.items():
    print(f"{env_steps:,} env_steps: {evaluation}")
best = polyak.load_policy(f"{run_dir}/best")
print("best action for a pole that leans to the right:", best.predict([0.0, 0.0, 0.1, 0.0])[0])
