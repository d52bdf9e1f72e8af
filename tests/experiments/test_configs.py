"""The files in ``configs/``: each one can be run, and the demo's agents are what they should be."""

import importlib
import pathlib

import pytest

from experiments import agents, decode_step, serve
from experiments.running import engine_configs
from experiments.workload_specs import read_spec
from experiments.workloads import Target, prepare
from models.from_gguf import smollm2_path
from models.gguf_file import read_gguf
from models.tokenizer_files import tokenizer_from_gguf

FOLDER = pathlib.Path(__file__).parents[2] / "configs"
NAMES = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))
OTHERS = ("decode_step", "decode_grid", "dispatch_fit", "profile")
SERVE = [name for name in NAMES if name not in OTHERS]


def get_config(name):
    return importlib.import_module(f"configs.{name}").get_config().to_dict()


@pytest.mark.parametrize("name", NAMES)
def test_a_configs_docstring_gives_its_command(name):
    module = importlib.import_module(f"configs.{name}")
    assert f"--config=configs/{name}.py" in (module.__doc__ or "")


@pytest.mark.parametrize("name", SERVE)
def test_a_config_of_serve_is_valid(name):
    config = get_config(name)
    assert set(config) == set(serve.FIELDS)
    engine_configs(config["systems"], config["engine"])
    if name == "trace":
        config["workload"]["path"] = "given with --trace"
    read_spec(config["workload"])


def test_the_config_of_decode_step_is_valid():
    config = get_config("decode_step")
    assert set(config) == set(decode_step.FIELDS)
    engine_configs(config["systems"], {**config["engine"], "pool_tokens": 4096})


def test_every_config_writes_into_its_own_folder():
    folders = [get_config(name)["out"] for name in NAMES]
    assert len(set(folders)) == len(folders)


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_from_gguf(read_gguf(smollm2_path()))


@pytest.fixture
def demo():
    return get_config("demo")["workload"] | {"folder": str(FOLDER / "agents")}


def test_the_demo_asks_each_of_four_agents_eight_questions(demo, tokenizer):
    workload = prepare(demo)(Target(49_152, 1536, tokenizer))
    groups = list(workload.groups.values())
    assert groups[:5] == ["cook", "tutor", "support", "analyst", "cook"]
    assert {name: groups.count(name) for name in groups} == dict.fromkeys(demo["agents"], 8)
    assert len(set(workload.questions.values())) == 32


def test_the_demos_system_prompts_are_300_to_1200_tokens_long(demo, tokenizer):
    shared = [
        agents.tokenize(agents.read_agent(demo["folder"], name), tokenizer).shared_tokens
        for name in demo["agents"]
    ]
    for found, about in zip(shared, (300, 550, 850, 1200), strict=True):
        assert abs(found - about) < 0.1 * about


def test_a_system_prompt_is_shared_down_to_the_token_that_ends_it(demo, tokenizer):
    cook = agents.read_agent(demo["folder"], "cook")
    tokens = agents.tokenize(cook, tokenizer)
    for prompt in tokens.prompts:
        text = tokenizer.decode(prompt[: tokens.shared_tokens], special=True)
        assert text == f"<|im_start|>system\n{cook.system}<|im_end|>\n"
