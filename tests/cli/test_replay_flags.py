"""The flags of replays: what they change, and which of them belong to which replay."""

import pytest

import polyak
from polyak.cli.flags import UsageError
from polyak.cli.replay_flags import ReplayFlags, changed_replay
from polyak.presets.preset import LinearOverTraining

PRIORITIZED = polyak.PrioritizedReplay(500, alpha=0.5, frame_stack=4)

PRIORITIZED_GOALS = polyak.HindsightReplay(polyak.PrioritizedReplay(500, alpha=0.5))
INNER = polyak.PrioritizedReplay(9, alpha=0.5)


@pytest.mark.parametrize(
    ("replay", "flags", "wanted"),
    [
        (PRIORITIZED, ReplayFlags(), PRIORITIZED),
        (PRIORITIZED, ReplayFlags(priority_eps=0.1), polyak.PrioritizedReplay(500, alpha=0.5, eps=0.1, frame_stack=4)),
        (PRIORITIZED, ReplayFlags(replay="uniform", capacity=9), polyak.UniformReplay(9, frame_stack=4)),
        (polyak.UniformReplay(500, 2), ReplayFlags(frame_padding="first"), polyak.UniformReplay(500, 2, "first")),
        (
            polyak.UniformReplay(500),
            ReplayFlags(replay="prioritized", priority_beta=LinearOverTraining(0.5, 1.0, 0.5)),
            polyak.PrioritizedReplay(500, beta=polyak.Linear(0.5, 1.0, 50)),
        ),
        (polyak.UniformReplay(500), ReplayFlags(replay="hindsight", goal_ratio=0.5), polyak.HindsightReplay(500, ratio=0.5)),
        (PRIORITIZED_GOALS, ReplayFlags(goal_strategy="final"), polyak.HindsightReplay(PRIORITIZED_GOALS.replay, "final")),
        (polyak.HindsightReplay(500), ReplayFlags(capacity=9, priority_alpha=0.5), polyak.HindsightReplay(INNER)),
        (polyak.UniformReplay(9), ReplayFlags(replay="hindsight", priority_alpha=0.5), polyak.HindsightReplay(INNER)),
        (PRIORITIZED_GOALS, ReplayFlags(replay="uniform"), polyak.UniformReplay(500)),
    ],
)
def test_flags_change_the_settings_of_a_replay_and_keep_the_others(replay, flags, wanted):
    assert changed_replay(replay, flags, None, 100) == wanted


def test_a_recurrent_network_chooses_its_replay():
    made = changed_replay(polyak.UniformReplay(500), ReplayFlags(sequence_length=8, burn_in=2), "sequence", 100)
    assert made == polyak.SequenceReplay(500, 8, burn_in=2)
    assert changed_replay(made, ReplayFlags(replay="uniform"), "sequence", 100) == polyak.UniformReplay(500)


def test_a_recurrent_network_takes_no_priorities_or_frames_away_unasked():
    with pytest.raises(UsageError, match=r"needs a SequenceReplay, without the alpha, frame_stack of PrioritizedReplay"):
        changed_replay(PRIORITIZED, ReplayFlags(), "sequence", 100)
    with pytest.raises(UsageError, match="a recurrent network has no goals"):
        changed_replay(PRIORITIZED_GOALS, ReplayFlags(), "sequence", 100)
    assert changed_replay(PRIORITIZED, ReplayFlags(replay="sequence"), "sequence", 100) == polyak.SequenceReplay(500)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (ReplayFlags(priority_alpha=0.5, burn_in=1), "--priority-alpha, --burn-in: UniformReplay has no such setting"),
        (ReplayFlags(replay="sequence", frame_stack=4), "--frame-stack: SequenceReplay has no such setting"),
        (ReplayFlags(goal_ratio=0.5), "--goal-ratio: UniformReplay has no such setting"),
        (ReplayFlags(replay="hindsight", burn_in=4), "--burn-in: UniformReplay has no such setting"),
    ],
)
def test_flags_of_another_replay_are_rejected(flags, message):
    with pytest.raises(UsageError, match=message):
        changed_replay(polyak.UniformReplay(500), flags, None, 100)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ppo CartPole-v1 --capacity 500", "--capacity: ppo has no replay"),
        ("dqn CartPole-v1 --replay hindsight", "DQN: HindsightReplay: the environment must have goals"),
        ("dqn jax/BitFlipping-v0 --replay hindsight --goal-ratio 2", "HindsightReplay: ratio must be a number in"),
        ("dqn jax/BitFlipping-v0 --replay hindsight --frame-stack 4", "HindsightReplay: replay must have frame_stack=1"),
        ("dqn jax/BitFlipping-v0 --replay hindsight --goal-strategy past", "past"),
        ("dqn CartPole-v1 --capacity 0", "UniformReplay: capacity must be an integer in"),
        ("dqn CartPole-v1 --replay prioritized --priority-beta linear:2", "PrioritizedReplay: beta"),
        ("dqn CartPole-v1 --priority-beta fast", "must be a number or linear:START"),
        ("dqn CartPole-v1 --network lstm --burn-in 16", "burn_in=16 must be less than sequence_length=16"),
        ("dqn CartPole-v1 --replay sequence", "DQN: replay must be a SequenceReplay with a recurrent network (LSTM, GRU)"),
        ("crossq jax/Pendulum-v1 --replay sequence", "CrossQ: replay must draw transitions"),
        ("sac jax/Pendulum-v1 --replay sequence", "SAC: replay must be a SequenceReplay with a recurrent actor"),
    ],
)
def test_wrong_flags_are_rejected_before_a_run_begins(words, message, command, workdir):
    code, _, err = command(f"train {words}")
    assert code == 2 and message in " ".join(err.split()), err
    assert not list(workdir.iterdir())
