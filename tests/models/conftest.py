"""The real model, loaded once: SmolLM2-135M-Instruct from the installed package."""

import pytest

import models


@pytest.fixture(scope="session")
def smollm2() -> models.LoadedModel:
    return models.load("smollm2-135m", dtype="float32")
