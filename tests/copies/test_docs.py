"""The programs in docs/copies.md run as they stand there, one after the other, and its table names what exists."""

import re
from pathlib import Path

import jax
import numpy as np

import polyak
from polyak.copies import workers
from polyak.copies.network_copies import NetworkCopies

PAGE = (Path(__file__).parents[2] / "docs" / "copies.md").read_text()


def test_the_examples_run_in_order(capsys):
    names = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for number, program in enumerate(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)):
            exec(compile(program, f"docs/copies.md, program {number}", "exec"), names)
    assert np.isfinite(float(names["loss"])) and names["copies"].names == ("online", "target")
    assert "network: 226 parameters (float32)" in capsys.readouterr().out
    assert int(names["shared"].version) == 1 and len(names["workers"]) == 2


def test_the_names_in_the_table_of_other_libraries_are_ours():
    table = PAGE.split("## Coming from another library")[1]
    ours = " ".join(row.split("|")[2] for row in table.splitlines() if row.count("|") == 3)
    named = set(re.findall(r"\b([a-z_]+)\(", ours)) | {"apply_gradients", "reset_gradients", "apply_and_sync"}
    assert {"soft_update", "update_target", "predict", "train_and_sync"} <= named
    for name in named - {"create"}:
        assert any(name in dir(place) for place in (polyak, NetworkCopies, workers)), name
