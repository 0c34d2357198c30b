"""The files of experiments: all are there, all can be read at every scale, and slips are one clear
line."""

from __future__ import annotations

import pytest

from fdbd.core.tables import read_toml
from fdbd.paper import find, list_experiments, run
from fdbd.paper.experiment import NETWORKS, SCALES
from fdbd.paper.settings import Attack, ModelEntry

NAMES = {
    *(
        "table-cifar10",
        "table-imagenet",
        "table-vit",
        "table-densenet",
        "table-shaping",
        "table-regularization",
    ),
    *(
        "table-domain-shift",
        "figure-overview",
        "figure-regularization",
        "figure-deviation",
        "figure-distances",
    ),
    *(
        "figure-nearest-k",
        "distance-quality",
        "theorem-bound",
        "proposition-1",
        "proposition-2",
        "proposition-kl",
    ),
    *("complexity", "sweep-percentiles", "regularization-gain"),
}


THEOREM = """kind = "theorem"
title = "t"
claim = "c"
seed = 1
sizes = [[2, 2]]
samples = 3
tries = 4
"""


def test_every_table_figure_and_statement_of_the_paper_is_listed() -> None:
    assert set(list_experiments()) == NAMES


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_experiment_says_what_the_paper_claims_and_what_it_runs_on(
    name: str, scale: str
) -> None:
    experiment = find(name, scale)
    assert experiment.claim
    assert experiment.place
    models = getattr(experiment.settings, "models", ())
    for model in models:
        assert model.bundle or (model.model and model.id and model.ood)
        source = model.model.partition(":")[0]
        is_published = source in ("public", "zoo", "torchvision", "timm")
        assert model.bundle or model.train_with or is_published, "where are the weights from?"
    theory = {"theorem-bound", "proposition-1", "proposition-2", "complexity"}
    assert bool(models) == (name not in theory and not getattr(experiment.settings, "untested", ""))


def test_the_attack_has_the_papers_settings() -> None:
    attack = find("distance-quality").settings.attack
    assert attack == Attack(initial_constant=2.0, rate=0.005, steps=500, searches=3)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'table-vit'"):
        find("table-vits")
    with pytest.raises(ValueError, match="small, public or paper"):
        find("table-vit", "huge")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind = ", "not valid TOML"),
        ('kind = "nonsense"\ntitle = "t"\nclaim = "c"', "kind is 'nonsense'"),
        ('kind = "theorem"\ntitle = "t"', "missing key 'claim'"),
        (f"{THEOREM}sizs = [[2, 2]]", "unknown key 'sizs', did you mean 'sizes'"),
        (f"{THEOREM}[smal]\ntries = 3", "unknown key 'smal'"),
        (f"{THEOREM}[paper]\ntris = 3", "scale paper: unknown key 'tris', did you mean 'tries'"),
        (f'{THEOREM}[small]\ntries = "many"', "tries: expected an integer, got text"),
        (
            'kind = "overview"\ntitle = "t"\nclaim = "c"\n'
            '[small]\nmodels = [{ network = "packaged-ce", titel = "x" }]',
            "unknown key 'titel'",
        ),
    ],
)
def test_a_file_with_a_mistake_is_refused_in_one_sentence(
    text: str, message: str, tmp_path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        run(str(path), tmp_path)


def test_ones_own_file_is_an_experiment_like_any_other(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f"{THEOREM}[small]\nseed = 2\n")
    experiment = find(str(path))
    assert (experiment.name, experiment.settings.seed) == ("mine", 2)
    assert find(str(path), "paper").settings.seed == 1
    with pytest.raises(FileNotFoundError, match="no experiment file"):
        find(str(tmp_path / "other.toml"))


def test_a_public_network_is_named_once_and_an_entry_of_its_own_comes_on_top(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    start = 'kind = "overview"\ntitle = "t"\nclaim = "c"\n[public]\nmodels = '
    path.write_text(start + '["resnet50", { network = "resnet20", limit = 7 }]')
    first, second = find(str(path), "public").settings.models
    assert (first.title, first.model) == ("ResNet-50", "public:resnet50")
    assert (second.model, second.limit) == ("public:resnet20", 7)
    path.write_text(start + '["resnet51"]')
    with pytest.raises(
        ValueError, match="no network is called 'resnet51', expected one of resnet50"
    ):
        find(str(path), "public")


def test_a_statement_that_nothing_can_decide_is_listed_with_the_reason(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    text = f'{THEOREM}not_tested = [{{ statement = "Pigs fly", why = "No pig is at hand." }}]\n'
    path.write_text(text)
    record = run(str(path), tmp_path)
    last = record["checks"][-1]
    assert (last["statement"], last["verdict"]) == ("Pigs fly", "not tested")
    assert record["verdict"].endswith("1 not tested")
    assert "– not tested**: Pigs fly. No pig is at hand." in (tmp_path / "mine.md").read_text()


@pytest.mark.parametrize("scale", ["small", "public"])
def test_rows_fitted_on_two_photographs_per_class_are_not_compared(scale: str) -> None:
    settings = find("table-imagenet", scale).settings
    titles = {model.title for model in settings.models}
    (entry,) = settings.not_comparable
    assert set(entry.models) == titles, "each model on ImageNet has the two photographs"
    compared = {second for _, second in settings.better}
    assert set(entry.detectors) <= compared
    assert any("SupCon" in untested.statement for untested in settings.not_tested)


def test_the_vit_at_the_papers_scale_is_the_papers() -> None:
    (model,) = find("table-vit", "paper").settings.models
    assert model.model == "timm:vit_base_patch16_384.orig_in21k_ft_in1k"
    assert model.paper_accuracy == 81.14


def test_every_network_has_known_keys_and_says_where_it_is_evaluated() -> None:
    networks = read_toml(NETWORKS, dict[str, ModelEntry])
    assert all(entry.bundle or (entry.model and entry.ood) for entry in networks.values())
