"""The files of experiments: all are there, all can be read at both scales, and slips are one clear line."""

from __future__ import annotations

import pytest

from fdbd.paper import find, list_experiments, run

NAMES = {
    *("table-cifar10", "table-imagenet", "table-vit", "table-densenet", "table-shaping", "table-regularization"),
    *("table-domain-shift", "figure-overview", "figure-regularization", "figure-deviation", "figure-distances"),
    *("figure-nearest-k", "distance-quality", "theorem-bound", "proposition-1", "proposition-2", "proposition-kl"),
    "complexity",
}


def test_every_table_figure_and_statement_of_the_paper_is_listed() -> None:
    assert set(list_experiments()) == NAMES


@pytest.mark.parametrize("scale", ["small", "paper"])
@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_experiment_says_what_the_paper_claims_and_what_it_runs_on(name: str, scale: str) -> None:
    experiment = find(name, scale)
    assert experiment.claim
    assert experiment.place
    models = experiment.settings.get("models", [])
    for model in models:
        assert "bundle" in model or {"model", "id", "ood"} <= set(model)
        assert "train_with" in model or model["model"].startswith("torchvision:"), "where do the weights come from?"
    theory = {"theorem-bound", "proposition-1", "proposition-2", "complexity"}
    assert bool(models) == (name not in theory)


def test_the_attack_has_the_papers_settings() -> None:
    attack = find("distance-quality").settings["attack"]
    assert attack == {"initial_constant": 2.0, "rate": 0.005, "steps": 500, "searches": 3}


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'table-vit'"):
        find("table-vits")
    with pytest.raises(ValueError, match="small or paper"):
        find("table-vit", "huge")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind = ", "not valid TOML"),
        ('kind = "nonsense"\ntitle = "t"\nclaim = "c"', "kind is 'nonsense'"),
        ('kind = "theorem"\ntitle = "t"', "needs a text 'claim'"),
    ],
)
def test_a_file_with_a_mistake_is_refused_in_one_sentence(text: str, message: str, tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        run(str(path), tmp_path)


def test_ones_own_file_is_an_experiment_like_any_other(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('kind = "theorem"\ntitle = "t"\nclaim = "c"\nseed = 1\n[small]\nseed = 2\n')
    experiment = find(str(path))
    assert (experiment.name, experiment.settings["seed"]) == ("mine", 2)
    assert find(str(path), "paper").settings["seed"] == 1
    with pytest.raises(FileNotFoundError, match="no experiment file"):
        find(str(tmp_path / "other.toml"))
