import io
import os
import re

import pytest

from polyak.core.types import Progress
from polyak.train import display as module
from polyak.train.display import Screen, SeedReports, show_progress


def progress(env_steps, target=1000, fps=100.0):
    return Progress(env_steps, target, env_steps // 10, env_steps / fps, 2.5, fps)


def shown(steps, *, terminal, target=1000, done=0, metrics=None, width=120):
    text = io.StringIO()
    console = Screen(file=text, force_terminal=terminal, width=width, legacy_windows=False)
    with show_progress(console, "ppo CartPole-v1", target, done) as callback:
        for step in steps:
            callback(progress(step, target), metrics or {}, None)
    return text.getvalue()


def test_a_broken_pipe_silences_the_console_and_raises_nothing(monkeypatch):
    class Pipe(io.StringIO):
        def write(self, text):
            if "[b]" in self.getvalue():
                raise BrokenPipeError
            return super().write(text)

    silenced = []
    monkeypatch.setattr(module, "discard_output", silenced.append)
    screen = Screen(file=Pipe())
    for _ in range(3):
        screen.print_line("a [b] c")
    assert screen.file.getvalue() == "a [b] c\n" and len(silenced) == 1


@pytest.mark.parametrize(
    "closes", [lambda file: file.close(), lambda file: os.close(file.fileno())], ids=["file", "descriptor"]
)
def test_an_output_that_an_environment_closes_is_silent(closes, monkeypatch, tmp_path):
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(module.sys, "stdout", out)
        screen = Screen()
        screen.print_line("begins")
        closes(out)
        for _ in range(2):
            screen.print_line("a line")
            screen.print_text("a text")
    assert (tmp_path / "out").read_text() == "begins\n"


def test_names_between_colons_are_no_emoji():
    screen = Screen(file=io.StringIO())
    screen.print_line("envs:snake: compiling")
    assert screen.file.getvalue() == "envs:snake: compiling\n"


def test_no_terminal_gets_plain_lines():
    out = shown([100, 1000], terminal=False, metrics={"rollout/ep_rew_mean": 21.25})
    assert out.splitlines() == [
        "ppo CartPole-v1: compiling …",
        "ppo CartPole-v1: compiled in 2.5 s",
        "ppo CartPole-v1: 100 of 1,000 env_steps, 100/s, mean return 21.2, 9 s left",
        "ppo CartPole-v1: 1,000 of 1,000 env_steps, 100/s, mean return 21.2, 0 s left",
    ]


def test_a_hundred_reports_are_ten_plain_lines_or_so():
    out = shown(range(10, 1001, 10), terminal=False)
    assert out.count("env_steps, ") == 11
    assert out.splitlines()[-1].startswith("ppo CartPole-v1: 1,000 of 1,000")


def test_plain_lines_are_never_broken_however_narrow_the_console():
    assert len(shown([500], terminal=False, width=20).splitlines()) == 3


def test_a_mean_return_is_shown_once_there_is_one():
    assert "no episode ended yet" in shown([100], terminal=False)


def test_skipped_gradient_steps_are_shown():
    assert "1,234 gradient steps skipped" in shown([100], terminal=False, metrics={"train/skipped_steps": 1234.0})
    assert "skipped" not in shown([100], terminal=False, metrics={"train/skipped_steps": 0.0})


def test_a_training_that_has_not_begun_to_learn_is_shown():
    waiting, returns = "not learning yet", {"rollout/ep_rew_mean": -12.5}
    assert f"100/s, {waiting}\n" in shown([100], terminal=False, metrics={"train/n_updates": 0.0, **returns})
    assert waiting not in shown([100], terminal=False, metrics={"train/n_updates": 1.0})
    assert waiting not in shown([100], terminal=False, metrics={"train/n_updates": 0.0, "train/skipped_steps": 2.0})


@pytest.mark.parametrize(
    ("target", "left"), [(3100, "30 s left"), (18_800, "3:07 min left"), (738_100, "2:03 h left"), (100, "0 s left")]
)
def test_the_time_left_follows_from_the_speed(target, left):
    assert left in shown([100], terminal=False, target=target)


def test_the_time_left_is_that_of_the_pace_since_learning_began():
    text = io.StringIO()
    with show_progress(Screen(file=text, force_terminal=False, width=120), "sac", 10_000) as callback:
        # 1000 steps/s of random actions, 10 steps/s of learning, from the middle of the second report on.
        for steps, seconds, updates in ((1000, 1.0, 0), (2000, 50.0, 500), (3000, 150.0, 1500)):
            metrics = {"train/n_updates": float(updates)}
            callback(Progress(steps, 10_000, steps, seconds, 1.0, steps / seconds), metrics, None)
    assert "3,000 of 10,000 env_steps, 20/s, no episode ended yet, 11:40 min left" in text.getvalue()


def test_the_first_report_of_an_agent_with_a_replay_says_no_time_left():
    """It is of random actions for the most part, also where the first gradient step has been taken."""
    text = io.StringIO()
    with show_progress(Screen(file=text, force_terminal=False, width=120), "sac", 2000) as callback:
        for steps, seconds, updates in ((1000, 1.0, 1), (1500, 51.0, 500), (2000, 101.0, 1000)):
            metrics = {"train/n_updates": float(updates), "replay/size": 500.0}
            callback(Progress(steps, 2000, steps, seconds, 1.0, steps / seconds), metrics, None)
    _, _, *lines = text.getvalue().splitlines()
    assert [line.rpartition(", ")[2] for line in lines] == ["no episode ended yet", "50 s left", "0 s left"]


def test_no_time_is_left_out_of_a_pace_of_zero():
    text = io.StringIO()
    with show_progress(Screen(file=text, force_terminal=False, width=120), "ppo", 1000) as callback:
        for seconds in (1.0, 2.0):
            callback(Progress(500, 1000, 1, seconds, 1.0, 500.0), {}, None)
    assert "0 s left" not in text.getvalue()


def test_the_time_left_follows_a_change_of_the_pace():
    text = io.StringIO()
    with show_progress(Screen(file=text, force_terminal=False, width=120), "ppo", 10_000) as callback:
        seconds = 0.0
        for steps in range(100, 5001, 100):
            seconds += 1.0 if steps <= 2500 else 2.0
            callback(Progress(steps, 10_000, steps, seconds, 1.0, steps / seconds), {}, None)
    assert "4,100 of 10,000 env_steps, 72/s, no episode ended yet, 1:58 min left" in text.getvalue()


def without_colours(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_a_terminal_gets_a_bar_with_compile_time_shown_as_such():
    plain = without_colours(shown([100, 1000], terminal=True, metrics={"rollout/ep_rew_mean": 21.25}))
    assert plain.startswith("ppo CartPole-v1\n")
    assert "compiling …" in plain
    assert "compiled in 2.5 s\n" in plain
    assert "━" * 20 + " 1,000 of 1,000 env_steps, 100/s, mean return 21.2, 0 s left" in plain


@pytest.mark.parametrize(("updates", "text"), [(0.0, "not learning yet"), (1.0, "mean return -1500.0, 10 s left")])
def test_eighty_columns_hold_the_numbers_of_a_long_training(updates, text):
    metrics = {"rollout/ep_rew_mean": -1500.0, "train/n_updates": updates}
    plain = without_colours(shown([9_999_000], terminal=True, target=10_000_000, width=80, metrics=metrics))
    assert f"9,999,000 of 10,000,000 env_steps, 100/s, {text}" in plain
    assert "━" in plain.splitlines()[-1]


def test_a_bar_gives_the_cursor_back():
    out = shown([100], terminal=True)
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")


@pytest.mark.parametrize("done", [0, 500])
def test_a_resumed_training_starts_its_bar_where_it_was(done):
    # Where a bar is partly done there is half a dash.
    assert any(half in shown([], terminal=True, done=done) for half in "╸╺") == (done > 0)


def test_seeds_that_train_together_report_their_mean_and_total():
    seen = []
    reports = SeedReports(lambda progress, metrics, state: seen.append((progress, metrics)), 3)
    for steps in (10, 20):
        for i in range(3):
            assert len(seen) == steps // 10 - 1
            metrics = {"rollout/ep_rew_mean": 100.0 * i, "train/skipped_steps": 1.0 * i, "train/n_updates": 7.0}
            reports.callback_of(i)(progress(steps + i), metrics, None)
    joint, metrics = seen[-1]
    assert (joint.env_steps, joint.target_env_steps, joint.fps) == (21, 1000, 100.0)
    assert metrics == {"rollout/ep_rew_mean": 100.0, "train/skipped_steps": 3.0, "train/n_updates": 21.0}


def test_several_seeds_have_the_speed_of_all():
    text = io.StringIO()
    with show_progress(Screen(file=text, force_terminal=False, width=120), "ppo", 1000, seeds=3) as display:
        display(progress(500), {}, None)
    assert "500 of 1,000 env_steps each, 300/s in all, no episode ended yet, 5 s left" in text.getvalue()


def test_reports_go_on_without_seeds_that_have_diverged():
    seen = []
    reports = SeedReports(lambda progress, metrics, state: seen.append((progress.env_steps, metrics)), 3)
    for steps, seeds in ((10, (0, 1, 2)), (20, (0, 2)), (30, (0, 2)), (40, (0,))):
        for i in seeds:
            reports.callback_of(i)(progress(steps), {"rollout/ep_rew_mean": 1.0 * i}, None)
    reports.flush()
    means = [metrics["rollout/ep_rew_mean"] for _, metrics in seen]
    assert ([steps for steps, _ in seen], means) == ([10, 20, 30, 40], [1.0, 1.0, 1.0, 0.0])


def test_an_evaluation_is_shown_while_it_lasts_and_with_its_result():
    text = io.StringIO()
    console = Screen(file=text, force_terminal=True, width=80, legacy_windows=False)
    with show_progress(console, "ppo CartPole-v1", 1000) as display:
        display.show_activity(progress(500), ["evaluating 100 episodes …", "evaluating …"])
        display.print_text("evaluated at 500 env_steps: mean return 210.4 (best)")
        display(progress(500), {}, None)
    plain = without_colours(text.getvalue())
    assert plain.index("compiled in") < plain.index("evaluating 100 episodes …") < plain.index("evaluated at 500 env_steps")


def test_the_time_left_includes_evaluations(monkeypatch):
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    text = io.StringIO()
    with show_progress(Screen(file=text, force_terminal=False, width=120), "ppo", 1000) as display:
        # 100 steps take a second, and every fourth report an evaluation of 8 seconds.
        for i in range(1, 9):
            now += 9.0 if i % 4 == 0 else 1.0
            display(progress(i * 100), {}, None)
    assert text.getvalue().splitlines()[-1].endswith("800 of 1,000 env_steps, 100/s, no episode ended yet, 7 s left")


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (120, "9,999,000 of 10,000,000 env_steps, 100/s, mean return -1500.0, 2,234 gradient steps skipped, 10 s left"),
        (100, "9,999,000 of 10,000,000 env_steps, 100/s, mean return -1500.0, 2.2k skipped, 10 s left"),
        (80, "10M of 10M, 100/s, mean return -1500.0, 2.2k skipped, 10 s left"),
        (60, "return -1500.0, 2.2k skipped, 10 s left"),
        (40, "return -1500.0, 10 s left"),
        (20, "10 s left"),
    ],
)
def test_the_time_left_survives_in_narrow_terminals(width, text):
    metrics = {"rollout/ep_rew_mean": -1500.0, "train/skipped_steps": 2234.0}
    plain = without_colours(shown([9_999_000], terminal=True, target=10_000_000, width=width, metrics=metrics))
    assert plain.rstrip("\n").endswith(f" {text}")


def test_text_breaks_between_words_in_a_terminal_and_not_elsewhere():
    words = "seventeen words of text that are wider than the terminal are broken between two of these words"
    for is_terminal in (True, False):
        text = io.StringIO()
        Screen(file=text, force_terminal=is_terminal, width=20, legacy_windows=False).print_text(words)
        lines = text.getvalue().splitlines()
        assert " ".join(line.strip() for line in lines) == words and (len(lines) > 1) == is_terminal


def test_plain_lines_repeat_a_long_title_in_short():
    text, title = io.StringIO(), f"ppo {'long' * 20}-v1"
    with show_progress(Screen(file=text, force_terminal=False, width=120), title, 1000) as display:
        display(progress(500), {}, None)
    first, *others = text.getvalue().splitlines()
    assert first == f"{title}: compiling …" and len(others) == 2
    assert all(re.match(r"ppo (long)+…(\w+)-v1: ", line) and line.index(": ") == 48 for line in others)
