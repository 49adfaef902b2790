"""Videos of runs, after the training and during it."""

import json
import sys

import gymnasium
import jax
import numpy as np
import pytest

import polyak
from polyak.cli import main
from polyak.storage.run_directory import RunError
from polyak.videos.encoder import VideoError

pytest.importorskip("imageio_ffmpeg")
pytest.importorskip("pygame")

SETTINGS = {"num_steps": 16, "num_epochs": 1, "num_minibatches": 1}


def train(run_dir, env="jax/CartPole-v1", **settings):
    given = {"env_steps": 400, "num_envs": 2, "settings": SETTINGS, "eval_every": 200, "eval_episodes": 2, "progress": False}
    return polyak.train.run("ppo", env, run_dir=run_dir, **given | settings)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with videos, its result, and the result of a training without videos."""
    directory = tmp_path_factory.mktemp("runs")
    return directory / "pole", train(directory / "pole", video_every=150), train(directory / "plain")


def videos_of(run):
    return sorted(int(path.stem) for path in (run / "videos").iterdir())


def leaves(result):
    keys_as_data = lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return [np.asarray(keys_as_data(leaf)) for leaf in jax.tree.leaves(result.loop_state)]


def test_videos_change_no_bit_of_a_training(trained):
    run, result, plain = trained
    jax.tree.map(np.testing.assert_array_equal, leaves(result), leaves(plain))
    assert len(videos_of(run)) == 3 and videos_of(run)[-1] == result.progress.env_steps
    assert json.loads((run / "config.json").read_text())["video_every"] == 150


def test_a_resumed_run_goes_on_with_its_videos(trained, tmp_path):
    run = tmp_path / "stopped"
    train(run, video_every=150, should_stop=lambda: (run / "videos").exists() and len(videos_of(run)) == 1)
    assert len(videos_of(run)) == 1
    result = polyak.resume(run, progress=False)
    assert videos_of(run) == videos_of(trained[0])
    jax.tree.map(np.testing.assert_array_equal, leaves(result), leaves(trained[1]))


@pytest.mark.slow
def test_host_loop_and_several_seeds_have_videos(tmp_path):
    result = train(tmp_path / "host", env="CartPole-v1", video_every=200)
    plain = train(tmp_path / "plain", env="CartPole-v1")
    assert len(videos_of(tmp_path / "host")) == 2
    jax.tree.map(np.testing.assert_array_equal, leaves(result), leaves(plain))
    settings = {"env_steps": 200, "num_envs": 2, "settings": SETTINGS, "eval_episodes": 0, "progress": False}
    polyak.train.run_seeds("ppo", "jax/CartPole-v1", seeds=2, run_dir=tmp_path / "seeds", video_every=200, **settings)
    assert [len(videos_of(tmp_path / "seeds" / f"seed-{seed}")) for seed in range(2)] == [1, 1]
    with pytest.raises(ValueError, match=r"train.run_seeds: video_every needs run_dir"):
        polyak.train.run_seeds("ppo", "jax/CartPole-v1", seeds=2, video_every=200, **settings)


def test_what_prevents_videos_is_said_before_the_training(tmp_path):
    for settings, message in (
        ({"run_dir": None}, "train.run: video_every needs run_dir, where the videos are written"),
        ({"env": gymnasium.make("CartPole-v1"), "eval_every": None, "eval_episodes": 0}, "pass callbacks=.*record_videos"),
        ({"video_every": 0}, "video_every must be an integer >= 1 or None, got 0"),
        ({"report_every": 300, "eval_every": 300}, "video_every=150 must be at least report_every=300"),
        ({"learners": 2, "devices": 2, "eval_every": None}, "video_every must be None with learners=2"),
    ):
        given = {"run_dir": tmp_path / "new", "video_every": 150} | settings
        if isinstance(given.get("env"), gymnasium.Env):
            given["num_envs"] = None
        with pytest.raises((ValueError, TypeError), match=message):
            train(**given)
        assert not (tmp_path / "new").exists()


def test_a_video_shows_the_episodes_of_an_evaluation(trained, tmp_path):
    run, result, _ = trained
    video = polyak.video(run, tmp_path / "a.gif", episodes=2, show=["return", "value"])
    one = polyak.envs.make("jax/CartPole-v1")
    evaluation = result.evaluate(2, env=one)
    assert list(video.returns) == evaluation.returns.tolist() and video.fps == 50
    assert polyak.video(run, best=True, fps=10).path == run.resolve() / "videos" / f"{best_steps(run):012d}.mp4"


def best_steps(run):
    return max(int(path.name) for path in (run / "best").iterdir() if path.name.isdecimal())


def test_errors_are_one_sentence_each(trained, tmp_path, monkeypatch):
    run = trained[0]
    with pytest.raises(RunError, match="there is no such directory; a run was expected"):
        polyak.video(tmp_path / "none")
    with pytest.raises(ValueError, match="must be a separate file, not a file of the run"):
        polyak.video(run, run / "checkpoints" / "a.mp4")
    with pytest.raises(ValueError, match=r"must end with .mp4 or .gif, got .*a.webm"):
        polyak.video(run, tmp_path / "a.webm")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(VideoError, match=r"polyak.watch: there is no display to open a window on"):
        polyak.watch(run)
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(ImportError, match=r"polyak.watch needs pygame, .*: pip install 'polyak\[video\]'"):
        polyak.watch(run)


def test_an_environment_of_ones_own_is_passed_again(tmp_path):
    def make_short(render_mode=None):
        return gymnasium.make("CartPole-v1", render_mode=render_mode, max_episode_steps=5)

    train(tmp_path / "own", env=make_short, eval_every=None, eval_episodes=0, env_steps=64, video_every=64)
    assert len(videos_of(tmp_path / "own")) == 1
    with pytest.raises(ValueError, match=r"polyak.video: env must be passed: 'make_short' of"):
        polyak.video(tmp_path / "own")
    assert polyak.video(tmp_path / "own", env=make_short).lengths == (5,)


def test_the_command_writes_a_video(trained, tmp_path, capsys, monkeypatch):
    run = trained[0]
    monkeypatch.chdir(tmp_path)
    assert main(["video", str(run), "-o", "a.mp4", "--episodes", "2", "--show", "step", "value", "--no-compilation-cache"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("wrote a.mp4 (2 episodes, return ") and "at 50 frames per second" in out
    assert main(["video", str(run), "--best", "--no-compilation-cache"]) == 0
    assert f"{best_steps(run):012d}.mp4 (1 episode" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("video RUN -o a.avi", "must end with .mp4 or .gif, got a.avi"),
        ("video RUN -o a.mp4 --output b.mp4", "--output is set more than once"),
        ("video nowhere", "nowhere: there is no such directory; a run was expected"),
        ("video", "a run directory is missing: polyak video RUN [flags]"),
        ("video RUN other", "polyak video takes one RUN; got"),
        ("video RUN --episodes 0", "episodes must be an integer >= 1"),
        ("video RUN --fps nan", "fps must be a number in (0, 1000]"),
        ("video RUN --seed -1", "seed must be an integer"),
        ("video RUN --max-steps 0", "max_steps must be an integer >= 1"),
        ("video RUN --show speed", "'speed'"),
        ("video RUN --wrapper nowhere:W", "--wrapper nowhere:W: No module named 'nowhere'"),
        ("watch RUN", "there is no display to open a window on (DISPLAY is not set); polyak video RUN writes a file"),
        ("watch RUN --output a.mp4", "--output"),
    ],
)
def test_wrong_words_are_usage_errors(trained, tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    try:
        code = main([str(trained[0]) if word == "RUN" else word for word in words.split()])
    except SystemExit as error:
        code = error.code
    err = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert code == 2 and message in err and "Traceback" not in err
    assert not list(tmp_path.iterdir())


USER = """
import gymnasium

def make_env(render_mode=None, **kwargs):
    return gymnasium.make("CartPole-v1", render_mode=render_mode, max_episode_steps=6)

class Wrapper(gymnasium.Wrapper):
    pass
"""


@pytest.mark.slow
def test_code_of_ones_own_is_named_on_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(USER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    short = "--env-steps 64 --num-envs 2 --num-steps 16 --num-minibatches 1 --num-epochs 1 --eval-episodes 0 --video-every 64"
    for user in ("--env mine:make_env", "CartPole-v1 --wrapper mine:Wrapper"):
        run = tmp_path / user.split()[0].strip("-")
        again = user.removeprefix("CartPole-v1 ")
        for words in (f"train ppo {user} {short} --run-dir {run}", f"video {run} {again}"):
            assert main([*words.split(), "--no-compilation-cache"]) == 0, capsys.readouterr().err
        assert "frames per second" in capsys.readouterr().out and len(videos_of(run)) == 1
    sys.modules.pop("mine")
