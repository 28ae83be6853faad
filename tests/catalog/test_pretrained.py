"""Published weights come through the libraries that publish them, or one sentence says why not."""

import importlib
import runpy
import socket
import sys
import urllib.error
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from zoo.catalog.pretrained import SOURCES
from zoo.errors import WeightsError

ROOT = Path(__file__).parents[2]


def library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{name}: {error}")


def test_what_torchvision_fetched_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    models = library("torchvision").models
    theirs = models.resnet18()
    fetched = []

    def load(url: str, **options: Any) -> Any:
        fetched.append(url)
        return theirs.state_dict()

    monkeypatch.setattr(models._api, "load_state_dict_from_url", load)
    ours = zoo.create("resnet18", pretrained=True)
    assert "resnet18" in fetched[0]
    x = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=0, atol=0)
    with pytest.raises(WeightsError, match=r"of another shape: fc\.weight.*Nothing was loaded"):
        zoo.resnet18(pretrained=True, classes=3)


def test_every_name_is_one_of_the_catalog_and_of_its_library() -> None:
    assert set(SOURCES) <= set(zoo.list_models())
    known = {
        "torchvision": library("torchvision").models.list_models(),
        "timm": library("timm").list_models(pretrained=False),
        "transformers": ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"],
    }
    assert all(theirs in known[source] for source, theirs in SOURCES.values())


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16", "gpt2_small"])
def test_without_a_network_one_sentence_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def nowhere(*_: Any, **__: Any) -> Any:
        raise urllib.error.URLError("no network")

    source, owner, attribute = {
        "resnet18": ("torchvision", "models._api", "load_state_dict_from_url"),
        "vit_tiny_patch16": ("timm", "", "create_model"),
        "gpt2_small": ("transformers", "GPT2LMHeadModel", "from_pretrained"),
    }[name]
    found = library(source)
    for part in filter(None, owner.split(".")):
        found = getattr(found, part)
    monkeypatch.setattr(found, attribute, nowhere)
    state = torch.get_rng_state()
    with pytest.raises(
        WeightsError, match=rf"{name} could not be fetched through {source}.*no net"
    ):
        zoo.create(name, pretrained=True)
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_that_nobody_publishes_and_a_library_that_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(WeightsError, match=r"no library publishes weights for vnet; .*resnet18"):
        zoo.create("vnet", pretrained=True)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(WeightsError, match="pip install timm"):
        zoo.vit_tiny_patch16(pretrained=True)


def test_torch_hub_finds_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a local folder needs no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    found = runpy.run_path(str(ROOT / "hubconf.py"))
    # what torch.hub takes for an entry point
    entries = [name for name in found if callable(found[name]) and not name.startswith("_")]
    assert sorted(entries) == zoo.list_models()
    model = torch.hub.load(str(ROOT), "resnet18", source="local", checkpoint=2, classes=3)
    model(torch.rand(2, 3, 32, 32)).sum().backward()
    assert zoo.plan_of(model).depth() == 1
