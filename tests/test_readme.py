"""The code that the README and the examples show runs as shown."""

import pathlib
import re

import jax
import numpy as np

from examples import decode_attention as example

ROOT = pathlib.Path(__file__).parent.parent


def test_library_example_of_the_readme_runs_and_attends_to_every_token():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {
        "q": (8, 8, 64),
        "k_prefix": (1000, 2, 64),
        "v_prefix": (1000, 2, 64),
        "k_suffix": (256, 2, 64),
        "v_suffix": (256, 2, 64),
    }
    names = {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    scope = dict(names)
    exec(blocks[0], scope)
    row, head = 5, 6
    kv_head = head // 4
    k = np.concatenate([names["k_prefix"][:, kv_head], names["k_suffix"][160:192, kv_head]])
    v = np.concatenate([names["v_prefix"][:, kv_head], names["v_suffix"][160:192, kv_head]])
    scores = np.exp(k.astype(np.float64) @ np.asarray(names["q"][row, head], np.float64) / 8)
    want = scores @ v / scores.sum()
    np.testing.assert_allclose(scope["out"][row, head], want, rtol=1e-4, atol=1e-5)


def test_example_script_shows_that_backends_agree(capsys):
    example.main()
    printed = capsys.readouterr().out
    difference = float(printed.strip().rsplit(" ", 1)[1])
    assert difference < 1e-5
