"""The README's Python, run word for word."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fdbd.bench import load_bundle
from fdbd.data.datasets import info
from fdbd.networks import list_zoo

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

README = Path(__file__).parents[2] / "README.md"


def test_the_code_in_the_readme_runs_as_it_stands(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 5)).eval()
    train = torch.randn(256, 3, 4, 4)
    validation = torch.randn(128, 3, 4, 4)
    names = {
        "model": model,
        "train_loader": DataLoader(TensorDataset(train, torch.arange(256) % 5), batch_size=64),
        "val_loader": DataLoader(TensorDataset(validation, torch.arange(128) % 5), batch_size=64),
        "images": torch.cat([validation[:4], torch.full((1, 3, 4, 4), float("nan"))]),
        "weight": model[3].weight,
        "bias": model[3].bias,
        "train_features": model[:3](train).detach(),
        "new_features": model[:3](validation[:4]).detach(),
    }
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    index = (README.parent / "docs" / "index.md").read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", index, re.DOTALL):
        exec(compile(block, "docs/index.md", "exec"), names)
    decision = names["decision"]
    assert torch.equal(decision.logits[:4], model(validation[:4]))
    assert decision.is_ood.tolist()[4] is True
    assert (tmp_path / "guard.safetensors").is_file()
    assert names["why"].distances.shape == (5, 5)
    torch.testing.assert_close(names["scores"], decision.scores[:4])


def test_links_of_the_readme_work_on_the_package_index_too() -> None:
    project = tomllib.loads((README.parent / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    base = f"{project['urls']['Repository']}/blob/main/"
    text = README.read_text(encoding="utf-8")
    targets = [
        *re.findall(r"\]\(([^)#]+)", text),
        *re.findall(r"^\[[^]]+\]: (\S+)$", text, re.MULTILINE),
    ]
    assert any(target.startswith(base) for target in targets)
    for target in targets:
        assert target.startswith("https://"), f"{target} is relative"
        if target.startswith(base):
            assert (README.parent / target.removeprefix(base)).exists(), target
        page = re.fullmatch(r"https://fdbd\.github\.io/fdbd/(.+)\.html", target)
        if page:
            assert (README.parent / "docs" / f"{page[1]}.md").exists(), target


def test_the_picture_above_the_fold_is_small_and_committed() -> None:
    text = README.read_text(encoding="utf-8")
    found = re.search(r"raw\.githubusercontent\.com/fdbd/fdbd/main/(\S+\.png)", text)
    assert found is not None
    assert text.index(found[0]) < 3000
    assert (README.parent / found[1]).stat().st_size < 300_000


def test_the_notice_names_every_source_of_the_features_and_weights_in_the_package() -> None:
    notice = (README.parent / "NOTICE").read_text(encoding="utf-8")
    bundle = load_bundle("cifar10-ce")
    for samples in (bundle.test, *bundle.ood):
        entry = info(samples.name)
        assert entry.title.split(",")[0] in notice, f"{entry.title} is not named"
    for name in list_zoo():
        assert name in notice
    text = (README.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert "NOTICE" in tomllib.loads(text)["project"]["license-files"], (
        "it is shipped with the package"
    )
