"""The environment with MJX's physics on the page about environments of one's own; it trains, and draws images."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "own-environment.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_pole_with_physics_of_mjx_is_learned_and_drawn():
    pytest.importorskip("mujoco.mjx")
    (block,) = (text for text in re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL) if "import mjx" in text)
    names = {"__name__": "mjx_page"}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        exec(block, names)
        assert names["result"].evaluate(episodes=64).mean_return > 150
        state, _ = names["env"].init(jax.random.key(0))
        image, _ = names["env"].render(state)
    assert image.shape[-1] == 3 and image.dtype == np.uint8 and image.std() > 1
