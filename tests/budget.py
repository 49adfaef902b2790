"""The time of each file of tests: `.ci/run` sets `MAX_FILE_SECONDS`, above which a file fails unless it is in `LONGER`."""

import collections
import os

import pytest

_EVERY_AGENT = "compiles the updates of several agents"
_PROCESSES = "starts processes, and waits for them"
_TRAININGS = "compiles and runs whole trainings"
_LIBRARY = "compiles a library's environments, where the library is installed"

# Files that may take longer, or come near it on a slow machine, with the reason.
LONGER = {
    "tests/test_docs.py": "trains on every page of the documentation, and builds the site",
    "tests/test_examples.py": "runs every example as it is printed",
    "tests/test_notebooks.py": "runs every notebook as it is printed",
    "tests/test_to_the_bit.py": "compiles with the optimizing compiler",
    "tests/test_types.py": "runs mypy on a user's script",
    "tests/test_users_week.py": _PROCESSES,
    "tests/studies/test_study.py": "trains studies, one of which is killed several times, and starts processes",
    "tests/agents/test_actor_critics.py": _EVERY_AGENT,
    "tests/agents/test_actor_critics_tf_agents.py": _EVERY_AGENT,
    "tests/agents/test_bootstrapped_dqn.py": _TRAININGS,
    "tests/agents/test_bro.py": _TRAININGS,
    "tests/agents/test_combined_actions.py": _EVERY_AGENT,
    "tests/agents/test_crossq.py": _TRAININGS,
    "tests/agents/test_dqn.py": _TRAININGS,
    "tests/agents/test_dqn_prioritized.py": _TRAININGS,
    "tests/agents/test_dqn_recurrent.py": _TRAININGS,
    "tests/agents/test_dqn_tf_agents.py": _EVERY_AGENT,
    "tests/agents/test_extended.py": _TRAININGS,
    "tests/agents/test_flash_sac.py": _TRAININGS,
    "tests/agents/test_naf.py": _TRAININGS,
    "tests/agents/test_normalized_replay.py": _EVERY_AGENT,
    "tests/agents/test_on_policy.py": _EVERY_AGENT,
    "tests/agents/test_ppo_memory.py": _TRAININGS,
    "tests/agents/test_ppo_options.py": "compiles the update for each option of PPO",
    "tests/agents/test_ppo_probes.py": _TRAININGS,
    "tests/agents/test_ppo_update.py": "compiles the update for each option of PPO",
    "tests/agents/test_pqn.py": _TRAININGS,
    "tests/agents/test_reinforce.py": _TRAININGS,
    "tests/agents/test_recurrent_actor_critics.py": _TRAININGS,
    "tests/agents/test_resets.py": _EVERY_AGENT,
    "tests/agents/test_rnd.py": _TRAININGS,
    "tests/agents/test_rnd_dqn.py": _TRAININGS,
    "tests/agents/test_qt_opt.py": _TRAININGS,
    "tests/agents/test_sac_discrete.py": _TRAININGS,
    "tests/agents/test_shared_encoder.py": _EVERY_AGENT,
    "tests/agents/test_training_mode.py": _EVERY_AGENT,
    "tests/agents/test_value_family.py": _EVERY_AGENT,
    "tests/agents/test_views.py": _EVERY_AGENT,
    "tests/agents/test_xqc.py": _TRAININGS,
    "tests/cli/test_actor_critics.py": _TRAININGS,
    "tests/cli/test_atari.py": _TRAININGS,
    "tests/cli/test_devices.py": _PROCESSES,
    "tests/cli/test_dqn.py": _TRAININGS,
    "tests/cli/test_extended_agent.py": _TRAININGS,
    "tests/cli/test_flags.py": "parses every flag with wrong values",
    "tests/cli/test_intrinsic_flags.py": _TRAININGS,
    "tests/cli/test_killed.py": _PROCESSES,
    "tests/cli/test_killed_libraries.py": _PROCESSES,
    "tests/cli/test_user_code.py": _TRAININGS,
    "tests/cli/test_resume.py": _TRAININGS,
    "tests/cli/test_train.py": _TRAININGS,
    "tests/dynamics/test_craftax.py": _LIBRARY,
    "tests/dynamics/test_navix.py": _LIBRARY,
    "tests/dynamics/test_pgx.py": _LIBRARY,
    "tests/dynamics/test_playground.py": _LIBRARY,
    "tests/dynamics/test_xminigrid.py": _LIBRARY,
    "tests/envs/test_autoreset.py": "compiles the step without a pool of initial states, and with pools of several sizes",
    "tests/envs/test_host_goals.py": _TRAININGS,
    "tests/envs/test_libraries.py": _PROCESSES,
    "tests/loops/test_host_actor.py": "compiles each kind of actor for each kind of policy",
    "tests/loops/test_compiled_seeds.py": _TRAININGS,
    "tests/loops/test_diverged.py": _TRAININGS,
    "tests/loops/test_host_replay.py": _TRAININGS,
    "tests/loops/test_loops.py": _TRAININGS,
    "tests/loops/test_replay_memory.py": _TRAININGS,
    "tests/networks/test_actor_critic.py": "compiles each network for each kind of space",
    "tests/off_policy_evaluation/test_policy_value.py": "compiles fitted Q evaluation for several data sets",
    "tests/policies/test_sde.py": "compiles state-dependent exploration for each agent",
    "tests/policies/python/test_policy.py": "waits for Python policies that hang, and compiles programs around them",
    "tests/presets/test_presets.py": "makes the agent of every preset",
    "tests/agents/test_offline_agents.py": _TRAININGS,
    "tests/data/test_from_minari.py": _TRAININGS,
    "tests/train/test_compilation_cache.py": _PROCESSES,
    "tests/train/test_offline.py": _TRAININGS,
    "tests/replay/test_frames.py": _TRAININGS,
    "tests/replay/test_hindsight.py": "draws many goals, so that their probabilities can be compared",
    "tests/replay/test_prioritized.py": _TRAININGS,
    "tests/replay/test_sequences.py": "compiles the replay for each length of sequences",
    "tests/reports/test_page.py": "opens pages in a browser",
    "tests/train/test_agent_data.py": _TRAININGS,
    "tests/train/test_agent_settings.py": _TRAININGS,
    "tests/train/test_devices.py": _TRAININGS,
    "tests/train/test_hindsight.py": _TRAININGS,
    "tests/train/test_killed_learners.py": _PROCESSES,
    "tests/train/test_learners.py": _PROCESSES,
    "tests/train/test_run.py": _TRAININGS,
    "tests/train/test_run_video.py": _TRAININGS,
    "tests/train/test_seeds.py": _TRAININGS,
    "tests/train/test_tracking.py": _TRAININGS,
    "tests/train/test_worker_loops.py": _TRAININGS,
    "tests/workers/test_asynchronous_loop.py": _TRAININGS,
    "tests/workers/test_fault_storm.py": _TRAININGS,
    "tests/workers/test_learner_group.py": _PROCESSES,
    "tests/workers/test_ray.py": _PROCESSES,
    "tests/workers/test_ray_learners.py": _PROCESSES,
    "tests/workers/test_worker_rollouts.py": _TRAININGS,
}


class FileTimes:
    """A pytest plugin that adds up the setup, call and teardown of each file's tests, over all processes."""

    def __init__(self, max_seconds):
        self.seconds, self.max_seconds = collections.Counter(), max_seconds

    def files_over_budget(self):
        """The files over budget that are not listed, with their seconds."""
        return {file: time for file, time in self.seconds.items() if time > self.max_seconds and file not in LONGER}

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self, session):
        if self.files_over_budget() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("slowest files")
        for file, time in self.seconds.most_common(10):
            terminalreporter.line(f"{time:6.1f} s  {file}")
        for file, time in self.files_over_budget().items():
            terminalreporter.line(
                f"{file} took {time:.0f} s of at most {self.max_seconds:g} s: shorten it, or list it in tests/budget.py"
            )


def pytest_configure(config):
    """Measure where the tests are reported, and only where a limit is set: a busy machine fails nobody's tests."""
    limit = os.environ.get("MAX_FILE_SECONDS")
    if limit and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(FileTimes(float(limit)), "file times")
